"""A learner that stands still under load: actors wait, nobody's memory grows, and all of it arrives afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from edge_actor.experience import window
from learner.experience import ingest
from learner.fleet.arriving import inbox
from learner.run import local_fleet
from tests import conftest
from tests.system import books
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.system, pytest.mark.slow]
STILL_S = 20.0
"""Longer than the keep-alive: the broker gives the learner up, and forgets what it had for it."""
SPOOL_BYTES = 24_000_000
MB = 1_000_000


def memory_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss / MB)


def _trains(run: Path) -> bool:
    return any(row["updates"] for row in conftest.rows_of(run / "metrics.jsonl"))


def test_a_learner_that_stands_still_loses_nothing_and_nobody_grows(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    """Each step has 4 KB, and 400 000 steps (1.6 GB) are granted ahead: only back-pressure holds the actors back."""
    run = run_root / "run"
    fleet = start_fleet("mosquitto")
    kept = books.Books(run_root / "books", run)
    actors = ("one", "two")
    for name in actors:
        fleet.start_actor(name, [*kept.environment(name, "Wide"), "--spool-bytes", str(SPOOL_BYTES)])
    learner = fleet.start_learner(
        [*QUICK, "--actors", "2", "--run-dir", str(run), "--evaluate-episodes", "0", "--replay-capacity", "4000"]
        + ["--message-steps", "200", "--samples-per-insert", "0.01", "--max-env-steps", "100000000"]
    )
    kept.await_rows(100)
    conftest.wait_until(lambda: _trains(run), "the networks are compiled, which takes 100 MB", 60.0)
    pids = {
        "broker": int(fleet.broker["pid"]),
        "learner": learner.pid,
        **{name: fleet.children[name].pid for name in actors},
    }
    before = {name: memory_mb(pid) for name, pid in pids.items()}
    peak = dict(before)

    def sample() -> bool:
        for name, pid in pids.items():
            peak[name] = max(peak[name], memory_mb(pid))
        return False

    def watch(until: Callable[[], object], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not sample() and not until() and time.monotonic() < deadline:
            time.sleep(0.1)

    def accepted() -> dict[str, int]:
        return {name: len(numbers) for (name, _), numbers in kept.accepted(*((name, 0) for name in actors)).items()}

    learner.send_signal(signal.SIGSTOP)
    watch(lambda: False, STILL_S / 2)
    waiting = accepted()
    watch(lambda: False, STILL_S / 2)
    assert accepted() == waiting, "with half a spool they wait"
    spools = [sum(file.stat().st_size for file in fleet.spool(name).iterdir()) for name in actors]
    learner.send_signal(signal.SIGCONT)
    watch(lambda: kept.steps() >= sum(waiting.values()), 60.0)

    assert kept.steps() >= sum(waiting.values()), "all that was accepted while it stood still has arrived"
    for name in actors:
        conftest.wait_until(lambda: accepted()[name] > waiting[name] + 1000, f"{name} goes on", 30.0)  # noqa: B023  called at once
    assert kept.ask("SELECT count(*) FROM messages WHERE verdict != 'ok'") == [(0,)]
    grown = {name: peak[name] - before[name] for name in pids}
    print(f"MB before {before}, grown {grown}, spools {spools}")
    assert max(spools) < SPOOL_BYTES
    assert max(grown[name] for name in actors) < SPOOL_BYTES / MB
    assert grown["broker"] < 2 * len(actors) * window.LIMIT_BYTES / MB + 10
    assert grown["learner"] < (inbox.LIMIT.size_bytes + 2 * ingest.LIMIT_BYTES) / MB + 40
