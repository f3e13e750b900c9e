"""A learner that stands by: it goes on where a killed one was, alone, and never while that one lives."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.contract import errors
from learner.run import local_fleet
from tests import conftest
from tests.system import books
from tests.system.conftest import QUICK

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
    newest = max((run / "policies").glob("*.json"), key=lambda file: file.name, default=None)
    epoch: int = json.loads(newest.read_text())["epoch"] if newest else 0
    return epoch


def test_of_two_standbys_one_goes_on_where_the_killed_learner_was(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet, run, said = start_fleet(), run_root / "run", Stderr(capfd)
    kept = books.Books(run_root / "books", run)
    actors = [f"pi-{number}" for number in range(3)]
    for actor in actors:
        fleet.start_actor(actor, kept.environment(actor))
    live = fleet.start_learner([*FLAGS, "--run-dir", str(run), "--actors", "3"])
    conftest.wait_until(lambda: list(run.glob("checkpoints/*.npz")), "the live learner has saved", 60.0)
    standbys = [fleet.start_learner(["--resume", str(run), "--standby"], f"learner-{name}") for name in "ab"]
    conftest.wait_until(lambda: said.count("standing by for the run") == 2, "both stand by", 30.0)
    kept.await_rows(50)
    assert said.count("takes over") == 0
    conftest.wait_until(lambda: epoch_of_newest_policy(run) > 0, "a policy is published", 60.0)
    epoch = epoch_of_newest_policy(run)

    live.send_signal(signal.SIGKILL)
    live.wait()
    killed_at, rows = time.monotonic(), kept.rows()
    conftest.wait_until(lambda: kept.rows() > rows, "experience is committed again", BACK_S)
    conftest.wait_until(lambda: epoch_of_newest_policy(run) == epoch + 1, "the next session publishes", BACK_S)
    back_s = time.monotonic() - killed_at
    with capfd.disabled():
        print(f"training went on {back_s:.1f} s after the kill")
    kept.await_rows(50)
    assert said.count("takes over, and goes on with the run") == 1
    assert [one.poll() for one in standbys] == [None, None], "the other one goes on standing by"

    for actor in actors:
        fleet.children[actor].send_signal(signal.SIGTERM)
    for actor in actors:
        assert fleet.children[actor].wait(20.0) == errors.EXIT_OK
        fleet.start_actor(actor, kept.environment(actor))  # which sends what the life before left
    lives = [(actor, 0) for actor in actors]
    conftest.wait_until(lambda: not kept.missing(kept.accepted(*lives)), "all that was accepted arrives", 20.0)
    balance = kept.balance(*lives)
    assert balance.holds and balance.dropped == 0, balance
