"""Ratios and differences of runs that are paired by their seeds, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from learner.quantize import compare

FEW = 6
"""Pairs below which a bootstrap interval is narrower than it claims: resamples of few values cannot show how far others
would lie."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Figures of one arm beside those of another.

    Attributes:
        value, reference: Means over the pairs.
        ratio: Geometric mean of the pairs' ratios; None where one of them has none, and for differences.
        difference: Mean of the pairs' differences.
        interval: Of the ratio, or else of the difference, 95 %; None of a single pair.
        spread: The largest less the smallest of what the interval is about.
        pairs: How many seeds both have.
    """

    value: float
    reference: float
    ratio: float | None
    difference: float
    interval: tuple[float, float] | None
    spread: float
    pairs: int


def paired(
    values: Mapping[int, float], references: Mapping[int, float], *, as_difference: bool = False
) -> Paired | None:
    """Compares figures by seed; None where no seed has both.

    Pairs are resampled as pairs: a seed that is hard for both says little about their ratio, and one that is hard for
    one of them much.

    Args:
        values: Of an arm, by seed.
        references: Of the arm that it is compared with.
        as_difference: For figures that may be zero or negative, of which a ratio says nothing.
    """
    seeds = sorted(values.keys() & references.keys())
    if not seeds:
        return None
    ours = np.array([values[seed] for seed in seeds], np.float64)
    theirs = np.array([references[seed] for seed in seeds], np.float64)
    has_ratio = not as_difference and bool((ours > 0).all() and (theirs > 0).all())
    found = np.log(ours / theirs) if has_ratio else ours - theirs
    back = np.exp if has_ratio else np.asarray
    interval = back(np.array(compare.interval(found))) if len(seeds) > 1 else None
    return Paired(
        value=float(ours.mean()),
        reference=float(theirs.mean()),
        ratio=float(np.exp(found.mean())) if has_ratio else None,
        difference=float((ours - theirs).mean()),
        interval=(float(interval[0]), float(interval[1])) if interval is not None else None,
        spread=float(np.ptp(back(found))),
        pairs=len(seeds),
    )


def remark(pairs: int) -> str:
    """Returns what a reader must know of an interval over so few pairs; empty if nothing."""
    if pairs == 1:
        return "one seed: no interval"
    if pairs < FEW:
        return f"{pairs} seeds: the interval is narrower than it claims, take {FEW} or more"
    return ""
