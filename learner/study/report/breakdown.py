"""Draws where the time goes: ours beside what ActorQ published, and every stage of learner and actors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from learner.study.report import grouping, reading, svg, tables

PARTS = {"step": "step", "pull": "pull", "deserialise": "deserialise", "load": "load"}
ACTORQ_S = {"step": 6.53, "pull": 0.49, "deserialise": 0.15, "load": 1.94}
"""Actor time of ActorQ with int8, a pull every 30 steps; read off the authors' figure, to about 2 %."""
ACTORQ_TOTAL_S = {("fp32", 30): 14.9, ("int8", 30): 9.1, ("fp32", 300): 11.2, ("int8", 300): 5.6}
"""The whole of it, by precision and steps between two pulls."""
DIFFERS = (
    "What differs: ActorQ's actors were four PyTorch processes on one x86 machine, its int8 was dynamic (only weights "
    "are int8 ahead of time), its network 2048x3, policies were pulled every 30 steps; its figures are read off a "
    "picture, to about 2 %. Here actors run TFLite files, and policies are pushed over MQTT, mostly as differences: "
    "pull is receiving one, deserialise checking and assembling it, load building it and swapping it in; step "
    "is environment, inference and recording."
)
_STAGES_SHOWN = 14
_NO_WORK = ("wait", "broker")
"""Stages in which nobody works: what is waited for, and messages on their way."""
Object = Mapping[str, Any]


def published(panels: Sequence[grouping.Panel]) -> svg.Picture | None:
    """Returns the actor's time in ActorQ's four parts, ours and theirs."""
    ours = {f"{label}: {arm.label}" if label else arm.label: found for label, arm, found in _of_arms(panels)}
    if not ours:
        return None
    shown = {"ActorQ, int8 (published)": ACTORQ_S} | ours
    made, drawn = svg.new(0.95 + 0.46 * len(shown), axis="x")
    for row, (label, seconds) in enumerate(shown.items()):
        total, start = sum(seconds.values()), 0.0
        for index, part in enumerate(PARTS):
            share = 100 * seconds[part] / total
            hatch = ("", "//", "--", "xx")[index]
            drawn.barh(
                row,
                share,
                left=start,
                height=0.42,
                color=svg.colour(index),
                alpha=0.85,
                hatch=hatch,
                edgecolor="none",
                label=PARTS[part] if row == 0 else None,
            )
            start += share
        svg.name(drawn, row - 0.27, tables.plain(label, 64))
    drawn.set_ylim(len(shown) - 0.5, -0.8)
    drawn.set_yticks([])
    drawn.set_xlim(0, 100)
    drawn.set_xlabel("share of the actors' time, %")
    drawn.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, borderaxespad=0.2, handlelength=1.2)
    text = "; ".join(f"{tables.plain(name, 80)}: {_shares(seconds)}" for name, seconds in shown.items())
    return svg.finish(made, "The actors' time, ours beside ActorQ's", f"{text}.", _published_table(ours))


def stages(panel: grouping.Panel, who: str) -> svg.Picture | None:
    """Returns the share of each stage in the work of `learner` or `actors`, by arm; waiting is told in words."""
    every = {arm.label: found for arm in panel.arms if (found := _stage_seconds(arm.runs, who))}
    arms = {label: {name: s for name, s in found.items() if name not in _NO_WORK} for label, found in every.items()}
    arms = {label: found for label, found in arms.items() if found}
    if not arms:
        return None
    order = sorted({name for found in arms.values() for name in found}, key=lambda name: -_most(arms, name))
    most = order[:_STAGES_SHOWN]
    made, drawn = svg.new(0.9 + 0.3 * len(most) * (0.55 + 0.3 * len(arms)), axis="x")
    height = 0.8 / len(arms)
    for index, (label, found) in enumerate(arms.items()):
        drawn.barh(
            [row + (index - (len(arms) - 1) / 2) * height for row in range(len(most))],
            [_share(found, name) for name in most],
            height=0.9 * height,
            color=svg.colour(index),
            label=tables.label(label),
        )
    drawn.set_yticks(range(len(most)), [tables.label(name.replace("_", " ")) for name in most])
    drawn.invert_yaxis()
    drawn.set_xlabel("share of the work, %")
    svg.legend(drawn, len(arms))
    text = "; ".join(f"{label}: {_largest(found)}{_waits(every[label])}" for label, found in arms.items())
    more = " Its threads work beside each other." if who == "learner" else " Of all actors together."
    names = [*order, *(name for name in _NO_WORK if any(name in found for found in every.values()))]
    body = [
        (name.replace("_", " "), *(cell for label in arms for cell in _cells(every[label], arms[label], name)))
        for name in names
    ]
    head = ("stage", *(cell for label in arms for cell in (f"{label}, s a run", "of the work")))
    title = f"{'What the learner works on' if who == 'learner' else 'What the actors work on'}: {panel.title}"
    return svg.finish(made, title, f"{text}.{more}", tables.table(head, body))


