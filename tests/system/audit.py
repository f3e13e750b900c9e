"""What actors recorded, by their environments' own books, against what the learner's ledger has."""

from __future__ import annotations

import collections
import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from broker import codec, messages
from learner import ledger

Life = tuple[str, int]
"""Actor, and which of the lives of its environment."""
Numbers = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Balance:
    """The books beside the ledger, in steps."""

    accepted: int
    lost: int
    twice: int
    dropped: int
    invented: int

    @property
    def holds(self) -> bool:
        """Nothing is lost but what was counted as dropped, nothing is there twice, and nothing was invented."""
        return self.lost <= self.dropped and self.twice == 0 and self.invented == 0


class Audit:
    """Books of some actors (tests/system/counting.py) and the ledger of their learner.

    Args:
        logs: Directory with one directory per actor.
        run: The learner's run directory; it must keep its experience.
    """

    def __init__(self, logs: Path, run: Path) -> None:
        self._logs = logs
        self._file = run / ledger.NAME

    def lives(self, actor: str) -> int:
        """How often an actor's environment was made."""
        return sum(1 for _ in (self._logs / actor).glob("life-*"))

    def rows(self) -> int:
        """Messages in the ledger."""
        return int(self._ask("SELECT count(*) FROM messages")[0][0]) if self._file.exists() else 0

    def boots(self) -> int:
        """Processes of actors that have messages in the ledger."""
        query = "SELECT count(*) FROM (SELECT DISTINCT actor, boot FROM messages)"
        return int(self._ask(query)[0][0]) if self._file.exists() else 0

    def accepted(self, lives: dict[str, int]) -> dict[Life, Numbers]:
        """Numbers of the steps that reached a file of a spool, of each actor's first lives."""
        return {
            (actor, life): np.frombuffer((self._logs / actor / f"accepted-{life}").read_bytes(), np.int32)
            for actor, count in lives.items()
            for life in range(count)
        }

    def in_ledger(self) -> dict[Life, Numbers]:
        """Numbers of the steps that are in the ledger, in order of arrival."""
        found: dict[Life, list[Numbers]] = collections.defaultdict(list)
        for actor, body in self._ask("SELECT actor, body FROM payloads JOIN messages USING (id) ORDER BY id"):
            experience = codec.decode(messages.Experience, body)
            life = int(experience.observation[0, 0])  # type: ignore[call-overload]
            found[actor, life].append(experience.reward.astype(np.int32))
        return {life: np.concatenate(parts) for life, parts in found.items()}

    def balance(self, lives: dict[str, int]) -> Balance:
        """Compares each actor's first lives with the ledger; later lives may still be on their way."""
        accepted, found = self.accepted(lives), self.in_ledger()
        nothing = np.zeros(0, np.int32)
        twice = invented = 0
        for (actor, life), numbers in found.items():
            twice += len(numbers) - len(np.unique(numbers))
            file = self._logs / actor / f"life-{life}"
            taken = file.stat().st_size if file.exists() else 0
            invented += int(np.count_nonzero((numbers < 1) | (numbers > taken)))
        dropped = [np.frombuffer(file.read_bytes(), np.int32).sum() for file in self._logs.glob("*/dropped-*")]
        return Balance(
            accepted=sum(map(len, accepted.values())),
            lost=sum(len(np.setdiff1d(mine, found.get(life, nothing))) for life, mine in accepted.items()),
            twice=twice,
            dropped=int(sum(dropped)),
            invented=invented,
        )

    def _ask(self, query: str) -> list[tuple[str, bytes]]:
        with contextlib.closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True, timeout=10.0)) as file:
            try:
                return file.execute(query).fetchall()
            except sqlite3.OperationalError:  # made a moment ago, and still without tables
                return [(0, b"")]  # type: ignore[list-item]
