"""Writes what a study came to: Markdown for people, CSV and JSON; `page` draws it."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.program import storage
from learner.study.sweep import plan, results

MARKDOWN, CSV, JSON = "study.md", "study.csv", "study.json"
Record = dict[str, Any]
Table = tuple[Sequence[str], list[Sequence[str]]]
"""Names of columns, and rows."""
_FIELDS = (
    "policy", "algorithm", "column", "failed", "episodes", "return_mean", "fp32_mean", "random_mean", "error_percent",
    "error_low", "error_high", "difference", "difference_low", "difference_high", "low_relative", "non_inferior",
    "agreement", "ties", "action_error_mean", "action_error_p99", "bytes", "sha256", "delegate", "wall_s",
)  # fmt: skip


def write(directory: Path, found: Record) -> None:
    """Writes all of it into the study's directory."""
    for name, text in ((MARKDOWN, markdown(found)), (CSV, _csv(found)), (JSON, json.dumps(found, indent=1) + "\n")):
        storage.write_atomic(directory / name, text.encode(), mode=0o644)


def markdown(found: Record) -> str:
    """Returns the study as Markdown."""
    request = found["request"]
    parts = [
        f"# {len(found['policies'])} policies, {request['episodes']} episodes each",
        "Relative error in %: (fp32 - column) / |fp32| of mean returns; negative is better than fp32. Every column"
        " plays the same episodes. Interval: paired bootstrap, 95 %.",
        "## By column",
        _table(*summary(found)),
        "## Relative error by policy, %",
        _table(*errors(found)),
        "## Held-out states, % of choices alike or mean error in % of the action's range",
        _table(*states(found)),
        "## Beside QuaRL, int8 after training, weights alone (`int8-weights`)",
        _table(*quarl(found)),
        "## Spread of weights",
        _table(*spread(found)),
    ]
    if problems := unusable(found) + failed(found):
        parts += ["## What is missing", "\n".join(f"* {_cell(line)}" for line in problems)]
    return "\n\n".join(parts) + "\n"


def summary(found: Record) -> Table:
    """Returns head and rows of the means over policies."""
    head = (
        "column",
        "policies",
        "mean error",
        "median",
        "worst",
        "non-inferior",
        "choices alike",
        "action error",
        "failed",
    )
    rows: list[Sequence[str]] = [
        (
            one["column"] if one["algorithm"] == results.ALL else f"{one['column']}, {one['algorithm']}",
            str(one["policies"]),
            number(one["error_mean"]),
            number(one["error_median"]),
            number(one["error_worst"]),
            f"{one['non_inferior']} of {one['judged']}",
            number(one["agreement_median"], 100),
            number(one["action_error_median"], 100, 2),
            str(one["failed"]),
        )
        for one in found["summary"]
        if one["algorithm"] == results.ALL
    ]
    return head, rows


def errors(found: Record) -> Table:
    """Returns head and rows of relative errors with their intervals, a row for each policy."""

    def cell(row: Mapping[str, Any]) -> str:
        if row["failed"] or row.get("error_percent") is None:
            return "failed" if row["failed"] else "-"
        ends = (row.get("error_low"), row.get("error_high"))
        return number(row["error_percent"]) + ("" if None in ends else f" ({number(ends[0])} to {number(ends[1])})")

    return _by_policy(found, cell)


def states(found: Record) -> Table:
    """Returns head and rows of what held-out states tell, a row for each policy."""

    def cell(row: Mapping[str, Any]) -> str:
        if "agreement" in row:
            return number(row["agreement"], 100)
        return f"{number(row['action_error_mean'], 100, 2)} off" if "action_error_mean" in row else "-"

    return _by_policy(found, cell)


def _by_policy(found: Record, cell: Any) -> Table:
    columns = [name for name in found["columns"] if name not in (plan.RANDOM, plan.FP32)]
    cells = {(row["policy"], row["column"]): row for row in found["cells"]}
    rows: list[Sequence[str]] = []
    for one in found["policies"]:
        name = one["policy"]
        returns = [
            number(cells[name, column].get("return_mean")) if (name, column) in cells else "-"
            for column in (plan.FP32, plan.RANDOM)
        ]
        own = (cell(cells[name, column]) if (name, column) in cells else "-" for column in columns)
        rows.append((one["label"], *returns, *own))
    return ("policy", "return of fp32", "of chance", *columns), rows


def quarl(found: Record) -> Table:
    """Returns head and rows of QuaRL's figures beside ours."""
    head = ("algorithm", "QuaRL's mean error", "grade", "ours", "policies")
    rows: list[Sequence[str]] = [
        (
            one["algorithm"] + (f" ({one['remark']})" if one["remark"] else ""),
            number(one["error_percent"]),
            one["grade"],
            number(one["ours_percent"]),
            str(one["ours_policies"]),
        )
        for one in found["quarl"]
    ]
    return head, rows


def spread(found: Record) -> Table:
    """Returns head and rows of how the weights of each policy are spread, layer by layer."""
    head = ("policy", "read as", "widest layer, range / std", "min, max, std of each layer")
    rows: list[Sequence[str]] = [
        (
            one["label"],
            "; ".join(filter(None, (one["source"], one["said"]))),
            number(one["widest"]),
            "; ".join(f"{layer['min']:.3g}, {layer['max']:.3g}, {layer['std']:.3g}" for layer in one["weights"]),
        )
        for one in found["policies"]
        if one["outputs"]
    ]
    return head, rows


def unusable(found: Record) -> list[str]:
    """Returns a line for each policy without cells."""
    return [f"{one['policy']}: {one['unusable']}" for one in found["policies"] if one["unusable"]]


def failed(found: Record) -> list[str]:
    """Returns a line for each cell that failed."""
    return [f"{row['policy']}, {row['column']}: {row['failed']}" for row in found["cells"] if row["failed"]]


def number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    """Returns a number for people; `-` where there is none."""
    return "-" if value is None else f"{round(scale * value, digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a 0


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _csv(found: Record) -> str:
    written = io.StringIO()
    rows = csv.DictWriter(written, _FIELDS, restval="", lineterminator="\n")
    rows.writeheader()
    rows.writerows(found["cells"])
    return written.getvalue()
