"""Draws how long it takes from an observation to an action, and from an update to an actor's acting; and policy lag."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import ticker
from numpy.typing import NDArray

from learner.study.report import grouping, reading, svg, tables

LAGS_SHOWN = 12
_TIMES = {"invoke_us": "network alone", "observation_to_action_us": "observation to action"}
Floats = NDArray[np.float64]


def pictures(panel: grouping.Panel) -> list[svg.Picture]:
    """Returns what a panel's runs tell of times and lag."""
    made = (_acting(panel), _publish_to_acting(panel), _lag(panel))
    return [picture for picture in made if picture is not None]


def _acting(panel: grouping.Panel) -> svg.Picture | None:
    """Draws each arm's median and 99th percentile of the time to an action, over runs."""
    rows = []
    for index, arm in enumerate(panel.arms):
        for key, what in _TIMES.items():
            p50, p99 = (_numbers(arm.runs, f"{key}_{end}") for end in ("p50", "p99"))
            if p50:
                rows.append((index, arm.label, what, p50, p99 or p50, _kernels(arm.runs)))
    if not rows:
        return None
    made, drawn = svg.new(0.8 + 0.44 * len(rows), axis="x")
    for y, (index, label, what, p50, p99, _) in enumerate(rows):
        colour = svg.colour(index)
        drawn.plot([statistics.median(p50), statistics.median(p99)], [y, y], color=colour, linewidth=2.4, alpha=0.6)
        drawn.plot(p50, [y] * len(p50), "o", color=colour, markersize=4.5)
        drawn.plot(p99, [y] * len(p99), "|", color=colour, markersize=9)
        name = what if len(panel.arms) == 1 else f"{tables.label(label)}: {what}"
        svg.name(drawn, y - 0.2, name)
    drawn.set_ylim(len(rows) - 0.5, -0.85)
    drawn.set_yticks([])
    drawn.set_xlim(left=0)
    drawn.set_xlabel("µs (dot: median of a run, stroke: 99th percentile)")
    text = "; ".join(
        f"{label}, {what}: median {tables.shown(statistics.median(p50))} µs, 99th percentile "
        f"{tables.shown(statistics.median(p99))} µs ({kernels})"
        for _, label, what, p50, p99, kernels in rows
    )
    body = [
        (label, what, tables.shown(statistics.median(p50)), tables.shown(statistics.median(p99)), len(p50), kernels)
        for _, label, what, p50, p99, kernels in rows
    ]
    head = ("runs", "time", "median, µs", "99th percentile, µs", "of runs", "kernels")
    title = f"Time to an action, one observation: {panel.title}"
    return svg.finish(made, title, f"{text}.", tables.table(head, body, words=(0, 1, 5)))


def _publish_to_acting(panel: grouping.Panel) -> svg.Picture | None:
    """Draws the distribution of the time from the end of an update until an actor acts on its policy."""
    samples = {arm.label: found for arm in panel.arms if len(found := _acting_ms(arm.runs))}
    if not samples:
        return None
    made, drawn = svg.new()
    body = []
    for index, (label, found) in enumerate(samples.items()):
        shares = np.linspace(0, 100, 101)
        drawn.plot(
            np.maximum(np.percentile(found, shares), 0.1),
            shares,
            color=svg.colour(index),
            linestyle=svg.DASHES[index % len(svg.DASHES)],
            linewidth=1.8,
            label=tables.label(label),
        )
        body.append((label, *(tables.shown(float(np.percentile(found, q))) for q in (5, 25, 50, 75, 95, 99, 100))))
    drawn.set_xscale("log")
    drawn.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    drawn.xaxis.set_minor_formatter(ticker.NullFormatter())
    drawn.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    drawn.set_ylim(0, 100)
    drawn.set_xlabel("ms until an actor acts on a policy, by the learner's clock")
    drawn.set_ylabel("share of policies, %")
    svg.legend(drawn, len(samples))
    text = "; ".join(
        f"{label}: half within {tables.shown(float(np.percentile(found, 50)))} ms, 99 % within "
        f"{tables.shown(float(np.percentile(found, 99)))} ms"
        for label, found in samples.items()
    )
    head = ("runs", "5 %", "25 %", "median", "75 %", "95 %", "99 %", "longest, ms")
    title = f"From an update to an actor that acts on it: {panel.title}"
    return svg.finish(made, title, f"{text}.", tables.table(head, body))


