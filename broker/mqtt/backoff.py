"""The pause before the next attempt to connect."""

from __future__ import annotations

import random

FIRST_S = 0.1
LIMIT_S = 10.0


def delay_s(failures: int) -> float:
    """Returns the seconds to wait after so many failures in a row.

    They are doubled each time, capped, and jittered lest a fleet comes back as one.
    """
    return min(LIMIT_S, FIRST_S * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)
