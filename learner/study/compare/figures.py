"""The figures of one run: from its rows of metrics and its summary. What a run does not say is missing, not zero."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Figures = dict[str, float]
_STAGE = "stage_"
_ACTOR_STAGE = "stage_actor_"
_ROWS_MIN = 3


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of metrics.jsonl; a line that is cut off or broken is left out."""
    rows = []
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("env_steps"), int) and row.get("wall_s") is not None:
            rows.append(row)
    return rows


def settled(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows in which actors act by policies: start-up, compilation and the first random steps are over.

    They begin with the second policy, because all actors have the first one then; where there are too few, with the
    first.
    """
    for version in (2, 1):
        found = [row for row in rows if (row.get("policy_version") or 0) >= version]
        if len(found) >= _ROWS_MIN:
            break
    return found


def of_run(rows: Sequence[Row], summary: Row, *, reached: bool) -> Figures:
    """Returns the figures of a run.

    Args:
        rows: All of its metrics.
        summary: What it printed at its end.
        reached: Whether it was to end at the threshold.
    """
    found: dict[str, Any] = rates(settled(rows))
    precision, energy = summary.get("precision", ""), summary.get("energy") or {}
    bytes_all = [summary.get(key) for key in ("bytes_received", "bytes_sent")]
    learner_j, actors_j = (energy.get(who) or {} for who in ("learner", "actors"))
    found |= {
        "return": next((row["return_mean"] for row in reversed(rows) if row.get("return_mean") is not None), None),
        "policy_bytes": summary.get(f"policy_{precision}_bytes"),
        "bytes_per_policy": summary.get("bytes_per_policy"),
        "bytes": sum(known) if len(known := [one for one in bytes_all if one is not None]) == 2 else None,
        "learner_cpu_s": summary.get("learner_cpu_s"),
        "actors_cpu_s": summary.get("actors_cpu_s"),
        "learner_joules": learner_j.get("joules"),
        "actors_joules": actors_j.get("joules"),
        "kgco2e": energy.get("kgco2e"),
        "published_to_acting_ms": summary.get("publish_to_acting_ms_p50"),
        "trained_s": _training_s(rows, summary),
        "trained_steps": summary.get("env_steps"),
    }
    if reached and summary.get("solved"):
        found |= {"threshold_s": found["trained_s"], "threshold_steps": found["trained_steps"]}
    found.setdefault("idle_share", summary.get("learner_idle_share"))
    return {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}


def rates(window: Sequence[Row]) -> Figures:
    """Returns steps and updates per second, and the learner's idle share, over some rows; empty of fewer than two."""
    if len(window) < 2:
        return {}
    seconds = window[-1]["wall_s"] - window[0]["wall_s"]
    if seconds <= 0:
        return {}
    found = {
        "window_s": seconds,
        "env_steps_per_s": (window[-1]["env_steps"] - window[0]["env_steps"]) / seconds,
        "updates": float(window[-1]["updates"] - window[0]["updates"]),
    }
    found["updates_per_s"] = found["updates"] / seconds
    stages = _stages(window, _STAGE)
    if "wait" in stages:
        found["idle_share"] = min(1.0, stages["wait"] / seconds)
    if "update" in stages:
        found["update_s"] = stages["update"]
    return found


def breakdown(rows: Sequence[Row], summary: Row) -> dict[str, dict[str, float]]:
    """Returns microseconds per environment step by stage, of `learner` and of `actors`, and ActorQ's four of `actorq`.

    Learner and actors over the settled rows where these have them, else over the whole run; ActorQ's over the run.
    """
    window, whole = settled(rows), summary.get("breakdown") or {}
    steps = window[-1]["env_steps"] - window[0]["env_steps"] if len(window) > 1 else 0
    all_steps = summary.get("env_steps") or 0
    found = {}
    for who, prefix in (("learner", _STAGE), ("actors", _ACTOR_STAGE)):
        stages = _stages(window, prefix) if steps else {}
        if stages:
            found[who] = {name: 1e6 * total / steps for name, total in stages.items()}
        elif all_steps and whole.get(who):
            found[who] = {name: 1e6 * one["total_s"] / all_steps for name, one in whole[who].items()}
    if all_steps and whole.get("actorq"):
        found["actorq"] = {name: 1e6 * total / all_steps for name, total in whole["actorq"].items()}
    return found


def _stages(window: Sequence[Row], prefix: str) -> dict[str, float]:
    """Returns the seconds of each stage; the first row's were spent before it."""
    totals: dict[str, float] = {}
    for row in window[1:]:
        for key, value in row.items():
            is_actors = key.startswith(_ACTOR_STAGE)
            if key.startswith(prefix) and key.endswith("_s") and is_actors == (prefix == _ACTOR_STAGE):
                name = key.removeprefix(prefix).removesuffix("_s")
                totals[name] = totals.get(name, 0.0) + (value or 0.0)
    return totals


def _training_s(rows: Sequence[Row], summary: Row) -> float | None:
    """Returns the seconds from the first experience to the end of training; without start-up, which is alike in all."""
    rate, steps = summary.get("env_steps_per_s"), summary.get("env_steps")
    if rate and steps:
        return float(steps / rate)
    wall_s = summary.get("learner_wall_s")
    return float(wall_s - rows[0]["wall_s"]) if wall_s and rows else None
