"""kill -9 of actor and learner: every step that the spool accepted is in the ledger, and none is there twice."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.contract import errors
from learner.run import local_fleet
from tests import conftest as brokers
from tests.system import books
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.mark.parametrize("kind", brokers.KINDS)
def test_every_accepted_step_is_in_the_ledger_once(
    kind: str, start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    run = run_root / "run"
    fleet = start_fleet(kind)
    kept = books.Books(run_root / "books", run)
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
                brokers.wait_until(lambda: kept.missing(kept.accepted(("pi", life))), "a surplus", 0.5)
                return
            assert time.monotonic() < deadline, "the spool never held more than the ledger"
            fleet.children["learner"].send_signal(signal.SIGCONT)
            kept.await_rows(1)

    fleet.start_actor("pi", kept.environment("pi"))
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
        fleet.start_actor("pi", kept.environment("pi"))
        brokers.wait_until(lambda: kept.boots() == round_ + 2, "the next boot's messages follow", 90.0)  # noqa: B023  called at once
    kept.await_rows(5)
    fleet.children["learner"].send_signal(signal.SIGTERM)
    output, _ = fleet.children["learner"].communicate(timeout=240.0)
    assert fleet.children["learner"].returncode == errors.EXIT_INTERRUPTED

    lives = [("pi", life) for life in range(4)]  # the fifth still holds some
    balance = kept.balance(*lives)
    assert balance.lost == balance.dropped == balance.twice == balance.invented == 0
    assert min(map(len, kept.accepted(*lives).values())) >= 1000
    summary = json.loads(output)
    steps = sum(map(len, kept.in_ledger().values()))
    assert summary["env_steps"] == steps, "what is in the ledger is in replay"
    assert summary["steps_missed"] == 0
    assert summary["messages_refused"].keys() <= {"duplicate", "gap"}
