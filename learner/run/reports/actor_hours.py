"""The last hour of each actor, in the run directory: what a page shows of a run that has ended.

A line for all actors every PERIOD_S, of a large fleet less often, so that the files hold an hour at any size and never
more than LIMIT_BYTES. The loop hands over what it has; encoding and writing are on a thread of their own.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from pathlib import Path

from broker.contract import messages
from broker.program import storage
from learner.files import records, run_directory
from learner.fleet import actors
from learner.operate.watch import history

PERIOD_S = history.PERIOD_S
ROWS_PER_S = 40.0
"""Rows of actors, at most: 400 actors every PERIOD_S."""
LIMIT_BYTES = 40_000_000
"""Size of the file and the one before it (`.1`). An hour of ROWS_PER_S is 10 to 19 MB, by what is told."""
_KIND = "rows of actors' last hours"


class ActorHours:
    """Writes what actors say of themselves, every ten seconds or so.

    Args:
        directory: Of the run.
        kept: Counts what the disk does not take.
        limit_bytes: See LIMIT_BYTES.
        clock: Unix time.
    """

    def __init__(
        self,
        directory: Path,
        kept: records.Records,
        limit_bytes: int = LIMIT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._kept, self._limit_bytes = directory / run_directory.ACTOR_HOURS, kept, limit_bytes
        self._clock = clock
        self._next_s, self._every_s = 0.0, PERIOD_S
        self._steps: dict[str, tuple[int, str, int, float]] = {}  # boot, session, steps, Unix time
        self._size: int | None = None  # not looked at yet
        self._worker = futures.ThreadPoolExecutor(1, "actor-hours")
        self._writing: futures.Future[None] | None = None

    def note(self, fleet: Iterable[actors.Actor]) -> None:
        """Takes down what live actors said last, if it is time to; to be called every second or so."""
        now_s = self._clock()
        if (
            now_s < self._next_s <= now_s + max(100 * PERIOD_S, self._every_s)
        ):  # a clock that was set back does not stop it
            return
        states = [(one.actor_id, one.state) for one in fleet if one.live and one.state is not None]
        self._every_s = max(PERIOD_S, len(states) / ROWS_PER_S)
        self._next_s = now_s + self._every_s
        if not states:
            return
        if self._writing is not None and not self._writing.done():
            self._kept.note(_KIND, TimeoutError("the disk has not taken those before yet"))
            return
        self._writing = self._worker.submit(self._write, now_s, states)

    def close(self) -> None:
        """Waits for what is being written."""
        self._worker.shutdown()

    def _write(self, now_s: float, states: list[tuple[str, messages.ActorState]]) -> None:
        rows = {name: self._row(name, state, now_s) for name, state in states}
        self._steps = {name: self._steps[name] for name in rows}
        line = {"at_s": round(now_s, 1), "keys": history.KEYS, "actors": rows}
        with self._kept.attempt(_KIND):
            self._append((json.dumps(line, separators=(",", ":")) + "\n").encode())

    def _row(self, name: str, state: messages.ActorState, now_s: float) -> list[float | None]:
        """Returns the figures of an actor by history.KEYS."""
        vitals, before = state.vitals, self._steps.get(name)
        self._steps[name] = state.boot, state.session, vitals.steps, now_s
        rate = None
        if before is not None and before[:2] == (state.boot, state.session) and now_s > before[3]:
            rate = max(0, vitals.steps - before[2]) / (now_s - before[3])
        figures = {"steps_per_s": rate}
        return [_short(figures[key] if key in figures else getattr(vitals, key)) for key in history.KEYS]

    def _append(self, line: bytes) -> None:
        if self._size is None:
            self._size = self._path.stat().st_size if self._path.exists() else 0
        if self._size and self._size + len(line) > self._limit_bytes // 2:
            os.replace(self._path, f"{self._path}.1")
            self._size = 0
        with open(self._path, "ab", buffering=0) as file:
            storage.append(file, line, self._path)
        self._size += len(line)


def _short(value: float | None) -> float | None:
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
