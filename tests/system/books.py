"""Compares numbered steps: the books that environments keep (`counting.py`), and what the learner's ledger has."""

from __future__ import annotations

import collections
import contextlib
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import codec, messages
from learner.files import run_directory
from tests import conftest

_ENVIRONMENTS = Path(__file__).with_name("counting.py")

Life = tuple[str, int]
"""Actor, and which of the lives of its environment."""
Numbers = NDArray[np.int32]
_NONE: Numbers = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Balance:
    """The books beside the ledger, in steps.

    `dropped` were let go of without a receipt, and did not arrive; `lost` were neither: step by step, not by their sum.
    """

    accepted: int
    lost: int
    twice: int
    dropped: int
    invented: int

    @property
    def holds(self) -> bool:
        """Nothing is lost, nothing is there twice, and nothing was invented."""
        return self.lost == 0 and self.twice == 0 and self.invented == 0


class Books:
    """Books of some actors and the ledger of their learner.

    Args:
        logs: Directory with one directory per actor.
        run: The learner's run directory; to look into messages it must keep its experience.
    """

    def __init__(self, logs: Path, run: Path) -> None:
        self._logs = logs
        self._run = run

    def environment(self, actor: str, name: str = "Counting") -> list[str]:
        """Makes a directory for an actor's books; the flags that make its environment keep them."""
        log = self._logs / actor
        log.mkdir(parents=True, exist_ok=True)
        return ["--env", f"{_ENVIRONMENTS}:{name}", "--env-kwargs", json.dumps({"log": str(log)})]

    def lives(self, actor: str) -> list[Life]:
        """Each time that an actor's environment was made."""
        return [(actor, life) for life, _ in enumerate((self._logs / actor).glob("life-*"))]

    def accepted(self, *lives: Life) -> dict[Life, Numbers]:
        """Numbers of the steps whose message reached a file of the spool."""
        return {life: self._book("accepted", life) for life in lives}

    def dropped(self, *lives: Life) -> dict[Life, Numbers]:
        """Numbers of the steps that the spool let go of without a receipt, and counted; some arrive all the same."""
        return {life: self._book("dropped", life) for life in lives}

    def in_ledger(self) -> dict[Life, Numbers]:
        """Numbers of the steps that are in the ledger, in order of arrival."""
        found: dict[Life, list[Numbers]] = collections.defaultdict(list)
        for actor, body in self.ask("SELECT actor, body FROM payloads JOIN messages USING (id) ORDER BY id"):
            experience = codec.decode(messages.Experience, body)
            life = int(experience.observation.item(0))
            found[actor, life].append(experience.reward.astype(np.int32))
        return {life: np.concatenate(parts) for life, parts in found.items()}

    def missing(self, accepted: dict[Life, Numbers]) -> int:
        """Returns how many of these steps the ledger does not have."""
        return _missing(accepted, self.in_ledger())

    def balance(self, *lives: Life) -> Balance:
        """Compares lives with the ledger; of others, steps may be on their way, but none twice or invented."""
        accepted, found = self.accepted(*lives), self.in_ledger()
        twice = invented = 0
        for (actor, life), numbers in found.items():
            twice += len(numbers) - len(np.unique(numbers))
            file = self._logs / actor / f"life-{life}"
            taken = file.stat().st_size if file.exists() else 0
            invented += int(np.count_nonzero((numbers < 1) | (numbers > taken)))
        dropped = self.dropped(*lives)
        reached = {life: np.concatenate([found.get(life, _NONE), dropped[life]]) for life in lives}
        return Balance(
            accepted=sum(map(len, accepted.values())),
            lost=_missing(accepted, reached),
            twice=twice,
            dropped=_missing(dropped, found),
            invented=invented,
        )

    def _book(self, name: str, life: Life) -> Numbers:
        return np.frombuffer((self._logs / life[0] / f"{name}-{life[1]}").read_bytes(), np.int32)

    def rows(self) -> int:
        """Messages in the ledger."""
        return self._count("SELECT count(*) FROM messages")

    def await_rows(self, more: int, timeout_s: float = 60.0) -> None:
        """Waits until so many more messages are in the ledger."""
        wanted = self.rows() + more
        conftest.wait_until(lambda: self.rows() >= wanted, f"{wanted} messages are in the ledger", timeout_s)

    def steps(self) -> int:
        """Steps in the ledger, those of messages that replay needs no more included."""
        return self._count("SELECT coalesce(sum(steps), 0) FROM messages")

    def boots(self) -> int:
        """Processes of actors that have messages in the ledger."""
        return self._count("SELECT count(*) FROM (SELECT DISTINCT actor, boot FROM messages)")

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """Asks the ledger, or that of each worker in turn; nothing where there is none yet."""
        return [row for file in run_directory.ledgers(self._run) if file.exists() for row in _ask(file, query)]

    def _count(self, query: str) -> int:
        return sum(count for (count,) in self.ask(query))


def _ask(ledger: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, timeout=10.0)) as file:
        try:
            return file.execute(query).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # made a moment ago
                return []
            raise


def _missing(accepted: dict[Life, Numbers], found: dict[Life, Numbers]) -> int:
    return sum(len(np.setdiff1d(numbers, found.get(life, _NONE))) for life, numbers in accepted.items())
