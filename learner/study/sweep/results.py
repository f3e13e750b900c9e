"""Makes a study's figures of its cells: relative errors, intervals, means by column and algorithm."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.quantize import compare
from learner.study.sweep import cells, plan, policies

Record = dict[str, Any]
ALL = "all"
_RESAMPLES = 10_000
_STATES = ("agreement", "ties", "action_error_mean", "action_error_p99")

_RECALLED = "R: recalled, not read again in the paper; check before quoting"
QUARL_COLUMN = "int8-weights"
"""The column that is made as QuaRL's: weights alone, one scale a layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """A figure of QuaRL (arXiv:1910.01055): int8 after training, mean over its tasks.

    Attributes:
        algorithm: As policies are called, lower case.
        error_percent: Mean relative error.
        grade: How well that is known.
        remark: What belongs to it.
    """

    algorithm: str
    error_percent: float
    grade: str
    remark: str = ""


QUARL = (
    Published("a2c", 2.3, _RECALLED),
    Published("dqn", 8.6, _RECALLED, "Breakout 64 %"),
    Published("ddpg", 4.9, _RECALLED),
)
"""What QuaRL reports, beside which ours of the same column stands."""


def relative_error(exact: NDArray[Any], other: NDArray[Any]) -> tuple[float | None, float | None, float | None]:
    """Returns QuaRL's relative error in percent, (fp32 - other) / |fp32|, with its paired 95 % interval.

    Negative is better than fp32. None where fp32 returns 0 on average, or does so in resamples of its episodes.

    Args:
        exact: Returns [episodes] of fp32.
        other: Of what is compared, of the same episodes.
    """
    exact, other = exact.astype(np.float64), other.astype(np.float64)
    if exact.mean() == 0:
        return None, None, None
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(exact), size=(_RESAMPLES, len(exact)))
    fp32, ours = exact[chosen].mean(1), other[chosen].mean(1)
    value = float(100 * (exact.mean() - other.mean()) / abs(exact.mean()))
    if (fp32 == 0).any():
        return value, None, None
    low, high = np.percentile(100 * (fp32 - ours) / np.abs(fp32), [2.5, 97.5])
    return value, float(low), float(high)


def build(held: cells.Cells, unusable: Mapping[str, str]) -> Record:
    """Returns all that a study tells, as one JSON object.

    Args:
        held: Its cells.
        unusable: Why policies have none, by name.
    """
    found = [row for entry in held.entries for row in _rows(entry, held)]
    about = [_about(entry, held, unusable) for entry in held.entries]
    short = [" ".join((one["algorithm"], one["env"])) for one in about]
    for one, label in zip(about, short, strict=True):
        is_clear = short.count(label) == 1 and one["env"] and one["algorithm"] != "?"
        one["label"] = label if is_clear else one["policy"]
    return {
        "request": dataclasses.asdict(held.request),
        "columns": list(held.request.columns),
        "policies": about,
        "cells": found,
        "summary": _summary(found, held.request.columns),
        "quarl": _beside(found),
        "spread": _spread(found, about),
    }


def _rows(entry: policies.Entry, held: cells.Cells) -> Iterable[Record]:
    """Yields a row for each cell that is there."""
    of_policy = {column: held.done.get((entry.name, column)) for column in held.request.columns}
    fp32, chance = (_returns(of_policy[column]) for column in (plan.FP32, plan.RANDOM))
    for column, record in of_policy.items():
        if record is None:
            continue
        row: Record = {"policy": entry.name, "algorithm": entry.algorithm or "?", "column": column}
        row |= {"failed": record["failed"]}
        returns = _returns(record)
        if returns is not None:
            row |= {"episodes": len(returns), "return_mean": float(returns.mean(dtype=np.float64))}
        row |= {key: record[key] for key in (*_STATES, "bytes", "sha256", "delegate", "wall_s") if key in record}
        if returns is not None and fp32 is not None and column != plan.RANDOM:
            error, low, high = relative_error(fp32, returns)
            row |= {"fp32_mean": float(fp32.mean(dtype=np.float64))}
            row |= {"error_percent": error, "error_low": low, "error_high": high}
            if chance is not None:
                compared = compare.returns(fp32, returns, chance)
                row |= {
                    "random_mean": float(chance.mean(dtype=np.float64)),
                    "difference": compared.difference,
                    "difference_low": compared.low,
                    "difference_high": compared.high,
                    "low_relative": compared.low_relative,
                    "non_inferior": compared.non_inferior,
                }
        yield row


def _returns(record: Record | None) -> NDArray[np.float64] | None:
    return np.array(record["returns"], np.float64) if record and not record["failed"] else None


def _about(entry: policies.Entry, held: cells.Cells, unusable: Mapping[str, str]) -> Record:
    fp32 = held.done.get((entry.name, plan.FP32), {})
    weights = fp32.get("weights", [])
    return {
        "policy": entry.name,
        "algorithm": entry.algorithm or "?",
        "env": fp32.get("env", entry.env),
        "source": fp32.get("source", entry.kind),
        "said": fp32.get("said", ""),
        "outputs": fp32.get("outputs", ""),
        "sha256": entry.sha256,
        "unusable": unusable.get(entry.name, ""),
        "weights": weights,
        "widest": max((_width(layer) for layer in weights), default=None),
    }


def _width(layer: Record) -> float:
    """Returns the range of a layer's weights in their standard deviations: what one scale must span."""
    return float((layer["max"] - layer["min"]) / layer["std"]) if layer["std"] > 0 else 0.0


