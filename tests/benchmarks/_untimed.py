"""What the instruments of the breakdown are replaced with, to find out what they cost: it keeps nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
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
