"""Measures how fast the machine was during a row: a shared one may be half as fast from one hour to the next.

Processors differ in more than speed: one without AVX-512 but with instructions for SHA-256 hashes as fast as another
one that multiplies matrices three times as fast.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

_BYTES, _SIZE = 8 << 20, 512
_STAT = Path("/proc/stat")


def watch() -> Callable[[], str]:
    """Returns what tells how long a fixed work takes, and how much CPU others have taken since now."""
    before = _jiffies()

    def tell() -> str:
        spent = [b - a for a, b in zip(before, _jiffies(), strict=True)]
        stolen = f", {spent[7] / sum(spent):.0%} of its CPU stolen since the benchmark began" if sum(spent) else ""
        digest_ms, product_ms = (min(work() for _ in range(5)) for work in (_digest_ms, _product_ms))
        digest = f"SHA-256 of {_BYTES >> 20} MB takes {digest_ms:.1f} ms"
        return f"{digest}, a float32 product of {_SIZE}^3 {product_ms:.1f}{stolen}"

    return tell


def _jiffies() -> list[int]:
    """User, nice, system, idle, iowait, irq, softirq, steal; nothing where there is no such file."""
    return [int(n) for n in _STAT.read_text().split("\n", 1)[0].split()[1:9]] if _STAT.exists() else []


def _digest_ms() -> float:
    data = bytes(_BYTES)
    began = time.perf_counter()
    hashlib.sha256(data).digest()
    return (time.perf_counter() - began) * 1e3


def _product_ms() -> float:
    import numpy as np  # not above: `__main__` first says how many threads it shall use

    one = np.ones((_SIZE, _SIZE), np.float32)
    began = time.perf_counter()
    one @ one
    return (time.perf_counter() - began) * 1e3