def _of_arms(panels: Sequence[grouping.Panel]) -> list[tuple[str, grouping.Arm, dict[str, float]]]:
    many = len(panels) > 1
    return [
        (panel.title if many else "", arm, found)
        for panel in panels
        for arm in panel.arms
        if (found := _actorq_seconds(arm.runs))
    ]


def _actorq_seconds(runs: Sequence[reading.Run]) -> dict[str, float]:
    """Returns the median over runs of each of ActorQ's parts in seconds per 1000 environment steps."""
    found: list[dict[str, float]] = []
    for run in runs:
        parts, steps = _object(run.summary.get("breakdown"), "actorq"), run.session_steps
        seconds = {part: tables.number(parts.get(part)) for part in PARTS}
        if steps and all(value is not None and value >= 0 for value in seconds.values()):
            found.append({part: 1000 * (value or 0.0) / steps for part, value in seconds.items()})
    medians = {part: statistics.median(one[part] for one in found) for part in PARTS} if found else {}
    return medians if sum(medians.values()) > 0 else {}


def _stage_seconds(runs: Sequence[reading.Run], who: str) -> dict[str, float]:
    """Returns the median over runs of each stage's seconds; without those that took none."""
    seconds: dict[str, list[float]] = {}
    for run in runs:
        for name, stage in _object(run.summary.get("breakdown"), who).items():
            total = tables.number(stage.get("total_s")) if isinstance(stage, dict) else None
            if total is not None and total >= 0:
                seconds.setdefault(tables.plain(name, 40), []).append(total)
    return {name: taken for name, values in seconds.items() if (taken := statistics.median(values)) > 0}


def _object(value: Any, name: str) -> Object:
    inner = value.get(name) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def _published_table(ours: Mapping[str, Mapping[str, float]]) -> str:
    head = ("actors", *PARTS, "total", "unit")
    rows: list[Sequence[Any]] = [
        (label, *(tables.shown(found[part]) for part in PARTS), tables.shown(sum(found.values())), "s per 1000 steps")
        for label, found in ours.items()
    ]
    rows.append(("ActorQ int8, pull every 30 steps", *ACTORQ_S.values(), ACTORQ_TOTAL_S["int8", 30], "s, as published"))
    rows += [
        (f"ActorQ {precision}, pull every {pull} steps", "-", "-", "-", "-", total, "s, as published")
        for (precision, pull), total in ACTORQ_TOTAL_S.items()
        if (precision, pull) != ("int8", 30)
    ]
    return tables.table(head, rows, words=(0, 6))


def _shares(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    return ", ".join(f"{PARTS[part]} {100 * seconds[part] / total:.0f} %" for part in PARTS)


def _largest(found: Mapping[str, float]) -> str:
    total = sum(found.values())
    first = sorted(found.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name.replace('_', ' ')} {100 * value / total:.0f} %" for name, value in first)


def _waits(every: Mapping[str, float]) -> str:
    """Returns how much of the time was none of work; empty where nothing is told of that."""
    waited_s = every.get("wait", 0.0)
    total_s = sum(seconds for name, seconds in every.items() if name != "broker")
    return f"; besides, {100 * waited_s / total_s:.0f} % of the time went by in waiting" if waited_s else ""


def _most(arms: Mapping[str, Mapping[str, float]], name: str) -> float:
    return max(_share(found, name) for found in arms.values())


def _share(found: Mapping[str, float], name: str) -> float:
    return 100 * found.get(name, 0.0) / sum(found.values())


def _cells(every: Mapping[str, float], work: Mapping[str, float], name: str) -> tuple[str, str]:
    return tables.shown(every.get(name)), "no work" if name in _NO_WORK else f"{_share(work, name):.1f} %"
