"""Keeps what was refused for its content, for whoever looks for the cause: why, from whom, and how it begins.

Lines of JSON and not a table of the ledger: read with any tool, written when the ledger is not, and forged messages by
the thousand cost no transaction. Two files of half the limit, the older one thrown away when both are full. Not synced.

Of each reason the first hundred are kept, then one every half minute, which says how many were left out before it: a
flood of forgeries costs hardly a write, and pushes no other reason out. Whoever refuses counts all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from broker.program import storage
from learner.files import records

NAME = "dead_letters.jsonl"
LIMIT_BYTES = 1_000_000
_FIRST_BYTES = 96
_AT_ONCE = 100
_PERIOD_S = 30.0


@dataclass(slots=True)
class _Allowance:
    """The letters of one reason that may still be written, and those left out since the last one that was."""

    letters: float
    at_s: float
    left_out: int = 0

    def spend(self, now_s: float) -> bool:
        self.letters = min(_AT_ONCE, self.letters + (now_s - self.at_s) / _PERIOD_S)
        self.at_s = now_s
        if self.letters < 1:
            self.left_out += 1
            return False
        self.letters -= 1
        return True


class DeadLetters:
    """An open file of refused messages.

    Args:
        path: Appended to, and made when there is something to write.
        limit_bytes: Of this file and the older one, `.1` behind its name.
        now_s: A clock that never goes back.
        kept: Counts what the disk does not take; None raises it.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int = LIMIT_BYTES,
        now_s: Callable[[], float] = time.monotonic,
        kept: records.Records | None = None,
    ) -> None:
        self._path = path
        self._kept = kept
        self._limit_bytes = limit_bytes
        self._now_s = now_s
        self._allowances: dict[str, _Allowance] = {}
        self._size: int | None = None  # not looked at yet

    def add(self, topic: str, reason: str, what: str, payload: bytes) -> None:
        """Keeps one message, unless there were too many of its reason.

        Args:
            topic: The topic it came by.
            reason: Slug that it is counted under, of which the learner knows a few dozen.
            what: A sentence.
            payload: As it came.
        """
        now_s = self._now_s()
        allowance = self._allowances.setdefault(reason, _Allowance(_AT_ONCE, now_s))
        if not allowance.spend(now_s):
            return
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "topic": topic,
            "reason": reason,
            "what": what,
            "bytes": len(payload),
            "begins": bytes(payload[:_FIRST_BYTES]).hex(),
            "left_out": allowance.left_out,
        }
        allowance.left_out += 1  # unless the disk takes it
        with self._kept.attempt("dead letters") if self._kept else contextlib.nullcontext():
            self._append((json.dumps(row) + "\n").encode())
            allowance.left_out = 0

    def _append(self, line: bytes) -> None:
        if self._size is None:
            self._size = self._path.stat().st_size if self._path.exists() else 0
        if self._size + len(line) > self._limit_bytes // 2 and self._size:
            os.replace(self._path, f"{self._path}.1")
            self._size = 0
        with open(self._path, "ab", buffering=0) as file:
            storage.append(file, line, self._path)
        self._size += len(line)
