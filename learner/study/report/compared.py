"""Policies and arms beside each other: ratios with their intervals, and what int8 loses to fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import ticker

from learner.study.report import reading, svg, tables

_ROWS_MAX = 14
_EXPLAINED = ("env_steps_per_s", "threshold_s")
"""Measures whose pictures say what explains each ratio; of the others the table does."""
Object = Mapping[str, Any]


def ratios(comparison: reading.Comparison) -> list[svg.Picture]:
    """Returns a forest plot for each figure that was compared, and each regime: ratios and their intervals."""
    groups: dict[tuple[str, str], list[Object]] = {}
    for row in comparison.rows:
        groups.setdefault((_figure(row), tables.plain(row.get("regime") or "", 40)), []).append(row)
    made = []
    for (name, regime), rows in groups.items():
        drawn = [row for row in rows if tables.number(row.get("ratio")) is not None]
        parts = [drawn[k : k + _ROWS_MAX] for k in range(0, len(drawn), _ROWS_MAX)]
        for index, part in enumerate(parts, 1):
            title = f"{name}{f', {regime}' if regime else ''}"
            title += f", {index} of {len(parts)}" if len(parts) > 1 else ""
            made.append(_forest(title, part))
    return made


def ratio_table(comparison: reading.Comparison) -> str:
    """Returns all rows of a comparison, those without a ratio included."""
    head = (
        "case",
        "value",
        "reference",
        "unit",
        "ratio",
        "difference",
        "interval",
        "runs",
        "spread",
        "what explains it",
    )
    body = [
        (
            _case_name(row),
            _loose(row.get("value")),
            _loose(row.get("reference")),
            row.get("unit", "-"),
            tables.shown(row.get("ratio")),
            tables.shown(row.get("difference")),
            _interval_text(row),
            _loose(row.get("runs")),
            _loose(row.get("spread")),
            _loose(row.get("explain")),
        )
        for row in comparison.rows
    ]
    return tables.table(head, body, words=(0, 3, 9))


_OF_STATES = {
    "kl_mean": ("KL divergence of the distribution of actions, nats", 1.0),
    "agreement": ("states with the same action, %", 100.0),
    "error_mean": ("mean error of an action, % of its range", 100.0),
}
"""What says how near a policy is to fp32, state by state: by key of its row words, and a factor for its numbers."""


def fidelity(run: reading.Run) -> svg.Picture | None:
    """Returns what each way to make the policy loses to fp32, of a run that was studied."""
    study = run.fidelity
    rows = (
        [row for row in study.get("rows", []) if isinstance(row, dict)] if isinstance(study.get("rows"), list) else []
    )
    if not rows:
        return None
    played = [row for row in rows if tables.number(row.get("return_difference")) is not None]
    states = next((key for key in _OF_STATES if tables.number(rows[0].get(key)) is not None), "error_mean")
    shown = played or [row for row in rows if tables.number(row.get(states)) is not None]
    if not shown:
        return None
    what, scale = _OF_STATES[states]
    made, drawn = svg.new(0.85 + 0.36 * len(shown), axis="x")
    for y, row in enumerate(shown):
        is_published = row.get("recipe") == "as published"
        colour = svg.colour(1 if is_published else 0)
        if played:
            low, high = tables.number(row.get("return_low")), tables.number(row.get("return_high"))
            if low is not None and high is not None:
                drawn.plot([low, high], [y, y], color=colour, linewidth=2.2, alpha=0.6)
            drawn.plot(tables.number(row["return_difference"]) or 0.0, y, "o", color=colour, markersize=5)
        else:
            drawn.plot(scale * (tables.number(row[states]) or 0.0), y, "o", color=colour, markersize=5)
    drawn.set_yticks(range(len(shown)), [tables.label(row.get("recipe", "?")) for row in shown])
    drawn.set_ylim(len(shown) - 0.5, -0.5)
    if played:
        drawn.axvline(0.0, color=svg.MUTED, linewidth=0.9)
        drawn.set_xlabel("return less that of fp32, 95 % interval")
        sentences = [
            f"{row.get('recipe')} {tables.shown(row['return_difference'])} ({tables.shown(row.get('return_low'))} to "
            f"{tables.shown(row.get('return_high'))})"
            for row in shown
        ]
        text = (
            f"fp32 returns {tables.shown(study.get('fp32_return'))}, "
            f"chance {tables.shown(study.get('random_return'))}, "
            f"mean of {study.get('episodes')} episodes. Less fp32: {'; '.join(sentences)}."
        )
    else:
        drawn.set_xlabel(what)
        values = [f"{row.get('recipe')} {tables.shown(scale * (tables.number(row[states]) or 0.0))}" for row in shown]
        text = f"{what}: {'; '.join(values)}. Not played: {study.get('not_played') or 'nothing says why'}."
    title = f"Fidelity to fp32: {tables.label(study.get('env_id') or run.task)}, {run.name}"
    return svg.finish(made, title, tables.plain(text, 2000), _fidelity_table(rows))


def _forest(title: str, rows: Sequence[Object]) -> svg.Picture:
    made, drawn = svg.new(0.8 + 0.46 * len(rows), axis="x")
    bounds = [tables.number(row["ratio"]) or 1.0 for row in rows]
    who = list(dict.fromkeys(_who(row) for row in rows))
    for y, row in enumerate(rows):
        colour = svg.colour(who.index(_who(row)))
        ratio, ends = tables.number(row["ratio"]) or 1.0, _interval(row)
        if ends:
            drawn.plot(ends, [y, y], color=colour, linewidth=2.4, alpha=0.6)
            bounds += ends
        drawn.plot(ratio, y, "o", color=colour, markersize=6)
        svg.name(drawn, y - 0.2, f"{tables.label(_short(row))}: {tables.shown(ratio)}")
    drawn.axvline(1.0, color=svg.MUTED, linewidth=1.0)
    if min(bounds) > 0:
        drawn.set_xscale("log")
        drawn.set_xlim(min(*bounds, 0.9) / 1.08, max(*bounds, 1.1) * 1.08)
        drawn.xaxis.set_major_locator(_ticks(min(*bounds, 0.9), max(*bounds, 1.1)))
        drawn.xaxis.set_minor_locator(_ticks(1.0, 1.0, none=True))
        drawn.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    drawn.set_ylim(len(rows) - 0.5, -0.85)
    drawn.set_yticks([])
    better = {"higher": "; more is better", "lower": "; less is better"}.get(str(rows[0].get("better")), "")
    drawn.set_xlabel(f"ratio to the reference (1: alike{better})")
    text = "; ".join(f"{_short(row)}: {tables.shown(row['ratio'])}{_worth(row)}" for row in rows)
    body = [
        (
            _case_name(row),
            tables.shown(row["ratio"]),
            _interval_text(row),
            _loose(row.get("runs")),
            _loose(row.get("explain")),
        )
        for row in rows
    ]
    table = tables.table(("case", "ratio", "interval", "runs", "what explains it"), body, words=(0, 4))
    return svg.finish(made, f"Ratio of {title}", f"{tables.plain(text, 3000)}.", table)


def _ticks(low: float, high: float, *, none: bool = False) -> Any:
    """Returns few round ticks for a short logarithmic axis, for which matplotlib has none or too many."""
    offered: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
    if high / low < 3:
        offered = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
    return ticker.FixedLocator([] if none else [tick for tick in offered if low / 1.08 <= tick <= high * 1.08])


def _figure(row: Object) -> str:
    """Returns what a row compares: the end of its case, which says it for people."""
    case = row.get("case")
    _, found, what = case.rpartition(": ") if isinstance(case, str) else ("", "", "")
    return tables.plain(what if found else row.get("measure") or row.get("benchmark") or "ratio", 60)


def _case_name(row: Object) -> str:
    return tables.plain(row.get("case") or "-", 160)


def _short(row: Object) -> str:
    """Returns who is compared with whom, at which size: the regime and the figure are in the title."""
    over, hidden = row.get("over"), row.get("hidden")
    if not (_who(row) and over and isinstance(hidden, list)):
        return _case_name(row)
    return tables.plain(f"{'x'.join(map(str, hidden))}, {_who(row)} over {over}", 80)


def _who(row: Object) -> str:
    return str(row.get("peer") or row.get("precision") or "")


def _interval(row: Object) -> list[float]:
    ends = row.get("interval")
    found = [tables.number(end) for end in ends] if isinstance(ends, list) and len(ends) == 2 else []
    return [end for end in found if end is not None] if None not in found else []


def _worth(row: Object) -> str:
    """Returns a ratio's interval, what that shows where it holds 1, and for the main figures what explains it."""
    ends = _interval(row)
    told = [f"{_interval_text(row)}{': no difference is shown' if ends[0] <= 1.0 <= ends[1] else ''}"] if ends else []
    if row.get("measure") in _EXPLAINED and row.get("explain"):
        told.append(tables.plain(row["explain"], 400))
    return f" ({'; '.join(told)})" if told else ""


