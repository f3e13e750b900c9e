"""Metrics and summary of published policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from learner.policies import publish


def metrics(publisher: publish.Publisher) -> dict[str, float]:
    """Returns the counts of policies, and the times and measures of the newest, for a row of metrics."""
    timings, traffic = publisher.timings, publisher.channel.traffic
    row: dict[str, float] = {
        "policy_version": publisher.version,
        "policies_held_back": sum(publisher.held_back.values()),
        "keyframes": traffic.keyframes,
        "keyframe_bytes": traffic.keyframe_bytes,
        "deltas": traffic.deltas,
        "delta_bytes": traffic.delta_bytes,
    }
    for name in ("calibrate_ms", "quantize_ms", "gate_ms", "delta_ms", "send_ms"):
        if stage := getattr(timings, name):
            row[name] = stage[-1]
    if timings.acting_ms:
        row["publish_to_acting_ms"] = timings.acting_ms[-1]
    if publisher.newest is not None:
        row |= {f"gate_{name}": value for name, value in publisher.newest.verdict.measures.items()}
    return row


def summary(publisher: publish.Publisher) -> dict[str, Any]:
    """Returns the counts and bytes of policies, and percentiles of times, for the summary."""
    timings, traffic = publisher.timings, publisher.channel.traffic
    return {
        "policy_version": publisher.version,
        "policies_published": publisher.published,
        "policies_held_back": dict(publisher.held_back),
        "calibrate_ms_p50": _percentile(timings.calibrate_ms, 50),
        "quantize_ms_p50": _percentile(timings.quantize_ms, 50),
        "gate_ms_p50": _percentile(timings.gate_ms, 50),
        "delta_ms_p50": _percentile(timings.delta_ms, 50),
        "send_ms_p50": _percentile(timings.send_ms, 50),
        "keyframes": traffic.keyframes,
        "keyframe_bytes": traffic.keyframe_bytes,
        "deltas": traffic.deltas,
        "delta_bytes": traffic.delta_bytes,
        "bytes_per_policy": round(traffic.mean_bytes) if traffic.mean_bytes is not None else None,
        "publish_to_acting_ms_p50": _percentile(timings.acting_ms, 50),
        "publish_to_acting_ms_p99": _percentile(timings.acting_ms, 99),
        "publish_to_acting_count": len(timings.acting_ms),
    }


def _percentile(values: Sequence[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None
