"""How long to wait before the next attempt."""

from __future__ import annotations

import random

FIRST_S = 0.1
LIMIT_S = 10.0


def delay_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubled, capped, and jittered lest a fleet comes back as one."""
    return min(LIMIT_S, FIRST_S * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)