def _interval_text(row: Object) -> str:
    ends = _interval(row)
    return f"{tables.shown(ends[0])} to {tables.shown(ends[1])}" if ends else "-"


def _loose(value: Any) -> str:
    """Returns whatever a row holds, for a cell."""
    if isinstance(value, (int, float)):
        return tables.shown(value)
    if isinstance(value, list):
        return tables.plain(", ".join(_loose(one) for one in value))
    if isinstance(value, dict):
        return tables.plain(", ".join(f"{key} {_loose(one)}" for key, one in value.items()))
    return tables.plain(value if value not in (None, "") else "-")


def _fidelity_table(rows: Sequence[Object]) -> str:
    columns = {
        "kl_mean": "KL, nats",
        "kl_p99": "KL, p99",
        "agreement": "agree",
        "agreement_decided": "agree where decided",
        "ties": "ties",
        "regret": "regret",
        "error_mean": "error, mean",
        "error_p99": "error, p99",
        "action_error_mean": "error of the mean",
        "return_mean": "return",
        "return_difference": "less fp32",
        "return_low": "low end",
        "return_high": "high end",
        "bytes": "bytes",
    }
    used = {key: name for key, name in columns.items() if any(row.get(key) is not None for row in rows)}
    body = [(row.get("recipe", "?"), *(tables.shown(row.get(key), 4) for key in used)) for row in rows]
    return tables.table(("policy", *used.values()), body)
