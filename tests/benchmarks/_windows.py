"""Updates of a learner in short windows with something and without, so close together that drift is in both alike."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

AROUND_S = 2.0
"""Each window is told in the mean rate of so much time before its middle and behind it."""


class Ratio(NamedTuple):
    """Updates in windows with something over those in windows without.

    Attributes:
        value: Of the means: a median would not see what is dear and rare.
        error: Its standard error.
        windows: How many, with and without.
        rate: Updates/s with it.
        reference: Without.
    """

    value: float
    error: float
    windows: int
    rate: float
    reference: float


def read(file: Path) -> NDArray[np.float64]:
    """Returns the rows of numbers that a process has written so far, of two columns."""
    return np.array([line.split() for line in file.read_text().rpartition("\n")[0].splitlines()], float).reshape(-1, 2)


def compare(passes: NDArray[np.float64], windows: NDArray[np.float64], length_s: float) -> Ratio:
    """Compares windows with something with those without.

    Args:
        passes: [n, 2], seconds and updates made by then; within a pass they count as even.
        windows: [m, 2], seconds at which a window begins, and 1 with it or 0 without. Those too near to an end of
            `passes` do not count.
        length_s: Of each window.
    """
    at, is_on = windows[:, 0], windows[:, 1] > 0
    whole = (at - AROUND_S > passes[0, 0]) & (at + AROUND_S + length_s < passes[-1, 0])
    at, is_on = at[whole], is_on[whole]

    def rate(begins: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.float64]:
        made: NDArray[np.float64] = np.interp(ends, *passes.T) - np.interp(begins, *passes.T)
        return made / (ends - begins)

    middle = at + length_s / 2
    own = rate(at, at + length_s)
    told = own / rate(middle - AROUND_S, middle + AROUND_S)
    on, off = told[is_on], told[~is_on]
    value = float(on.mean() / off.mean())
    error = value * sum(one.var(ddof=1) / len(one) / one.mean() ** 2 for one in (on, off)) ** 0.5
    return Ratio(value, float(error), len(told), float(own[is_on].mean()), float(own[~is_on].mean()))
