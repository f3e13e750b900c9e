"""The time of day, where this board can know it: only a Pi 5 has a clock of its own, the others boot into the past.

What depends on the date (a policy that expires) asks here; durations are measured on the monotonic clock.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

_TIMESYNCD = Path("/run/systemd/timesync/synchronized")
"""Touched by systemd-timesyncd when it has set the clock; gone with the next boot."""
_TIME_ERROR = 5  # adjtimex(2): "the system clock is not synchronized"
_TIMEX_BYTES = 512  # more than struct timex has on any architecture


def now_s() -> float | None:
    """Returns Unix time; None as long as nothing has synchronised the clock since the machine started."""
    return time.time() if _TIMESYNCD.exists() or _kernel_is_synchronised() else None


def _kernel_is_synchronised() -> bool:
    """Returns what the kernel says. It takes that back when it was not told the time for some hours."""
    if not sys.platform.startswith("linux"):
        return True  # machines on a desk
    status = ctypes.create_string_buffer(_TIMEX_BYTES)  # `modes` is its first field: 0 asks and sets nothing
    state: int = ctypes.CDLL(None).adjtimex(status)
    return 0 <= state < _TIME_ERROR
