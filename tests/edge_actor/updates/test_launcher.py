"""The launcher and real processes: a release that works is kept, any other one given up, and no pulled plug hurts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from edge_actor.updates import launcher
from tests import conftest
from tests.fakes import releases

HERE = Path(__file__).parent
PROGRAM = (HERE / "program.py").read_text()
NAME = "9.0-release"


class Board:
    """A board with a program that was set up on it, and systemd, which starts that again whenever it ends."""

    def __init__(self, directory: Path, way: str = "good", limit_s: float = 20.0) -> None:
        self.directory = directory
        self.root = directory / "releases"
        program = PROGRAM.replace('WAY = "good"', f'WAY = "{way}"')
        self.wheel = releases.wheel(directory, releases.tiny(program))
        base = releases.lay_out(directory / "base", releases.tiny(PROGRAM))
        (base / "sitecustomize.py").write_text((HERE / "plug.py").read_text())
        wheel = {"name": self.wheel.name, "length": self.wheel.stat().st_size}
        listed = {"files": 100, "unpacked_bytes": 1 << 20, "wheels": [wheel]}
        wanted = {"name": NAME, "wheel": str(self.wheel), "serial": 5, "limit_s": limit_s, "listed": listed}
        (directory / "wanted.json").write_text(json.dumps(wanted))
        self.environment = releases.environment(base, releases.ROOT, ACTORQ_RELEASES=str(self.root))
        self.environment["PLUG_COUNT"] = str(directory / "steps")
        self.child: subprocess.Popen[bytes] | None = None
        self.codes: list[int] = []

    @property
    def log(self) -> list[list[str]]:
        path = self.directory / "log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def steps(self) -> int:
        """Steps that changed the disk until now."""
        return (self.directory / "steps").stat().st_size

    def start(self, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "edge_actor.updates.launcher", *(words or ["run"])]
        with (self.directory / "stderr").open("a") as stderr:
            self.child = subprocess.Popen(command, env=self.environment, stderr=stderr, start_new_session=True)

    def stop(self) -> None:
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
            self.child = None

    def act(self, pull_at: tuple[int, ...] = (), timeout_s: float = 90.0) -> str:
        """Runs until something acts for good; returns its name. `pull_at`: steps at which the plug is pulled."""
        self.environment["PLUG_AT"] = ",".join(map(str, pull_at))
        until = time.monotonic() + timeout_s
        seen = len(self.log)
        self.start()
        while not (acting := [line[1] for line in self.log[seen:] if line[0] == "acts"]):
            assert time.monotonic() < until, f"{self.log} {(self.directory / 'stderr').read_text()[-2000:]}"
            assert self.child is not None
            if self.child.poll() is not None:
                self.codes.append(self.child.returncode)
                self.start()
            time.sleep(0.005)
        self.stop()
        return acting[-1]

    def check_whole(self) -> None:
        """What acts is whole, and nothing is left over that could be taken for a release."""
        name = launcher.current(self.root)
        assert launcher.read(self.root / "trial") == {}
        for file, text in releases.tiny(PROGRAM).items() if name else ():
            assert (self.root / name / "site" / file).read_text() == text


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Callable[..., Board]]:
    made: list[Board] = []

    def make(*args: Any) -> Board:
        made.append(Board(tmp_path / f"board-{len(made)}", *args))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_its_words_are_warnings_where_they_go_to_the_journal(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("wb") as file:
        about = os.fstat(file.fileno())
        for stream in (f"{about.st_dev}:{about.st_ino}", "1:1"):
            command = [sys.executable, "-c", "from edge_actor.updates import launcher; launcher.warn('x')"]
            subprocess.run(command, env=os.environ | {"JOURNAL_STREAM": stream}, stderr=file, check=True)
    assert said.read_text() == "<4>actorq-launch: x\nactorq-launch: x\n"


def test_a_release_that_works_is_kept(board: Callable[..., Board]) -> None:
    one = board()
    assert one.act() == NAME
    assert one.log == [["starts", "base"], ["starts", NAME], ["acts", NAME]]
    assert one.codes == [75]
    assert one.act() == NAME, "and by the next start too"
    one.check_whole()
    assert (one.root / "serial").read_text() == "5"


@pytest.mark.parametrize(
    ("way", "limit_s", "why"),
    [("crashes", 20.0, "it_ended_with_10_before"), ("hangs", 2.0, "within_2_s_it_did_not_say")],
)
def test_one_that_does_not_work_is_given_up(board: Callable[..., Board], way: str, limit_s: float, why: str) -> None:
    one = board(way, limit_s)
    assert one.act() == "base"
    assert [line[:2] for line in one.log] == [
        ["starts", "base"],
        ["starts", NAME],
        ["starts", "base"],
        ["gave_up", NAME],
        ["acts", "base"],
    ]
    assert one.log[3][2].startswith(why)
    assert not (one.root / NAME).exists()
    assert one.codes == [75], "the launcher needed nobody to go back"
    one.check_whole()


def test_one_that_fills_the_disk_is_given_up(board: Callable[..., Board]) -> None:
    one = board("fills")
    one.environment["PLUG_COUNT"] = ""  # a file that grows
    (one.directory / "stderr").symlink_to(os.devnull)  # as a journal, it takes all
    assert one.act() == "base"
    assert one.log == [["starts", "base"], ["starts", NAME], ["starts", "base"], ["gave_up", NAME], ["acts", "base"]]
    assert one.codes == [75], "the launcher needed nobody to go back"
    assert launcher.read(one.root / "failed")["why"] == "", "it could not be written down"
    assert not (one.root / NAME).exists(), "what it took is free again"
    one.check_whole()
    assert one.act() == "base"


@pytest.mark.slow
def test_wherever_the_plug_is_pulled_a_release_that_works_acts(board: Callable[..., Board]) -> None:
    whole = board()
    whole.act()
    steps = whole.steps
    assert steps > 25, "an update changes the disk in so many steps, of which each is a moment"
    drawn = random.Random(27)
    moments = sorted(drawn.sample(range(1, steps + 1), 20))
    boards = [board() for _ in moments]

    def pull(one: Board, at: int) -> None:
        assert one.act((at,)) == NAME, f"pulled once, at step {at} of {steps}: {one.log}"
        assert one.codes.count(-signal.SIGKILL) == 1, one.codes
        one.check_whole()

    with futures.ThreadPoolExecutor(2) as two:
        list(two.map(pull, boards, moments))


@pytest.mark.parametrize("way", ["good", "crashes"])
def test_a_plug_that_is_pulled_again_and_again(board: Callable[..., Board], way: str) -> None:
    drawn = random.Random(5)
    for _ in range(2):
        one = board(way)
        pulled = tuple(sorted(drawn.sample(range(1, 60), 4)))
        acting = one.act(pulled)
        assert acting in ("base", NAME) if way == "good" else acting == "base", pulled
        assert -signal.SIGKILL in one.codes, f"none of the steps {pulled} was reached"
        one.check_whole()
        assert one.act() == acting


def test_a_damaged_note_and_a_program_that_was_replaced(board: Callable[..., Board]) -> None:
    one = board()
    assert one.act() == NAME
    (one.root / "trial").write_text("{")
    assert one.act() == NAME
    (one.root / NAME / "base").write_text("/elsewhere 3.9")
    (one.root / "failed").write_text(json.dumps(dataclasses.asdict(_Note())))
    assert one.act() == "base", "what was set up anew acts"
    (one.root / NAME / "base").write_bytes(b"\xff")
    assert one.act() == "base", "nor does what cannot be read count"
    for damaged in ("[" * 100_000, '{"name": "x", "number": 1e999, "limit_s": 1, "starts": 0}', "\xff"):
        (one.root / "trial").write_text(damaged, "latin-1")
        assert launcher.read(one.root / "trial")["starts"] == launcher.STARTS


@dataclasses.dataclass
class _Note:
    name: str = NAME
    number: int = 7
    limit_s: float = 1.0
    starts: int = 1
    why: str = "for a test"


@pytest.mark.parametrize("asks", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_a_trial_ends_it_in_order_and_it_is_tried_once_more(
    board: Callable[..., Board], asks: signal.Signals
) -> None:
    one = board("hangs")
    one.start()
    assert one.child is not None and one.child.wait(20.0) == 75
    one.start()
    conftest.wait_until(lambda: ["starts", NAME] in one.log, "it is tried", 20.0)
    status = Path(f"/proc/{one.child.pid}/status")
    caught = re.compile(r"SigCgt:\s+([0-9a-f]+)")
    conftest.wait_until(lambda: int(caught.findall(status.read_text())[0], 16) >> signal.SIGTERM - 1 & 1, "it listens")
    one.child.terminate() if asks == signal.SIGTERM else os.killpg(one.child.pid, asks)  # as Ctrl-C does
    assert one.child.wait(10.0) in (128 + signal.SIGTERM, 128 + asks)
    assert launcher.read(one.root / "trial")["starts"] == 1
    launcher.write(one.root / "trial", launcher.read(one.root / "trial") | {"limit_s": 0.3})
    assert one.act() == "base"
    assert launcher.read(one.root / "failed")["starts"] == 2, "it was started twice"


def test_a_person_who_looks_tries_nothing(board: Callable[..., Board]) -> None:
    one = board("crashes")
    one.start()
    assert one.child is not None and one.child.wait(20.0) == 75
    before = launcher.read(one.root / "trial")
    assert before["starts"] == 0
    one.start("check")
    conftest.wait_until(lambda: one.log.count(["starts", "base"]) == 2, "it runs what was set up", 20.0)
    one.stop()
    assert launcher.read(one.root / "trial")["starts"] <= 0


def test_a_board_whose_disk_takes_nothing_acts(board: Callable[..., Board]) -> None:
    one = board()
    one.start()
    assert one.child is not None and one.child.wait(20.0) == 75
    (one.root / ".lock").unlink(missing_ok=True)
    (one.root / ".trial").unlink(missing_ok=True)
    (one.root / ".trial").mkdir()  # the note cannot be replaced
    (one.root / "failed").write_text(json.dumps(dataclasses.asdict(_Note())))
    assert one.act() == "base"
    assert ["starts", NAME] not in one.log
    assert "has to wait" in (one.directory / "stderr").read_text()
