"""Power computed from load, for boards without a sensor.

Watts are a line over the processor's use, with constants measured by others on one board each. Such a model cannot
tell int8 from fp32: a full core is a full core, so its ratio of energies is its ratio of times. Whoever shows its
figures says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

SOURCE = "PowerJoular"
LINES_W = {"3b": (3.48, 1.08), "3b+": (3.30, 2.00), "4b": (4.53, 2.29), "5": (3.46, 4.40)}
"""Slope and offset: watts = slope * use + offset, use from 0 to 1 over all cores."""
WARNING = "modelled from load: its ratio of energies is the ratio of times, and says nothing about the instructions"


@dataclass(slots=True)
class ByLoad:
    """A board's power as a line over the use of all its cores since the last call."""

    stat: Path
    kind: str
    modelled: bool = True
    _before: tuple[int, int] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"model {SOURCE} {self.kind}"

    @property
    def note(self) -> str:
        slope, offset = LINES_W[self.kind]
        return f"{SOURCE}: {slope:g} W * use + {offset:g} W; {WARNING}"

    def read_w(self) -> float | None:
        times = _times(self.stat)
        before, self._before = self._before, times
        if times is None or before is None or times[1] <= before[1]:
            return None
        use = (times[0] - before[0]) / (times[1] - before[1])
        slope, offset = LINES_W[self.kind]
        return slope * min(max(use, 0.0), 1.0) + offset

    def close(self) -> None:
        """Does nothing: no file is kept open."""


def by_load(root: Path, kind: str, period_s: float) -> ByLoad | str:
    """Returns the model of a board; for boards that nobody measured, why there is none."""
    if kind not in LINES_W:
        return f"no model of a {kind}'s power is known" if kind else ""
    stat = root / "proc/stat"
    return ByLoad(stat, kind) if _times(stat) else f"{stat} cannot be read"


def _times(stat: Path) -> tuple[int, int] | None:
    """Returns busy and total time of all cores in clock ticks."""
    try:
        words = stat.read_text().split("\n", 1)[0].split()
        # user nice system idle iowait irq softirq steal; guest times are part of user's
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return None
    if len(ticks) < 4 or words[0] != "cpu":
        return None
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)
