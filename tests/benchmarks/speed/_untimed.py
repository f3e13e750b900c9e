"""What the instruments of the breakdown cost: what keeps nothing in their place, and the row that tells it."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from broker.program import stopwatch
from edge_actor.acting import step_times

_BLOCK = contextlib.nullcontext()


class NoStopwatch(stopwatch.Stopwatch):
    """Looks at no clock."""

    def add(self, stage: str, seconds: float, count: int = 1) -> None:
        """Keeps nothing."""

    def time(self, stage: str, count: int = 1) -> Any:
        """Returns a block that does nothing."""
        return _BLOCK


class NoStepTimes(step_times.StepTimes):
    """Has no row timed."""

    def __init__(self) -> None:
        super().__init__(step_times.Overhead)
        self.times = NoStopwatch()

    def plan(self, rows: int) -> Sequence[tuple[bool, int]]:
        """Returns all in one piece."""
        return ((False, rows),)

    def note_loop(self, rows: int, seconds: float, resets: Sequence[float] = ()) -> None:
        """Keeps nothing."""

    def note_burst(self, seconds: float) -> None:
        """Keeps nothing."""


def row(turns: int, rate: Callable[[bool], float]) -> dict[str, Any]:
    """Returns the figures of a benchmark's row, of both ways in alternation, each of them first as often as the other.

    Args:
        turns: How often each is measured.
        rate: Returns the rate with the instruments, or without.
    """
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns):
        for is_timed in (True, False) if turn % 2 else (False, True):
            rates[is_timed].append(rate(is_timed))
    ratios = [timed / untimed for timed, untimed in zip(rates[True], rates[False], strict=True)]
    low, _, high = statistics.quantiles(ratios)
    return {
        "value": round(statistics.median(rates[True])),
        "reference": round(statistics.median(rates[False])),
        "ratio": round(statistics.median(ratios), 4),
        "runs": turns,
        "spread": round(max(ratios) - min(ratios), 3),
        "explain": f"beside itself without the instruments; half of all ratios are from {low:.3f} to {high:.3f}",
    }
