"""The order `update`: taken, tried by the next process, and answered whatever becomes of that."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.contract import messages, topics
from broker.program import storage
from edge_actor import config
from edge_actor.orders import log_lines, order_log, release_trial, runner
from edge_actor.updates import launcher, release_directory, updater

KEY = bytes(32)
DIGEST = "ab" * 32
NAME = "2.0-release"
TRIAL = {"name": NAME, "number": 7, "limit_s": 30.0, "starts": 1}


class Board:
    """The order runner of an actor that the launcher started; `start` makes its next process."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.root = directory / "releases"
        self.settings = config.ActorConfig(**({"allow": ("update", "set", "restart", "reboot")} | settings))
        self.key = KEY
        for name in (NAME, "1.9-before"):
            (self.root / name).mkdir(parents=True)
            (self.root / name / "base").write_text(launcher.base())
            (self.root / name / "serial").write_text("5")
        self.start("1.9-before")

    def start(self, running: str) -> None:
        self.log = order_log.OrderLog.open(self.directory, KEY)
        directory = release_directory.ReleaseDirectory(self.root, running)
        trial = release_trial.resume(self.log, directory)
        takes = updater.Updater(
            directory, self.key, topics.Topics("lab"), lambda _: None, version="1.9", reserve_bytes=0
        )
        self.takes, self.directory_of_releases = takes, directory
        takes.begin = lambda wanted: setattr(takes, "_thread", object())  # type: ignore[method-assign]
        takes.close = lambda: None  # type: ignore[method-assign]
        self.answers: list[messages.Answer] = []
        self.starts: list[str] = []
        self.proving = release_trial.ReleaseTrial(self.log, takes, trial)
        lines = log_lines.LogLines()
        self.runner = runner.OrderRunner(
            self.log, self.settings, lines, self.answers.append, self.starts.append, self.proving
        )

    def give(self, number: int = 7, kind: str = "update", **options: str) -> messages.Answer:
        options = options or {"release": DIGEST, "trial_s": "30"}
        self.runner.run(messages.Orders((messages.Instruction(number, kind, time.time() + 1e6, options),)))
        return self.answers[-1]

    def finds(self, outcome: str) -> None:
        """What taking the release comes to."""
        wanted = updater.Wanted(7, DIGEST, 30.0)
        self.takes.result = updater.Result(wanted, outcome, "a text", NAME, 5)

    def put_on_trial(self) -> None:
        """The release is ordered, found good so far, and noted for the next process to try."""
        self.give()
        self.finds("ready")
        self.poll()

    def poll(self, acts: bool | None = None, receipt: bool | None = None) -> str:
        self.runner.poll(lambda: acts, lambda: receipt)
        return self.answers[-1].outcome if self.answers else ""

    def note(self, name: str) -> Mapping[str, Any]:
        return launcher.read(self.root / name)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_a_release_is_tried_by_the_next_process_and_kept(board: Board) -> None:
    assert board.give().outcome == "taken"
    assert board.give(8).text.startswith("another release is being taken")
    assert "a release is being taken" in board.give(9, "set", rate_hz="5").text
    assert "a release is being taken or tried" in board.give(10, "reboot").text and board.starts == []
    board.finds("ready")
    assert board.poll() == "taken" and board.starts == ["update"]
    assert board.note("trial") == {**TRIAL, "starts": 0, "why": ""}

    board.start(NAME)
    assert board.give(11, "reboot").outcome == "refused" and board.starts == []
    board.answers.clear()
    for acts, receipt in ((None, None), (False, None), (True, False), (False, True)):
        assert board.poll(acts, receipt) == "", "it has not proved itself"
    assert launcher.current(board.root) == ""
    assert board.poll(True, True) == "done"
    assert launcher.current(board.root) == NAME and board.note("trial") == {}
    board.start(NAME)
    assert board.give().outcome == "done", "asked again"


