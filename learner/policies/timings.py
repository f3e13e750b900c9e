"""Times of the stages of publishing, of the newest publishes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from broker.program import stopwatch

REMEMBERED = 4096
"""Publishes whose times are kept: a run may make millions."""
STAGES = ("calibrate_ms", "quantize_ms", "gate_ms", "delta_ms", "send_ms")
"""Stages that are done one after the other, each time."""
_SUMS = {"calibrate_ms": "calibrate", "quantize_ms": "quantize", "gate_ms": "gate", "delta_ms": "publish"}
"""The stage of the whole run that each is added up in; what `send_ms` has, the session counts as it signs and sends."""


def _newest() -> deque[float]:
    return deque(maxlen=REMEMBERED)


@dataclass(slots=True)
class Timings:
    """Milliseconds of each stage, and until each actor acted on it (learner's clock), of the newest publishes.

    `parts_ms` was done beside the others: the digest, or pieces that went ahead. `put_off_ms` was done after acting:
    ranges for the next policy, and files. `gate_ms` has a large policy's fp32 outputs, made beside it, as far as it
    waited for them. `acted` counts how often an actor began to act on one, all times of the session. `times` has
    the sums since the start: `calibrate` with what was done after acting, `quantize`, `gate`, and in `publish` what
    policies waited for their differences.
    """

    calibrate_ms: deque[float] = field(default_factory=_newest)
    quantize_ms: deque[float] = field(default_factory=_newest)
    gate_ms: deque[float] = field(default_factory=_newest)
    delta_ms: deque[float] = field(default_factory=_newest)
    send_ms: deque[float] = field(default_factory=_newest)
    parts_ms: deque[float] = field(default_factory=_newest)
    put_off_ms: deque[float] = field(default_factory=_newest)
    acting_ms: deque[float] = field(default_factory=_newest)
    acted: int = 0
    times: stopwatch.Stopwatch = field(default_factory=lambda: stopwatch.Stopwatch(*_SUMS.values()))

    def add(self, name: str, ms: float) -> None:
        """Adds what a stage took of one policy, in milliseconds."""
        getattr(self, name).append(ms)
        if name in _SUMS:
            self.times.add(_SUMS[name], ms / 1e3)

    def add_acting(self, ms: float) -> None:
        """Adds what it took until one more actor acted on a policy, in milliseconds."""
        self.acting_ms.append(ms)
        self.acted += 1

    def newest(self) -> dict[str, float]:
        """Returns the newest time of each stage that there is, and until an actor acted."""
        row = {name: times[-1] for name in STAGES if (times := getattr(self, name))}
        return row | ({"publish_to_acting_ms": self.acting_ms[-1]} if self.acting_ms else {})

    def summary(self) -> dict[str, float | None]:
        """Returns the median of each stage, and median, 99th percentile and count of what it took to act."""
        medians = {f"{name}_p50": _percentile(getattr(self, name), 50) for name in STAGES}
        return medians | {
            "publish_to_acting_ms_p50": _percentile(self.acting_ms, 50),
            "publish_to_acting_ms_p99": _percentile(self.acting_ms, 99),
            "publish_to_acting_count": self.acted,
        }

    def acting_percentiles(self) -> list[float]:
        """Returns the percentiles 0 to 100 of what it took to act; none where nobody did."""
        values = np.percentile(self.acting_ms, np.arange(101)) if self.acting_ms else ()
        return [round(float(value), 3) for value in values]


def _percentile(values: deque[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None