def _lag(panel: grouping.Panel) -> svg.Picture | None:
    """Draws how many versions old the policies were that chose the steps, when those arrived."""
    lags = {arm.label: found for arm in panel.arms if (found := _lags(arm.runs))}
    if not lags:
        return _mean_lag(panel)
    longest = min(max(max(found) for found in lags.values()), LAGS_SHOWN)
    made, drawn = svg.new(3.0)
    width = 0.84 / len(lags)
    for index, (label, found) in enumerate(lags.items()):
        total = sum(found.values())
        heights = [100 * found.get(lag, 0) / total for lag in range(longest)]
        heights.append(100 * sum(steps for lag, steps in found.items() if lag >= longest) / total)
        at = [lag + (index - (len(lags) - 1) / 2) * width for lag in range(longest + 1)]
        drawn.bar(at, heights, width=0.92 * width, color=svg.colour(index), label=tables.label(label))
    ticks = [*map(str, range(longest)), f"{longest}+" if longest == LAGS_SHOWN else str(longest)]
    drawn.set_xticks(range(longest + 1), ticks)
    drawn.set_xlabel("versions behind the newest policy")
    drawn.set_ylabel("share of steps, %")
    svg.legend(drawn, len(lags))
    text = "; ".join(
        f"{label}: {100 * found.get(0, 0) / sum(found.values()):.0f} % of the steps by the newest policy, "
        f"{_mean(found):.2f} versions behind on average"
        for label, found in lags.items()
    )
    body = [(label, _mean_text(found), *_shares(found)) for label, found in lags.items()]
    head = ("runs", "mean, versions", "0", "1", "2 to 4", "5 or more")
    title = f"Policy lag: {panel.title}"
    return svg.finish(made, title, f"{text}.", tables.table(head, body))


def _mean_lag(panel: grouping.Panel) -> svg.Picture | None:
    """Draws the mean lag so far over time, of runs that kept no more than that."""
    made, drawn = svg.new(3.0)
    ends = []
    for index, arm in enumerate(panel.arms):
        for run in arm.runs:
            points = run.series("policy_lag_mean")
            if len(points) > 1:
                kept = points[:: max(1, len(points) // 200)]
                drawn.plot(*zip(*kept, strict=True), color=svg.colour(index), linewidth=1.2)
        found = _numbers(arm.runs, "policy_lag_mean_versions")
        if found:
            ends.append((arm.label, tables.shown(statistics.median(found)), len(found)))
    if not ends or not drawn.lines:
        return None
    drawn.set_xlabel("environment steps")
    drawn.xaxis.set_major_formatter(svg.thousands)
    drawn.locator_params(axis="x", nbins=6)
    drawn.set_ylabel("versions, mean so far")
    text = "; ".join(f"{label}: {mean} versions at the end (median of {count} runs)" for label, mean, count in ends)
    table = tables.table(("runs", "mean, versions", "of runs"), ends)
    return svg.finish(made, f"Policy lag: {panel.title}", f"{text}.", table)


def _acting_ms(runs: Sequence[reading.Run]) -> Floats:
    """Returns samples of publish-to-acting: percentiles of each run where it kept them, else its rows' newest."""
    samples: list[float] = []
    for run in runs:
        kept = run.details.get("publish_to_acting_ms")
        found = [value for item in kept if (value := tables.number(item)) is not None] if isinstance(kept, list) else []
        samples += found or [value for _, value in run.series("publish_to_acting_ms")]
    return np.array([value for value in samples if value >= 0], float)


def _lags(runs: Sequence[reading.Run]) -> Counter[int]:
    found: Counter[int] = Counter()
    for run in runs:
        kept = run.details.get("policy_lag_steps")
        for lag, steps in kept.items() if isinstance(kept, dict) else ():
            if lag.isdecimal() and len(lag) < 10 and (count := tables.number(steps)) is not None and count > 0:
                found[int(lag)] += int(count)
    return found


def _shares(found: Counter[int]) -> list[str]:
    total = sum(found.values())
    bins: list[Callable[[int], bool]] = [
        lambda lag: lag == 0,
        lambda lag: lag == 1,
        lambda lag: 2 <= lag <= 4,
        lambda lag: lag >= 5,
    ]
    return [f"{100 * sum(n for lag, n in found.items() if inside(lag)) / total:.1f} %" for inside in bins]


def _mean(found: Counter[int]) -> float:
    return sum(lag * steps for lag, steps in found.items()) / sum(found.values())


def _mean_text(found: Counter[int]) -> str:
    return f"{_mean(found):.2f}"


def _numbers(runs: Sequence[reading.Run], key: str) -> list[float]:
    return [value for run in runs if (value := tables.number(run.summary.get(key))) is not None]


def _kernels(runs: Sequence[reading.Run]) -> str:
    named = {
        f"{run.summary.get('runtime')}, {run.summary.get('delegate')}" for run in runs if run.summary.get("runtime")
    }
    return tables.listed(sorted(named)) or "kernels not told"