def test_a_learner_that_wants_nothing_is_proof_after_a_while(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.put_on_trial()
    board.start(NAME)
    assert board.poll(True, None) == ""
    monkeypatch.setattr(release_trial, "_QUIET_S", 0.0)
    time.sleep(0.01)
    assert board.poll(False, None) == "" and board.poll(True, None) == "", "it acted not all the time"
    time.sleep(0.01)
    assert board.poll(True, None) == "done"


def test_a_release_that_was_given_up_is_undone_with_the_reason(board: Board) -> None:
    board.put_on_trial()
    launcher.give_up(board.root, "it ended with 3")
    board.start("1.9-before")
    answer = board.give()
    assert (answer.outcome, answer.text) == ("undone", f"release {NAME} was given up: it ended with 3")
    assert board.note("failed") == {}
    board.start("1.9-before")
    assert board.give().outcome == "undone", "told again, and not forgotten"


def test_one_that_was_given_up_a_moment_ago_cannot_keep_itself(board: Board) -> None:
    board.put_on_trial()
    board.start(NAME)
    launcher.give_up(board.root, "too late")
    assert board.poll(True, True) == ""
    assert launcher.current(board.root) == ""


def test_one_that_cannot_be_kept_goes_on_trying(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.put_on_trial()
    board.start(NAME)
    serials = (board.root / NAME / "serial", board.root / "serial")
    for serial in serials:
        serial.write_text("damaged")
        assert board.poll(True, True) == ""
        serial.write_text("4")
        board.proving._judge_again_s = 0.0
    assert board.poll(True, True) == "done"


def test_one_that_takes_the_room_that_must_stay_free_is_not_kept(board: Board) -> None:
    board.put_on_trial()
    board.start(NAME)
    board.takes._reserve_bytes = 1 << 60
    assert board.poll(True, True) == "" and launcher.current(board.root) == ""
    board.takes._reserve_bytes = 0
    board.proving._judge_again_s = 0.0
    assert board.poll(True, True) == "done"


def test_a_reason_that_a_full_disk_did_not_take_is_told_as_that(board: Board) -> None:
    board.put_on_trial()
    (board.root / ".failed").mkdir()  # the note cannot be written
    launcher.give_up(board.root, "it ended with 3")
    board.start("1.9-before")
    assert board.give().text == f"release {NAME} was given up: the disk was too full to note why"


def test_a_process_that_ended_while_it_took_a_release(board: Board) -> None:
    board.give()
    board.start("1.9-before")
    answer = board.give()
    assert answer.outcome == "failed" and "order it again" in answer.text


def test_what_was_kept_just_before_the_plug_was_pulled_is_told(board: Board) -> None:
    board.put_on_trial()
    assert launcher.confirm(board.root, NAME)
    board.start(NAME)
    assert board.poll(True, True) == "done"


@pytest.mark.parametrize("outcome", ["refused", "failed", "done"])
def test_what_comes_of_taking_it_is_told(board: Board, outcome: str) -> None:
    board.give()
    board.finds(outcome)
    assert board.poll() == outcome and board.starts == []
    assert board.note("trial") == {}
    assert board.give(8).outcome == "taken", "and another may be taken"


def test_nothing_is_tried_that_cannot_be_written_down(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    board.give()
    board.finds("ready")
    with monkeypatch.context() as broken:
        broken.setattr(storage, "write_atomic", full)
        assert board.poll() == "failed"
    assert board.starts == [] and board.note("trial") == {}


@pytest.mark.parametrize(
    "options",
    [
        {"release": "../x"},
        {"release": DIGEST, "trial_s": "nan"},
        {"release": DIGEST, "trial_s": "1e9"},
        {"trial_s": "30"},
        {"release": DIGEST, "trial_s": "x"},
    ],
)
def test_an_order_that_says_nonsense_is_refused(board: Board, options: dict[str, str]) -> None:
    assert board.give(7, "update", **options).outcome == "refused"


def test_who_takes_none_says_why(tmp_path: Path) -> None:
    assert "do not allow it" in Board(tmp_path / "default", allow=config.ActorConfig().allow).give().text
    without = Board(tmp_path / "without")
    without.key = b""
    without.start("1.9-before")
    assert "has no release key" in without.give().text
