"""The energy that the board draws, in joules, and its source. A joule without a source is None, never a guess.

A source tells watts. A `Meter` adds them up and keeps count of how much of the time is covered: where a sensor was
silent, stuck or answered nonsense, nothing is added, and whoever asks for the energy of such a time gets None.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_actor.board import board, power_model, power_sensors

STUCK_S = 15.0
"""The time after which a real sensor whose value never moves is stuck: its last digits are noise."""
GAP_S = 3.0
"""The most time that a reading stands for, or three times their period: the time since the one before."""
COVERED_SHARE = 0.9
"""The share of a window's time that readings must cover for its energy to be told."""
LIMITS_W = {"zero2w": (0.2, 9.0), "3b": (0.4, 14.0), "3b+": (0.4, 14.0), "4b": (0.8, 18.0), "5": (0.5, 30.0)}
"""The watts that each board can draw, its power supply's limit included; what lies outside is no reading."""
_ANY_LIMITS_W = (0.05, 5000.0)


class Source(Protocol):
    """A way to know the power.

    Attributes:
        name: Short, for tables: `INA226 hwmon3`.
        note: What its figure leaves out, or where a model's constants come from; one sentence.
        modelled: Computed and not measured.
    """

    @property
    def name(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def modelled(self) -> bool: ...

    def read_w(self) -> float | None:
        """Returns watts: the mean since the last call where it can, else now. None: no reading this time."""

    def close(self) -> None:
        """Ends what it has started."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best source of a board, if it has any, and why the better ones were passed over."""

    source: Source | None
    passed_over: tuple[str, ...]


def find(root: Path = board.ROOT, *, period_s: float = 1.0) -> Found:
    """Looks for a source: a sensor of the whole board first, then parts of it, then a model.

    Args:
        root: Of the file tree.
        period_s: How often the source will be read; a sensor that needs a process is asked so often.
    """
    kind = board.kind(board.model(root))
    passed_over: list[str] = []
    for look in (power_sensors.ina, power_sensors.pmic, power_sensors.rapl, power_model.by_load):
        found = look(root, kind, period_s)
        if not isinstance(found, str):
            return Found(found, tuple(passed_over))
        if found:
            passed_over.append(found)
    return Found(None, tuple(passed_over))


@dataclass(frozen=True, slots=True)
class Total:
    """Energy so far, and how many seconds of it readings cover, at a time of the monotonic clock."""

    at_s: float
    joules: float
    covered_s: float

    def since(self, earlier: Total) -> float | None:
        """Joules of the time in between, brought to its whole length; None where too little of it is covered."""
        length_s, covered_s = self.at_s - earlier.at_s, self.covered_s - earlier.covered_s
        if length_s <= 0 or covered_s < COVERED_SHARE * length_s:
            return None
        return (self.joules - earlier.joules) * length_s / covered_s


class Meter:
    """Adds up what a source says.

    Args:
        source: Says it; has been asked once, for sources that tell a mean begin there (`start` does).
        limits_w: What the board can draw.
        period_s: How often `read` will be called.
        clock: Monotonic.

    Attributes:
        faults: Readings that did not count: `missing`, `implausible` (beyond the board's limits), `stuck`.
    """

    def __init__(
        self,
        source: Source,
        limits_w: tuple[float, float] = _ANY_LIMITS_W,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self._gap_s = max(GAP_S, 3 * period_s)
        self.faults: collections.Counter[str] = collections.Counter()
        self._limits_w = limits_w
        self._clock = clock
        self._joules = self._covered_s = 0.0
        self._unmoved_w: float | None = None
        self._unmoved_j = self._unmoved_s = 0.0  # since the value last changed; taken back if it is stuck
        self._counted_to_s = clock()

    @classmethod
    def start(cls, source: Source, period_s: float, root: Path = board.ROOT) -> Meter:
        """Begins to read a source, within the limits of the board."""
        source.read_w()
        return cls(source, LIMITS_W.get(board.kind(board.model(root)), _ANY_LIMITS_W), period_s)

    def read(self) -> Total:
        """Takes a reading, and returns all so far."""
        now_s = self._clock()
        watts = self.source.read_w()
        if watts is None or not math.isfinite(watts):
            self.faults["missing"] += 1
        elif not self._limits_w[0] <= watts <= self._limits_w[1]:
            self.faults["implausible"] += 1
        else:
            self._add(watts, min(now_s - self._counted_to_s, self._gap_s))
            self._counted_to_s = now_s
        return Total(now_s, self._joules, self._covered_s)

    def close(self) -> None:
        """Closes the source."""
        self.source.close()

    def _add(self, watts: float, seconds: float) -> None:
        if watts != self._unmoved_w or self.source.modelled:
            self._unmoved_w, self._unmoved_j, self._unmoved_s = watts, 0.0, 0.0
        was_stuck = self._unmoved_s > STUCK_S
        self._unmoved_s += seconds
        if self._unmoved_s > STUCK_S:
            self.faults["stuck"] += 1
            if not was_stuck:
                self._joules -= self._unmoved_j
                self._covered_s -= self._unmoved_s - seconds
            return
        self._unmoved_j += watts * seconds
        self._joules += watts * seconds
        self._covered_s += seconds
