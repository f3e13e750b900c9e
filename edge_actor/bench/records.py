"""Conditions that every row of a benchmark carries, so that two can be compared; and medians of repeated figures."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge_actor.board import board

Row = dict[str, Any]
Sink = Callable[[Row], None]


def conditions() -> Row:
    """Returns what does not change during a benchmark."""
    return {
        "host": socket.gethostname(),
        **board.as_labels(board.facts()),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def moment() -> Row:
    """Returns what changes: the board's state, the load that others make, and the time."""
    now = board.state()
    return {
        "at_s": time.time(),
        "temperature_c": now.temperature_c,
        "frequency_mhz": now.frequency_mhz,
        "throttled": now.throttled,
        "load_1m": os.getloadavg()[0],
    }


def median(repeats: Sequence[Row], spread: Sequence[str] = ()) -> Row:
    """Returns each number's median over the repeats; for the keys in `spread` also `_low` and `_high`."""
    merged: Row = dict(repeats[-1])
    for key, value in repeats[-1].items():
        if isinstance(value, float):
            merged[key] = statistics.median(row[key] for row in repeats)
    for key in spread:
        values = [row[key] for row in repeats if row[key] is not None]
        merged |= {f"{key}_low": min(values, default=None), f"{key}_high": max(values, default=None)}
    return merged
