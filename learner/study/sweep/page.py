"""The page of a study: relative errors, bits, and the spread of weights, as pictures with their words and figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import axis, ticker

from broker.program import storage
from learner.study.report import page, svg, tables
from learner.study.sweep import output, plan

Record = dict[str, Any]
PAGE = "report.html"
_LINEAR = 5.0
"""Percent up to which axes of errors are linear: beyond they are logarithmic, for a policy may lose all."""


def write(directory: Path, found: Record) -> Path:
    """Draws the page in the study's directory; returns its path."""
    file = directory / PAGE
    storage.write_atomic(file, render(found).encode("utf-8", "replace"), mode=0o644)
    return file


def render(found: Record) -> str:
    """Returns the page."""
    with svg.style():
        return _page(found)


def _page(found: Record) -> str:
    request, policies = found["request"], found["policies"]
    title = f"Quantization of {len(policies)} policies, {request['episodes']} episodes each"
    words = (
        "Relative error: (fp32 - column) / |fp32| of mean returns, in percent; negative is better than fp32. Every "
        "column of a policy plays the same episodes. Intervals are paired bootstraps, 95 %."
    )
    settings = [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else value) for name, value in request.items()
    ]
    sections = [
        ("By column", page.grid([_errors(found), _bits(found)]) + _shown(output.summary(found))),
        ("By policy", _shown(output.errors(found)) + tables.folded("Held-out states", _shown(output.states(found)))),
        ("Beside QuaRL", _shown(output.quarl(found))),
        ("Spread of weights", page.grid([_against(found), _ranges(found)]) + _shown(output.spread(found), (0, 1, 3))),
        ("Settings", tables.table(("setting", "value"), settings, words=(0, 1))),
    ]
    return page.document(title, "study", words, sections, output.unusable(found) + output.failed(found))


def _shown(table: tuple[Sequence[str], Sequence[Sequence[str]]], words: Sequence[int] = (0,)) -> str:
    return tables.table(*table, words=words)


def _known(found: Record, column: str) -> list[float]:
    return [
        row["error_percent"]
        for row in found["cells"]
        if row["column"] == column and row.get("error_percent") is not None
    ]


def _errors(found: Record) -> svg.Picture | None:
    """Returns the errors of each column: a dot for each policy, and a bar at their median."""
    by_column = {name: values for name in _compared(found) if (values := _known(found, name))}
    if not by_column:
        return None
    made, drawn = svg.new(0.9 + 0.3 * len(by_column), axis="x")
    told = []
    for y, (name, values) in enumerate(by_column.items()):
        colour = svg.colour(_family(name))
        drawn.plot(values, [y] * len(values), "o", color=colour, markersize=4, alpha=0.6)
        median = statistics.median(values)
        drawn.plot([median, median], [y - 0.35, y + 0.35], color=svg.TEXT, linewidth=2.2)
        told.append(f"{name} {tables.shown(median)} ({tables.shown(min(values))} to {tables.shown(max(values))})")
    drawn.axvline(0.0, color=svg.MUTED, linewidth=0.9)
    drawn.set_xscale("symlog", linthresh=_LINEAR)
    _plain_ticks(drawn.xaxis, _LINEAR)
    drawn.set_yticks(range(len(by_column)), list(by_column))
    drawn.set_ylim(len(by_column) - 0.5, -0.5)
    drawn.set_xlabel("relative error, % (a dot a policy, bar: median)")
    text = f"Median relative error in percent, and the range over policies: {'; '.join(told)}."
    return svg.finish(made, "Relative error by column", text)


def _bits(found: Record) -> svg.Picture | None:
    """Returns median errors by bits of weights, with and without training for them."""
    request = found["request"]
    medians = {
        label: {
            bits: statistics.median(known)
            for bits in request[field]
            if (known := _known(found, plan.bits_column(bits, is_aware=is_aware)))
        }
        for label, field, is_aware in (
            ("rounded after training", "bits", False),
            ("trained for so many bits", "aware_bits", True),
        )
    }
    medians = {label: values for label, values in medians.items() if values}
    if not any(len(values) > 1 for values in medians.values()):
        return None
    made, drawn = svg.new()
    told = []
    for k, (label, values) in enumerate(medians.items()):
        drawn.plot(
            list(values), list(values.values()), marker="o", color=svg.colour(k), linestyle=svg.DASHES[k], label=label
        )
        told.append(f"{label}: {', '.join(f'{bits} bits {tables.shown(value)}' for bits, value in values.items())}")
    drawn.axhline(0.0, color=svg.MUTED, linewidth=0.9)
    drawn.set_yscale("symlog", linthresh=_LINEAR)
    _plain_ticks(drawn.yaxis, _LINEAR)
    drawn.set_xlabel("bits of the weights")
    drawn.set_ylabel("median relative error, %")
    svg.legend(drawn, len(medians))
    return svg.finish(made, "Fewer bits", f"Median relative error in percent. {'; '.join(told)}.")


