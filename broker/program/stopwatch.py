"""Counts and seconds of each stage of a program since its start: how often it ran, and how long that took.

Whoever does the work owns the stopwatch, and adds to it where the work is done; whoever reports adds up several
stopwatches. Threads may share one. An addition takes about 0.2 us, so that it is for messages, calls and policies; the
actor's steps, which take a few microseconds each, have a way of their own (edge_actor/acting/step_times.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Spent(NamedTuple):
    """The runs of a stage, and the seconds that they took in all."""

    runs: int = 0
    seconds: float = 0.0


Totals = Mapping[str, Spent]
"""The runs and seconds of each stage, by its name."""


class Stopwatch:
    """Counts and seconds of named stages.

    Args:
        stages: Their names; each is there from the start, with zeros.
        clock: Seconds.
    """

    def __init__(self, *stages: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._counts = dict.fromkeys(stages, 0)
        self._seconds = dict.fromkeys(stages, 0.0)
        self._clock = clock
        self._lock = threading.Lock()

    def add(self, stage: str, seconds: float, count: int = 1) -> None:
        """Adds what a stage took, for `count` times that it ran."""
        with self._lock:
            self._counts[stage] += count
            self._seconds[stage] += seconds

    def time(self, stage: str, count: int = 1) -> _Timed:
        """Adds what the block of `with` takes, even if it raises."""
        return _Timed(self, self._clock, stage, count)

    def seconds(self, stage: str) -> float:
        """Returns the seconds that a stage took so far."""
        return self._seconds[stage]

    def totals(self) -> Totals:
        """Returns what each stage took so far."""
        with self._lock:
            return {name: Spent(count, self._seconds[name]) for name, count in self._counts.items()}


class _Timed:
    """Times one block. No generator of contextlib, which takes twice as long: there are several for each message."""

    __slots__ = "_began", "_clock", "_count", "_stage", "_watch"

    def __init__(self, watch: Stopwatch, clock: Callable[[], float], stage: str, count: int) -> None:
        self._watch, self._clock, self._stage, self._count = watch, clock, stage, count

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._watch.add(self._stage, self._clock() - self._began, self._count)


def added(several: Iterable[Totals]) -> dict[str, Spent]:
    """Returns the sums, by stage."""
    sums: dict[str, Spent] = {}
    for totals in several:
        for name, (runs, seconds) in totals.items():
            before = sums.get(name, Spent())
            sums[name] = Spent(before.runs + runs, before.seconds + seconds)
    return sums