def _summary(rows: Sequence[Record], columns: Sequence[str]) -> list[Record]:
    """Returns a row for each column, of all policies and of each algorithm."""
    found = []
    for column in (name for name in columns if name not in (plan.RANDOM, plan.FP32)):
        of_column = [row for row in rows if row["column"] == column]
        for algorithm in (ALL, *sorted({row["algorithm"] for row in of_column})):
            chosen = [row for row in of_column if algorithm in (ALL, row["algorithm"])]
            if chosen:
                found.append({"column": column, "algorithm": algorithm} | _over(chosen))
    return found


def _over(rows: Sequence[Record]) -> Record:
    known = [row["error_percent"] for row in rows if row.get("error_percent") is not None]
    agreed = [row["agreement"] for row in rows if "agreement" in row]
    off = [row["action_error_mean"] for row in rows if "action_error_mean" in row]
    judged = [row["non_inferior"] for row in rows if row.get("non_inferior") is not None]
    return {
        "policies": len(known),
        "failed": sum(bool(row["failed"]) for row in rows),
        "error_mean": statistics.fmean(known) if known else None,
        "error_median": statistics.median(known) if known else None,
        "error_worst": max(known, default=None),
        "agreement_median": statistics.median(agreed) if agreed else None,
        "action_error_median": statistics.median(off) if off else None,
        "non_inferior": sum(judged),
        "judged": len(judged),
    }


def _beside(rows: Sequence[Record]) -> list[Record]:
    """Returns QuaRL's figures beside ours of policies by the same algorithm."""
    found = []
    for published in QUARL:
        ours = [
            row["error_percent"]
            for row in rows
            if (row["algorithm"], row["column"]) == (published.algorithm, QUARL_COLUMN)
            and row.get("error_percent") is not None
        ]
        own = {"ours_percent": statistics.fmean(ours) if ours else None, "ours_policies": len(ours)}
        found.append(dataclasses.asdict(published) | own)
    return found


def _spread(rows: Sequence[Record], about: Sequence[Record]) -> Record:
    """Returns, by column, the rank correlation of the spread of weights with the relative error, over policies."""
    widths = {one["policy"]: one["widest"] for one in about if one["widest"] is not None}
    found: Record = {}
    for column in dict.fromkeys(row["column"] for row in rows if row["column"] not in (plan.RANDOM, plan.FP32)):
        pairs = [
            (widths[row["policy"]], row["error_percent"])
            for row in rows
            if row["column"] == column and row["policy"] in widths and row.get("error_percent") is not None
        ]
        found[column] = {"policies": len(pairs), "rank_correlation": _rank_correlation(pairs)}
    return found


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns Spearman's; None of fewer than three, or where one side is all alike."""
    if len(pairs) < 3:
        return None
    first, second = (_ranks(np.array(side, np.float64)) for side in zip(*pairs, strict=True))
    if not (np.ptp(first) and np.ptp(second)):
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the rank of each; equal ones share the mean of theirs."""
    below = (values[:, None] > values).sum(1)
    found: NDArray[np.float64] = below + ((values[:, None] == values).sum(1) - 1) / 2
    return found
