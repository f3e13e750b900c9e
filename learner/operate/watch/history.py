"""The last hour of one actor, or of all, in memory that does not grow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

PERIOD_S = 10.0
"""Between two points; of what comes within one, the last counts."""
POINTS = 360
KEYS = (
    *("steps_per_s", "return_mean", "policy_lag", "latency_p50_us", "latency_p99_us"),
    *("temperature_c", "power_w", "step_energy_j", "spool_share", "cpu_percent"),
)


class History:
    """A ring of points, each a row of figures by KEYS; what is not known is NaN."""

    def __init__(self) -> None:
        self._values = np.full((POINTS, len(KEYS)), np.nan, np.float32)
        self._periods = np.full(POINTS, -1, np.int64)

    def note(self, at_s: float, figures: Mapping[str, float | None]) -> None:
        """Takes in what was so at a Unix time; of those that are no KEYS, nothing."""
        period = int(at_s // PERIOD_S)
        place = period % POINTS
        self._periods[place] = period
        self._values[place] = [np.nan if (value := figures.get(key)) is None else value for key in KEYS]

    def at(self, at_s: float, key: str) -> float | None:
        """Returns the figure of the period that a Unix time is in; None if there is none."""
        period = int(at_s // PERIOD_S)
        if self._periods[period % POINTS] != period:
            return None
        value = float(self._values[period % POINTS, KEYS.index(key)])
        return None if np.isnan(value) else value

    def series(self, now_s: float) -> dict[str, list[float | None]]:
        """Returns the points of the last hour, the oldest first: `at_s` (Unix time) and each of KEYS."""
        newest = int(now_s // PERIOD_S)
        known = np.flatnonzero((self._periods > newest - POINTS) & (self._periods <= newest))
        order = known[np.argsort(self._periods[known])]
        found: dict[str, list[float | None]] = {"at_s": (self._periods[order] * PERIOD_S).tolist()}
        for index, key in enumerate(KEYS):
            found[key] = [None if value != value else round(value, 6) for value in self._values[order, index].tolist()]
        return found
