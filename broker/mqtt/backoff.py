"""Pauses: before the next attempt to connect, and before the way back to the broker whose share one is."""

from __future__ import annotations

import random

FIRST_S = 0.1
LIMIT_S = 10.0
RETURN_S, RETURN_LIMIT_S = 30.0, 600.0
"""The least seconds at another broker before the way back: at first, and at most if the way back fails."""


def delay_s(failures: int) -> float:
    """Returns the seconds to wait after so many failures in a row.

    They are doubled each time, capped, and jittered lest a fleet comes back as one.
    """
    return min(LIMIT_S, FIRST_S * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)


def return_s(failures: int) -> float:
    """Returns the seconds to stay at another broker after so many ways back that failed.

    Spread over as many again, so that a broker that has come back gets its share little by little.
    """
    return min(RETURN_LIMIT_S, RETURN_S * 2.0 ** min(failures, 16)) * random.uniform(1.0, 2.0)
