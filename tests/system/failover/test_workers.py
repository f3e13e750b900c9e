"""Two ingest workers on Ray take in what four actors send; whoever is killed, nothing is lost or there twice."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from broker.contract import errors
from learner.files import run_directory
from learner.run import local_fleet
from tests import conftest
from tests.fakes import previous_release
from tests.system import books
from tests.system.conftest import QUICK
from tests.system.delivery import test_brokers

pytestmark = pytest.mark.system
FLAGS = [*QUICK, "--keep-experience", "--evaluate-episodes", "0", "--message-steps", "100", "--ingest-workers", "2"]
FLAGS += ["--max-env-steps", "10000000", "--solved-return", "inf", "--json"]
ACTORS = ["pi-0", "pi-1", "pi-3", "pi-4"]
"""Two of either shard."""
BEGUN = r"2 ingest workers have begun \(pid (\d+), pid (\d+)\)"
BACK_S = 60.0
"""Far more than the 10 s that are wanted, on a machine with other work; what it took is printed."""


@pytest.fixture(autouse=True)
def needs_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        conftest.skip_or_fail("Ray is not installed (the extra `ray`)")


class Stderr:
    """What the learner has written so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd, self.text = capfd, ""

    def find(self, pattern: str) -> list[str]:
        self.text += self._capfd.readouterr().err
        return re.findall(pattern, self.text)


def totals(run: Path) -> list[tuple[int, int]]:
    """Steps of each shard that reached replay, and messages that were refused."""
    found = []
    for path in run_directory.ledgers(run):
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as book:
            found.append(book.execute("SELECT steps, refused FROM totals").fetchone())
    return found


def rows_of(run: Path, shard: int) -> int:
    """Messages in the ledger of a shard."""
    with contextlib.closing(sqlite3.connect(f"file:{run_directory.ledgers(run)[shard]}?mode=ro", uri=True)) as book:
        count: int = book.execute("SELECT count(*) FROM messages").fetchone()[0]
        return count


def listening(pid: int) -> set[str]:
    """Addresses at which a process and its descendants listen."""
    own, found = psutil.Process(pid), []
    for one in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [at for at in one.net_connections("tcp") if at.status == psutil.CONN_LISTEN]
    return {at.laddr.ip.removeprefix("::ffff:") for at in found}


def settle(fleet: local_fleet.LocalFleet, kept: books.Books) -> None:
    """Ends the actors' first lives, and waits for all that these accepted: none lost, none twice."""
    for actor in ACTORS:
        fleet.children[actor].send_signal(signal.SIGTERM)
    for actor in ACTORS:
        assert fleet.children[actor].wait(120.0) == errors.EXIT_OK
        fleet.start_actor(actor, kept.environment(actor))  # which sends what the life before left
    lives = [(actor, 0) for actor in ACTORS]
    conftest.wait_until(lambda: not kept.missing(kept.accepted(*lives)), "all that was accepted arrives", 30.0)
    balance = kept.balance(*lives)
    assert balance.holds and balance.dropped == 0, balance


