"""kill -9 of actor and learner: every step that the spool accepted is in the ledger, and none is there twice."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from broker import codec, errors, messages
from learner import ledger, local_fleet
from tests import conftest as brokers
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.system, pytest.mark.slow]
ENV = f"{Path(__file__).with_name('counting.py')}:Counting"


class Books:
    """What the environment wrote down, and what the ledger has."""

    def __init__(self, log: Path, run: Path) -> None:
        self._log = log
        self._file = run / ledger.NAME

    def accepted(self, life: int) -> set[tuple[int, int]]:
        """Steps of a life whose message was accepted, as (life, number)."""
        numbers = np.frombuffer((self._log / f"accepted-{life}").read_bytes(), np.int32)
        return {(life, int(n)) for n in numbers}

    def taken(self, life: int) -> int:
        """Steps that the environment took."""
        return (self._log / f"life-{life}").stat().st_size

    def in_ledger(self) -> Counter[tuple[int, int]]:
        """How often each step is in the ledger."""
        found: Counter[tuple[int, int]] = Counter()
        for (body,) in self.ask("SELECT body FROM payloads ORDER BY id"):
            experience = codec.decode(messages.Experience, body)
            life = int(experience.observation[0, 0])  # type: ignore[call-overload]
            found.update((life, int(number)) for number in experience.reward)
        return found

    def boots(self) -> int:
        return int(self.ask("SELECT count(DISTINCT boot) FROM messages")[0][0]) if self._file.exists() else 0

    def rows(self) -> int:
        return int(self.ask("SELECT count(*) FROM messages")[0][0]) if self._file.exists() else 0

    def ask(self, query: str) -> list[tuple[bytes]]:
        with contextlib.closing(sqlite3.connect(self._file, timeout=10.0)) as file:
            try:
                return file.execute(query).fetchall()
            except sqlite3.OperationalError:  # made a moment ago, and still without tables
                return [(0,)]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", brokers.KINDS)
def test_every_accepted_step_is_in_the_ledger_once(
    kind: str, start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, run = run_root / "log", run_root / "run"
    log.mkdir()
    monkeypatch.setenv("COUNTING_LOG", str(log))
    fleet = start_fleet(kind)
    books = Books(log, run)
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
                brokers.wait_until(lambda: books.accepted(life) - books.in_ledger().keys(), "a surplus", 0.5)
                return
            assert time.monotonic() < deadline, "the spool never held more than the ledger"
            fleet.children["learner"].send_signal(signal.SIGCONT)
            await_rows(1)

    def await_rows(more: int) -> None:
        wanted = books.rows() + more
        brokers.wait_until(lambda: books.rows() >= wanted, f"{wanted} messages are in the ledger", 60.0)

    fleet.start_actor("pi", ["--env", ENV])
    fleet.start_learner([*QUICK, *common, *pace, "--run-dir", str(run)])
    for round_ in range(4):
        await_rows(20)
        if round_ % 2:  # both at once: what has no receipt is in the spool alone
            brokers.wait_until(lambda: list((run / "checkpoints").glob("*.npz")), "a checkpoint", 60.0)
            stop_with_a_surplus(round_)
            kill("pi")
            kill("learner")
            fleet.start_learner(["--resume", str(run), *common])
        else:
            kill("pi")
        fleet.start_actor("pi", ["--env", ENV])
        brokers.wait_until(lambda: books.boots() == round_ + 2, "the next boot's messages follow", 90.0)  # noqa: B023
    await_rows(5)
    fleet.children["learner"].send_signal(signal.SIGTERM)
    output, _ = fleet.children["learner"].communicate(timeout=60.0)
    assert fleet.children["learner"].returncode == errors.EXIT_INTERRUPTED

    found = books.in_ledger()
    assert max(found.values()) == 1
    for life in range(4):  # the fifth still holds some
        accepted = books.accepted(life)
        assert len(accepted) >= 1000
        assert accepted - found.keys() == set()
        assert {n for k, n in found if k == life} <= set(range(1, books.taken(life) + 1))
    summary = json.loads(output)
    assert summary["env_steps"] == len(found), "what is in the ledger is in replay"
    assert summary["steps_missed"] == 0
    assert summary["messages_refused"].keys() <= {"duplicate", "gap"}