def _against(found: Record) -> svg.Picture | None:
    """Returns errors against the spread of weights."""
    widths = {one["policy"]: one["widest"] for one in found["policies"] if one["widest"] is not None}
    series = {}
    for column in (
        "int8-weights",
        "int8-plain",
        *(name for name in _compared(found) if plan.bits_of(name) == (4, False)),
    ):
        pairs = [
            (widths[row["policy"]], row["error_percent"])
            for row in found["cells"]
            if row["column"] == column and row["policy"] in widths and row.get("error_percent") is not None
        ]
        if pairs:
            series[column] = pairs
    if not series:
        return None
    made, drawn = svg.new()
    told = []
    for k, (column, pairs) in enumerate(series.items()):
        drawn.plot(*zip(*pairs, strict=True), "os^"[k % 3], color=svg.colour(k), alpha=0.7, label=column)
        rank = found["spread"][column]["rank_correlation"]
        told.append(f"{column} {'not known' if rank is None else tables.shown(rank)} ({len(pairs)} policies)")
    drawn.axhline(0.0, color=svg.MUTED, linewidth=0.9)
    drawn.set_yscale("symlog", linthresh=_LINEAR)
    _plain_ticks(drawn.yaxis, _LINEAR)
    drawn.set_xlabel("range of the widest layer's weights / their std")
    drawn.set_ylabel("relative error, %")
    svg.legend(drawn, len(series))
    text = f"Rank correlation of the spread of weights with the relative error: {'; '.join(told)}."
    return svg.finish(made, "Spread of weights against error", text)


def _ranges(found: Record) -> svg.Picture | None:
    """Returns the range of weights of each policy, and a standard deviation either side of zero, over all layers."""
    spread = {one["label"]: one["weights"] for one in found["policies"] if one["weights"]}
    if not spread:
        return None
    made, drawn = svg.new(0.9 + 0.26 * len(spread), axis="x")
    told = []
    for y, (name, weights) in enumerate(spread.items()):
        low, high = min(one["min"] for one in weights), max(one["max"] for one in weights)
        std = max(one["std"] for one in weights)
        drawn.plot([low, high], [y, y], color=svg.colour(0), linewidth=1.2)
        drawn.plot([-std, std], [y, y], color=svg.colour(0), linewidth=5.0, alpha=0.6)
        told.append(f"{tables.plain(name, 60)} {tables.shown(low)} to {tables.shown(high)}, std {tables.shown(std)}")
    drawn.set_yticks(range(len(spread)), [tables.label(name) for name in spread])
    drawn.set_ylim(len(spread) - 0.5, -0.5)
    drawn.set_xscale("symlog", linthresh=1.0)
    _plain_ticks(drawn.xaxis, 1.0)
    drawn.set_xlabel("weights: range, and largest std (thick)")
    return svg.finish(made, "Weights of each policy", f"{'; '.join(told)}.")


def _compared(found: Record) -> list[str]:
    return [name for name in found["columns"] if name not in (plan.RANDOM, plan.FP32)]


def _family(column: str) -> int:
    """Returns a colour for each kind of column."""
    found = plan.bits_of(column)
    return 0 if found is None else 2 if found[1] else 1


def _plain_ticks(of: axis.Axis, linear: float) -> None:
    """Writes 0 and powers of ten beyond what is linear, as numbers: matplotlib's own on such an axis are for TeX."""
    low, high = sorted(of.get_view_interval())
    sizes = [10.0**power for power in range(5) if 10.0**power >= linear]
    ticks = (*(-size for size in sizes), 0.0, *sizes)
    of.set_major_locator(ticker.FixedLocator([tick for tick in ticks if low <= tick <= high]))
    of.set_minor_locator(ticker.NullLocator())
    of.set_major_formatter(lambda value, _: tables.shown(value))
