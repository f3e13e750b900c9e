"""A learner that stands by: it goes on where a killed one was, alone, and never while that one lives."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from broker.contract import codec, errors, messages
from learner import __main__ as main
from learner import config
from learner.algorithms import registry
from learner.experience import ledger
from learner.files import records, run_directory
from learner.fleet import gathering, roster, session
from learner.policies import publisher
from learner.run import local_fleet, train
from tests import conftest
from tests.learner.policies import test_adopting
from tests.system import books
from tests.system.conftest import QUICK
from tests.system.failover import test_take_over

pytestmark = pytest.mark.system
FLAGS = [*QUICK, "--keep-experience", "--evaluate-episodes", "0", "--message-steps", "100"]
FLAGS += ["--max-env-steps", "10000000", "--checkpoint-period-s", "2"]
BACK_S = 60.0  # on a machine that is slow, and busy


class Stderr:
    """What all learners of a test have written so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd, self._text = capfd, ""

    def count(self, words: str) -> int:
        """Returns how often some words were written."""
        self._text += self._capfd.readouterr().err
        return len(re.findall(words, self._text))


def epoch_of_newest_policy(run: Path) -> int:
    """Returns the epoch in which the newest policy of a run was published; 0 before there is one."""
    while True:
        try:
            newest = max((run / "policies").glob("*.json"), key=lambda file: file.stat().st_mtime_ns, default=None)
            epoch: int = json.loads(newest.read_text())["epoch"] if newest else 0
        except FileNotFoundError:  # a learner keeps few, and has just removed one of those that were listed
            continue
        return epoch


def stand_still(learner: subprocess.Popen[str], run: Path) -> None:
    """Stops a learner between two commits, and takes its locks, as shared storage does from one it hears nothing of."""
    stopped = psutil.Process(learner.pid)
    book = sqlite3.connect(run / run_directory.LEDGER, timeout=0.0, isolation_level=None)
    with contextlib.closing(book):
        while True:
            learner.send_signal(signal.SIGSTOP)
            conftest.wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "it stands still")
            try:
                book.execute("BEGIN IMMEDIATE")
                book.execute("ROLLBACK")
                break
            except sqlite3.OperationalError:  # a commit has the file
                learner.send_signal(signal.SIGCONT)
    (run / ".lock").unlink()


def retained_epochs(fleet: local_fleet.LocalFleet) -> set[int]:
    """Returns those under which a learner has said what the broker retains."""
    listener = test_take_over.Listener(fleet)
    try:
        return set(listener.retained().values())
    finally:
        listener.close()