def test_killed_workers_come_back_and_with_a_killed_broker_and_nothing_is_lost_or_twice(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet, run, said = start_fleet("mosquitto", tls=True), run_root / "run", Stderr(capfd)
    kept = books.Books(run_root / "books", run)
    before = previous_release.PreviousRelease(run_root / "before")
    before.start_actor(fleet, ACTORS[0], kept.environment(ACTORS[0]))  # it has not heard of shards
    for actor in ACTORS[1:]:
        fleet.start_actor(actor, kept.environment(actor))
    learner = fleet.start_learner([*FLAGS, "--run-dir", str(run), "--actors", str(len(ACTORS))])
    conftest.wait_until(lambda: said.find(BEGUN), "the workers have begun", 120.0)
    conftest.wait_until(lambda: (run / "policies").is_dir() and list((run / "policies").iterdir()), "a policy", 60.0)
    assert listening(learner.pid) == {"127.0.0.1"}, "Ray listens to this machine alone"
    began, at_began = time.monotonic(), rows_of(run, 1)
    kept.await_rows(50)

    own, others, killed = rows_of(run, 0), rows_of(run, 1), time.monotonic()
    os.kill(int(said.find(BEGUN)[0][0]), signal.SIGKILL)
    back = r"ingest worker [01] is back \(pid (\d+)\)"
    conftest.wait_until(lambda: said.find(back), "the worker is back", BACK_S)
    conftest.wait_until(lambda: rows_of(run, 0) > own + 25, "its shard takes in again", BACK_S)
    back_s, meanwhile = time.monotonic() - killed, rows_of(run, 1) - others
    assert meanwhile > 0, "the other one goes on"
    before_per_s = (others - at_began) / (killed - began)
    with capfd.disabled():
        print(
            f"a killed worker's shard took in again after {back_s:.1f} s; the other one took in "
            f"{meanwhile / back_s:.1f} messages/s meanwhile, {before_per_s:.1f} before"
        )

    both = [int(said.find(back)[0]), int(said.find(BEGUN)[0][1])]
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    test_brokers.kill_broker(fleet, 0)
    fleet.start_broker(0)
    killed, taken = time.monotonic(), [rows_of(run, shard) for shard in range(2)]
    conftest.wait_until(lambda: len(said.find(back)) == 3, "both are back", BACK_S)
    conftest.wait_until(
        lambda: all(rows_of(run, shard) > taken[shard] + 25 for shard in range(2)), "both take in again", BACK_S
    )
    with capfd.disabled():
        print(f"with both workers and the broker killed, both shards took in after {time.monotonic() - killed:.1f} s")

    settle(fleet, kept)
    found = kept.in_ledger()
    assert len(found[ACTORS[0], 0]) > 0, "of the schema before ours"
    family = psutil.Process(learner.pid).children(recursive=True)
    learner.send_signal(signal.SIGTERM)
    output, _ = learner.communicate(timeout=240.0)
    assert learner.returncode == errors.EXIT_INTERRUPTED
    summary, shards = json.loads(output), totals(run)
    assert summary["updates"] > 0
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["worker_restarts"] == 3
    assert "grant" not in summary["messages_refused"]
    assert min(steps for steps, _ in shards) > 0 and summary["env_steps"] == sum(steps for steps, _ in shards)
    _, alive = psutil.wait_procs(family, 10.0)
    assert not alive, "nothing of Ray outlives the learner"


class Succession:
    """Kills learners of a run with -9, and waits until each shard takes in again."""

    def __init__(self, run: Path, said: Stderr) -> None:
        self._run, self._said, self._begun = run, said, 1

    def kill(self, learner: subprocess.Popen[str]) -> None:
        self._family = psutil.Process(learner.pid).children(recursive=True)
        self._killed = time.monotonic()
        learner.send_signal(signal.SIGKILL)
        learner.wait()

    def took_s(self) -> tuple[float, float]:
        """Seconds from the kill until the next learner's workers had begun, and until both shards took in again."""
        self._begun += 1
        conftest.wait_until(lambda: len(self._said.find(BEGUN)) == self._begun, "workers have begun again", 120.0)
        begun_s, taken = time.monotonic() - self._killed, [rows_of(self._run, shard) for shard in range(2)]
        conftest.wait_until(
            lambda: all(rows_of(self._run, shard) > taken[shard] for shard in range(2)), "both take in", 60.0
        )
        back_s = time.monotonic() - self._killed
        workers = [one for one in self._family if str(one.pid) in self._said.find(BEGUN)[-2]]
        assert len(workers) == 2
        _, alive = psutil.wait_procs(workers, 30.0)
        assert not alive, "no worker outlives its learner"
        for one in self._family:  # agents of Ray's own stay about as long as they look for its head
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        return begun_s, back_s


def is_ready(standby: subprocess.Popen[str]) -> bool:
    """Whether the processes of its workers are there, and TensorFlow is loaded: meanwhile stderr is held back."""
    workers = 0
    for one in psutil.Process(standby.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            workers += "ray::Process" in " ".join(one.cmdline())
    return workers == 2 and os.readlink(f"/proc/{standby.pid}/fd/2") == os.readlink("/proc/self/fd/2")


@pytest.mark.slow
def test_a_killed_learner_takes_its_workers_along_and_its_run_goes_on_with_nothing_lost_or_twice(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet, run, said = start_fleet("mosquitto", tls=True), run_root / "run", Stderr(capfd)
    kept, following = books.Books(run_root / "books", run), Succession(run, said)
    for actor in ACTORS:
        fleet.start_actor(actor, [*kept.environment(actor), "--rate-hz", "100"])  # so that none waits for updates
    flags = [*FLAGS, "--samples-per-insert", "2", "--checkpoint-period-s", "2"]
    learner = fleet.start_learner([*flags, "--run-dir", str(run), "--actors", str(len(ACTORS))])
    conftest.wait_until(lambda: list(run.glob("checkpoints/*.npz")), "a checkpoint", 120.0)
    kept.await_rows(10)

    following.kill(learner)
    again = fleet.start_learner(["--resume", str(run), "--json"], "learner-2")
    by_resume = following.took_s()
    standby = fleet.start_learner(["--resume", str(run), "--standby", "--json"], "learner-3")
    conftest.wait_until(lambda: said.find("standing by for the run") and is_ready(standby), "one stands by", 120.0)
    following.kill(again)
    by_standby = following.took_s()
    with capfd.disabled():
        for how, (begun_s, back_s) in (("--resume", by_resume), ("--standby", by_standby)):
            print(f"after kill -9 of the learner, {how}: workers after {begun_s:.1f} s, both shards {back_s:.1f} s")

    settle(fleet, kept)
    standby.send_signal(signal.SIGTERM)
    output, _ = standby.communicate(timeout=240.0)
    assert standby.returncode == errors.EXIT_INTERRUPTED
    assert json.loads(output)["env_steps"] == sum(steps for steps, _ in totals(run))
