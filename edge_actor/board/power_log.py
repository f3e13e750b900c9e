"""An external meter's log, as CSV: what flowed into the board, by another machine's measure.

The first line names the columns: `time_s` (Unix time) or `time` (ISO 8601, UTC where it names no zone), and `power_w`,
or `voltage_v` and `current_a`. Others are ignored. Both clocks must agree, or the difference be given.
"""

from __future__ import annotations

import csv
import datetime
import itertools
from dataclasses import dataclass
from pathlib import Path

from broker.contract import errors
from edge_actor.board import power

_TODO = "columns: time_s or time, and power_w, or voltage_v and current_a"


@dataclass(frozen=True, slots=True)
class Log:
    """Unix times and watts, in order."""

    name: str
    samples: tuple[tuple[float, float], ...]
    note: str = "the whole board with its supply, as far as the meter sits in front of it"
    modelled: bool = False

    def joules(self, start_s: float, end_s: float) -> float | None:
        """Energy between two Unix times; None where samples more than GAP_S apart leave too much of it open."""
        joules = covered_s = 0.0
        for (t0, w0), (t1, w1) in itertools.pairwise(self.samples):
            a, b = max(t0, start_s), min(t1, end_s)
            if b <= a or t1 - t0 > power.GAP_S:
                continue
            slope = (w1 - w0) / (t1 - t0)
            joules += (b - a) * (w0 + slope * ((a + b) / 2 - t0))
            covered_s += b - a
        length_s = end_s - start_s
        return joules * length_s / covered_s if covered_s >= power.COVERED_SHARE * length_s > 0 else None


def read(path: Path, offset_s: float = 0.0) -> Log:
    """Reads a log; `offset_s` is added to its times.

    Raises:
        ConfigError: It cannot be read, or a line is not numbers.
    """
    try:
        with open(path, newline="") as file:
            rows = csv.DictReader(file, skipinitialspace=True)
            columns = set(rows.fieldnames or ())
            if not (columns & {"time_s", "time"} and ("power_w" in columns or {"voltage_v", "current_a"} <= columns)):
                raise ValueError(f"the columns are {', '.join(sorted(columns)) or 'not named'}")
            samples = sorted((_time_s(row) + offset_s, _watts(row)) for row in rows)
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        raise errors.ConfigError(f"the meter's log cannot be read: {error}", where=str(path), todo=_TODO) from error
    distinct = tuple(dict(samples).items())  # of two samples at one time the larger: no time lies between them
    return Log(f"meter {path.name}", distinct)


def _time_s(row: dict[str, str]) -> float:
    if "time_s" in row:
        return float(row["time_s"])
    when = datetime.datetime.fromisoformat(row["time"])
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()


def _watts(row: dict[str, str]) -> float:
    return float(row["power_w"]) if "power_w" in row else float(row["voltage_v"]) * float(row["current_a"])
