"""kill -9 of actor and learner: every step that the spool accepted is in the ledger, and none is there twice."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker import errors
from learner import local_fleet
from tests import conftest as brokers
from tests.system import books
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.mark.parametrize("kind", brokers.KINDS)
def test_every_accepted_step_is_in_the_ledger_once(
    kind: str, start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, run = run_root / "log", run_root / "run"
    log.mkdir()
    monkeypatch.setenv("COUNTING_LOG", str(log))
    fleet = start_fleet(kind)
    kept = books.Books(log, run)
    common = ["--keep-experience", "--evaluate-episodes", "0", "--checkpoint-period-s", "0.5", "--json"]
    pace = ["--message-steps", "100", "--samples-per-insert", "4", "--max-env-steps", "10000000"]

    def kill(name: str) -> None:
        fleet.children[name].kill()
        fleet.children[name].wait()

    def stop_with_a_surplus(life: int) -> None:
        """A learner stopped when the last grant was used up has nothing left to come: on, and stop again."""
        deadline = time.monotonic() + 60.0
        while True:
            fleet.children["learner"].send_signal(signal.SIGSTOP)
            with contextlib.suppress(AssertionError):
                brokers.wait_until(lambda: kept.accepted(life) - kept.in_ledger().keys(), "a surplus", 0.5)
                return
            assert time.monotonic() < deadline, "the spool never held more than the ledger"
            fleet.children["learner"].send_signal(signal.SIGCONT)
            kept.await_rows(1)

    fleet.start_actor("pi", ["--env", books.ENV])
    fleet.start_learner([*QUICK, *common, *pace, "--run-dir", str(run)])
    for round_ in range(4):
        kept.await_rows(20)
        if round_ % 2:  # both at once: what has no receipt is in the spool alone
            brokers.wait_until(lambda: list((run / "checkpoints").glob("*.npz")), "a checkpoint", 60.0)
            stop_with_a_surplus(round_)
            kill("pi")
            kill("learner")
            fleet.start_learner(["--resume", str(run), *common])
        else:
            kill("pi")
        fleet.start_actor("pi", ["--env", books.ENV])
        brokers.wait_until(lambda: kept.boots() == round_ + 2, "the next boot's messages follow", 90.0)  # noqa: B023
    kept.await_rows(5)
    fleet.children["learner"].send_signal(signal.SIGTERM)
    output, _ = fleet.children["learner"].communicate(timeout=60.0)
    assert fleet.children["learner"].returncode == errors.EXIT_INTERRUPTED

    found = kept.in_ledger()
    assert max(found.values()) == 1
    for life in range(4):  # the fifth still holds some
        accepted = kept.accepted(life)
        assert len(accepted) >= 1000
        assert accepted - found.keys() == set()
        assert {n for k, n in found if k == life} <= set(range(1, kept.taken(life) + 1))
    summary = json.loads(output)
    assert summary["env_steps"] == len(found), "what is in the ledger is in replay"
    assert summary["steps_missed"] == 0
    assert summary["messages_refused"].keys() <= {"duplicate", "gap"}
