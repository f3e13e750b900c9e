"""Learning curves: each run thin, their median, and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.study.report import grouping, reading, svg, tables

POINTS = 160
"""Points of a curve: more than a picture can show."""
_QUARTILES_FROM = 5
_WHAT = {
    "return_mean": "Training return, mean of the last 100 episodes, exploration included",
    "published_return_mean": "Return of the policies as published, greedy, played by actors",
}
_AXES = {"env_steps": "environment steps", "wall_s": "seconds of the learner"}
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure of the runs of an arm: thin curves, and their median and spread on common points [P]."""

    thin: Sequence[tuple[Floats, Floats]]
    at: Floats
    median: Floats
    low: Floats
    high: Floats


def pictures(panel: grouping.Panel) -> list[svg.Picture]:
    """Returns the learning curves of a panel: by steps, and of what was published by time, too."""
    wanted = (("return_mean", "env_steps"), ("published_return_mean", "env_steps"), ("published_return_mean", "wall_s"))
    return [made for name, by in wanted if (made := _picture(panel, name, by)) is not None]


def _picture(panel: grouping.Panel, name: str, by: str) -> svg.Picture | None:
    curves = {arm.label: curve for arm in panel.arms if (curve := _curve(arm.runs, name, by)) is not None}
    if not curves:
        return None
    made, drawn = svg.new()
    rows: list[Sequence[Any]] = []
    for index, (label, curve) in enumerate(curves.items()):
        colour, dashes = svg.colour(index), svg.DASHES[index % len(svg.DASHES)]
        for xs, ys in curve.thin:
            drawn.step(xs, ys, where="post", color=colour, linewidth=0.6, alpha=0.45)
        if len(curve.thin) > 1:
            drawn.fill_between(curve.at, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
        drawn.plot(curve.at, curve.median, color=colour, linewidth=2.0, linestyle=dashes, label=tables.label(label))
        shares = (0, len(curve.at) // 4, len(curve.at) // 2, 3 * len(curve.at) // 4, -1)
        rows += [
            (label, *(tables.shown(curve_of[k]) for curve_of in (curve.at, curve.median, curve.low, curve.high)))
            for k in shares
        ]
    goals = {run.goal for arm in panel.arms for run in arm.runs if run.goal is not None}
    for goal in goals:
        drawn.axhline(goal, color=svg.MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    drawn.set_xlabel(_AXES[by])
    drawn.xaxis.set_major_formatter(svg.thousands)
    drawn.locator_params(axis="x", nbins=6)
    drawn.set_ylabel("return")
    drawn.set_xlim(left=0)
    svg.legend(drawn, len(curves))
    title = f"{_WHAT[name]}, by {_AXES[by]}: {panel.title}"
    head = ("runs", _AXES[by], "median", "low", "high")
    return svg.finish(made, title, _text(curves, by, goals), tables.table(head, rows))


def _text(curves: dict[str, Curve], by: str, goals: set[float]) -> str:
    unit = "steps" if by == "env_steps" else "s"
    parts = [f"{label}: {_end(curve)} after {tables.shown(curve.at[-1])} {unit}" for label, curve in curves.items()]
    counts = {len(curve.thin) for curve in curves.values()}
    few = max(counts) < _QUARTILES_FROM
    how = "" if counts == {1} else f" Thin: each run; band: {'smallest to largest' if few else 'middle half'}."
    goal = f" Dashed: the goal, {tables.listed(tables.shown(one) for one in sorted(goals))}." if goals else ""
    return f"{'; '.join(parts)}.{how}{goal}"


def _end(curve: Curve) -> str:
    """Returns what a curve came to."""
    last, low, high = (tables.shown(of[-1]) for of in (curve.median, curve.low, curve.high))
    return last if len(curve.thin) == 1 else f"median {last} ({low} to {high})"


def _curve(runs: Sequence[reading.Run], name: str, by: str) -> Curve | None:
    """Returns the curves of runs; where one has ended, its last figure goes on."""
    pairs = [found for run in runs if (found := _points(run, name, by))]
    if not pairs:
        return None
    arrays = [
        (np.array(xs, float), np.array(ys, float)) for xs, ys in (zip(*sorted(one), strict=True) for one in pairs)
    ]
    start = max(xs[0] for xs, _ in arrays)  # before, the median would be of those alone that were first
    at = np.linspace(start, max(xs[-1] for xs, _ in arrays), POINTS)
    values = np.stack([_held(xs, ys, at) for xs, ys in arrays])
    ends = (25, 75) if len(runs) >= _QUARTILES_FROM else (0, 100)
    low, median, high = np.percentile(values, (ends[0], 50, ends[1]), axis=0)
    return Curve([_thinned(xs, ys) for xs, ys in arrays], at, median, low, high)


def _points(run: reading.Run, name: str, by: str) -> list[tuple[float, float]]:
    """Returns the rows' figures; of what was published also the last score, which no row has.

    A run without rows has no curve: its last score alone would leave no room for the median of the others.
    """
    points = run.series(name, by)
    if name == "published_return_mean" and run.rows:
        end = tables.number(run.summary.get("env_steps" if by == "env_steps" else "learner_wall_s"))
        end = run.wall_before_s + end if end is not None and by == "wall_s" else end
        score = tables.number(run.summary.get(f"{run.precision}_return_mean"))
        if end is not None and score is not None:
            points.append((end, score))
    return points


def _held(xs: Floats, ys: Floats, at: Floats) -> Floats:
    """Returns the figure that was last known at each point, none of which is before the first."""
    return ys[np.maximum(np.searchsorted(xs, at, side="right") - 1, 0)]


def _thinned(xs: Floats, ys: Floats) -> tuple[Floats, Floats]:
    kept = np.unique(np.linspace(0, len(xs) - 1, min(len(xs), POINTS)).round().astype(int))
    return xs[kept], ys[kept]