def test_two_standbys_go_on_one_after_the_other_and_who_stood_still_stays_down(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet, run, said = start_fleet(), run_root / "run", Stderr(capfd)
    kept = books.Books(run_root / "books", run)
    actors = ["pi", "pi-1", "pi-2"]
    for actor in actors:
        fleet.start_actor(actor, kept.environment(actor))
    live = fleet.start_learner([*FLAGS, "--run-dir", str(run), "--actors", "3"])
    conftest.wait_until(lambda: list(run.glob("checkpoints/*.npz")), "the live learner has saved", 60.0)
    standbys = [fleet.start_learner(["--resume", str(run), "--standby"], f"learner-{name}") for name in "ab"]
    conftest.wait_until(lambda: said.count("standing by for the run") == 2, "both stand by", 30.0)
    kept.await_rows(50)
    assert said.count("takes over") == 0
    conftest.wait_until(lambda: epoch_of_newest_policy(run) > 0, "a policy is published", 60.0)
    epochs = [epoch_of_newest_policy(run)]

    def await_successor(number: int, what: str) -> None:
        lost_at, rows = time.monotonic(), kept.rows()
        conftest.wait_until(lambda: kept.rows() > rows, "experience is committed again", BACK_S)
        # Above the last one, not next to it: who learns of a successor may use one up (`Session._busy`)
        conftest.wait_until(lambda: epoch_of_newest_policy(run) > epochs[-1], "the next session publishes", BACK_S)
        epochs.append(epoch_of_newest_policy(run))
        back_s = time.monotonic() - lost_at
        with capfd.disabled():
            print(f"training went on {back_s:.1f} s after the learner {what}")
        kept.await_rows(50)
        assert said.count("takes over, and goes on with the run") == number

    stand_still(live, run)
    await_successor(1, "stood still")
    assert [one.poll() for one in standbys] == [None, None], "the other one goes on standing by"
    live.send_signal(signal.SIGCONT)
    assert live.wait(120.0) in (errors.FleetBusy.exit_code, errors.RunError.exit_code)
    kept.await_rows(50)
    assert retained_epochs(fleet) == {epochs[-1]}, "whatever it said before it noticed is replaced"

    lock = (run / ".lock").stat().st_ino
    (second,) = [one for one in standbys if lock in inodes(one.pid)]
    second.send_signal(signal.SIGKILL)
    second.wait()
    await_successor(2, "was killed")
    assert retained_epochs(fleet) == {epochs[-1]}

    for actor in actors:
        fleet.children[actor].send_signal(signal.SIGTERM)
    for actor in actors:
        assert fleet.children[actor].wait(120.0) == errors.EXIT_OK
        fleet.start_actor(actor, kept.environment(actor))  # which sends what the life before left
    lives = [(actor, 0) for actor in actors]
    conftest.wait_until(lambda: not kept.missing(kept.accepted(*lives)), "all that was accepted arrives", 20.0)
    balance = kept.balance(*lives)
    assert balance.holds and balance.dropped == 0, balance


def inodes(pid: int) -> set[int]:
    """Returns the files that a process has open."""
    found = set()
    for number in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(number.stat().st_ino)
    return found


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back what the command does to signals: it runs in this process, which has loaded TensorFlow once."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.mosquitto
@pytest.mark.usefixtures("handlers")
def test_without_its_run_directory_a_standby_goes_on_with_the_policy_that_brokers_retain(
    start_fleet: Callable[..., local_fleet.LocalFleet],
    run_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fleet, run = start_fleet("mosquitto"), run_root / "run"
    monkeypatch.setenv("ACTORQ_HOME", str(fleet.directory / "home"))
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(session, "SILENCE_S", 0.3)
    monkeypatch.setattr(train, "_set_up_threads", lambda settings: None)  # it is in use in this process
    fleet.start_actor("pi", ["--env", "CartPole-v1", "--heartbeat-s", "0.2"])
    live = _publish(config.TrainConfig(fleet=fleet.name, broker=(fleet.address,), wait_s=60.0))
    log = fleet.directory / "logs" / "pi.log"
    conftest.wait_until(lambda: f"policy {live}.1 acts" in log.read_text(), "it acts", 60.0)
    words = ["train", "--standby", "--fleet", fleet.name, "--broker", fleet.address, "--run-dir", str(run), "--json"]
    words += ["--algorithm", "dqn", "--hidden", "16,16", "--learning-starts", "300", "--max-env-steps", "1500"]
    words += ["--evaluate-episodes", "0", "--solved-return", "inf", "--gate-agreement-min", "0"]
    words += ["--no-energy", "--keep-experience"]
    assert main.main(words) == errors.EXIT_OK
    output, said = capfd.readouterr()
    assert f"begins with the fleet's policy {live}.1. Lost are replay and ledger" in said, said
    assert json.loads(output.splitlines()[-1])["updates"] > 0
    chosen = tomllib.loads((run / "config.toml").read_text())
    assert chosen["epsilon_start"] == chosen["epsilon_end"], "it does not explore anew"
    assert epoch_of_newest_policy(run) == live + 1
    first = next(ledger.bodies(run / run_directory.LEDGER))[1]
    experience = codec.decode(messages.Experience, first)
    assert (experience.epoch, experience.version) == (live, 1), "the actor goes on acting on what it has"
    assert not fleet.ended()


def _publish(settings: config.TrainConfig) -> int:
    """Publishes a policy as a learner does that then ends; returns its epoch."""
    learner = session.Session.open(settings)
    actors = roster.Roster(learner.id, learner.epoch, "")
    try:
        gathering.gather(settings, learner, actors, threading.Event())
        spec, chosen = actors.the_spec, config.DqnConfig(hidden=(16, 16))
        algorithm = registry.make(config.Settings(settings, chosen, config.GateConfig()), spec)
        x = np.random.default_rng(0).standard_normal((256, 4)).astype(np.float32)
        algorithm.normalize(x)
        going_out = publisher.Publisher(
            *(learner, learner.topics, spec, algorithm.head, learner.epoch, 0, test_adopting.ANY_POLICY, None),
            records.Records(),
        )
        assert going_out.publish(algorithm.policy_layers(), x[:192], x[192:]).result().passed
        learner.announce("", 1)
        going_out.close()
        return learner.epoch
    finally:
        learner.close()
