"""What numbered steps became: what the environment `counting.py` wrote down, and what the ledger has."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from broker import codec, messages
from learner import ledger
from tests import conftest

ENV_FILE = Path(__file__).with_name("counting.py")
ENV = f"{ENV_FILE}:Counting"


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
            life = int(experience.observation.item(0))
            found.update((life, int(number)) for number in experience.reward)
        return found

    def numbers(self) -> Counter[int]:
        """How often each step is in the ledger, of whichever life."""
        found: Counter[int] = Counter()
        for (_, number), times in self.in_ledger().items():
            found[number] += times
        return found

    def steps(self) -> int:
        """Steps in the ledger, each counted once."""
        return int(self.ask("SELECT coalesce(sum(steps), 0) FROM messages")[0][0])

    def boots(self) -> int:
        return int(self.ask("SELECT count(DISTINCT boot) FROM messages")[0][0]) if self._file.exists() else 0

    def rows(self) -> int:
        return int(self.ask("SELECT count(*) FROM messages")[0][0]) if self._file.exists() else 0

    def await_rows(self, more: int, timeout_s: float = 60.0) -> None:
        """Waits until so many more messages are in the ledger."""
        wanted = self.rows() + more
        conftest.wait_until(lambda: self.rows() >= wanted, f"{wanted} messages are in the ledger", timeout_s)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self._file, timeout=10.0)) as file:
            try:
                return file.execute(query).fetchall()
            except sqlite3.OperationalError:  # made a moment ago, and still without tables
                return [(0,)]
