"""What a run came to: one dict with units in its names, and the table that people read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from broker.contract import messages
from learner.quantize import compare
from learner.run import console, energy

if TYPE_CHECKING:
    from learner.run import training_loop

_TIMINGS = ("invoke_us_p50", "invoke_us_p99", "observation_to_action_us_p50", "observation_to_action_us_p99")


def make(loop: training_loop.TrainingLoop, used: energy.Energy | None, energy_error: str) -> dict[str, Any]:
    """The summary of a session that has ended; a figure that was not taken is None."""
    score = loop.solved or loop.last_score
    published = score.reports.get("published") if score else None
    float32 = score.reports.get("float32") if score else None
    precision = loop.settings.precision
    policy = score.policy if score else loop.publisher.newest
    measures = policy.verdict.measures if policy else {}
    refused = loop.ingest.refused + loop.session.refused
    return {
        "env_id": loop.roster.env_id,
        "algorithm": loop.settings.algorithm,
        "seed": loop.settings.seed,
        "solved": loop.solved is not None,
        "solved_return": loop.settings.solved_return if np.isfinite(loop.settings.solved_return) else None,
        "env_steps": loop.env_steps,
        "updates": loop.algorithm.updates,
        "episodes": loop.progress.episodes,
        "learner_wall_s": round(loop.wall_s, 3),
        "finished_unix_s": round(loop.finished_unix_s or time.time(), 3),
        "precision": precision,
        **_returns(precision, published),
        **_returns("fp32", float32),
        **_difference(published, float32),
        "score_seed": score.seed if score else None,
        "scored_by": score.scored_by if score else [],
        "greedy_agreement": measures.get("agreement"),
        "greedy_agreement_weighted": measures.get("agreement_weighted"),
        "ties": measures.get("ties"),
        "action_error_mean": measures.get("action_error_mean"),
        "action_error_p99": measures.get("action_error_p99"),
        **loop.publisher.summary(),
        f"policy_{precision}_bytes": len(policy.model) if policy else None,
        "policy_fp32_bytes": len(policy.float32) if policy else None,
        "policy_lag_mean_versions": loop.progress.lag_mean,
        **{key: published.values.get(key) if published else None for key in _TIMINGS},
        "runtime": published.labels.get("runtime") if published else None,
        "delegate": published.labels.get("delegate") if published else None,
        "experience_messages": loop.ingest.messages,
        "messages_refused": dict(refused),
        "steps_refused": loop.ingest.steps_refused,
        "steps_missed": loop.ingest.steps_missed,
        "steps_quarantined": loop.recovery.steps_quarantined,
        "recoveries": loop.recovery.recoveries,
        "writes_failed": dict(loop.records.failed),
        "env_failures": {
            actor_id: {"count": one.count, "message": one.message}
            for actor_id, one in loop.notices.environments.items()
        },
        "nothing_learned": loop.nothing_learned or None,
        "bytes_received": loop.session.brokers.bytes_received,
        "bytes_sent": loop.session.brokers.bytes_sent,
        "energy_wh": used.energy_wh if used else None,
        "co2_g": used.co2_g if used else None,
        "energy_source": used.source if used else f"none: {energy_error}",
    }


def table(summary: dict[str, Any]) -> str:
    """The summary as aligned lines of label and value."""
    s = {key: ("-" if value is None else value) for key, value in summary.items()}
    precision = summary["precision"]
    wall = s.get("train_wall_s", s["learner_wall_s"])
    rows = [
        ("environment", f"{s['env_id']}, {s['algorithm']}, seed {s['seed']}"),
        ("environment steps", f"{s['env_steps']:,} in {s['episodes']:,} episodes"),
        ("updates", f"{s['updates']:,}"),
        ("wall time", f"{wall:.1f} s" + (" from the first process started" if "train_wall_s" in s else "")),
        (f"return, published {precision} policy", _spread(summary, precision)),
        ("return, fp32 on the same seeds", _spread(summary, "fp32")),
        (f"  {precision} less fp32, paired 95 %", _interval(summary["return_difference_interval"])),
        ("scored by", _scored_by(summary)),
        _fidelity(precision, s),
        ("policy size", f"{precision} {_bytes(s[f'policy_{precision}_bytes'])}, fp32 {_bytes(s['policy_fp32_bytes'])}"),
        (
            "policies published",
            f"{s['policies_published']}, held back {sum(summary['policies_held_back'].values())}; "
            f"quantize {_number(s['quantize_ms_p50'])} ms, gate {_number(s['gate_ms_p50'])} ms (median)",
        ),
        (
            "policies on the wire",
            f"{_bytes(s['bytes_per_policy'])} each (mean): {s['keyframes']} keyframes, {s['deltas']} deltas",
        ),
        (
            "publish to acting",
            f"p50 {_number(s['publish_to_acting_ms_p50'])} ms, p99 {_number(s['publish_to_acting_ms_p99'])} ms, "
            f"{s['publish_to_acting_count']} swaps",
        ),
        ("policy lag", f"{_number(s['policy_lag_mean_versions'])} versions (mean over steps)"),
        ("invoke only", f"p50 {_number(s['invoke_us_p50'])} us, p99 {_number(s['invoke_us_p99'])} us"),
        (
            "observation to action",
            f"p50 {_number(s['observation_to_action_us_p50'])} us, p99 {_number(s['observation_to_action_us_p99'])} us",
        ),
        ("runtime, kernels", f"{s['runtime']}, {s['delegate']}"),
        ("MQTT at the learner", f"{_bytes(s['bytes_received'])} in, {_bytes(s['bytes_sent'])} out"),
        ("refused", ", ".join(f"{k} {v}" for k, v in summary["messages_refused"].items()) or "nothing"),
        *(
            (f"environment of {actor_id}", f"failed {one['count']:,} times: {one['message']}")
            for actor_id, one in summary["env_failures"].items()
        ),
        ("learner's energy, CO2", f"{_number(s['energy_wh'])} Wh, {_number(s['co2_g'])} g"),
        ("  its source", s["energy_source"]),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(console.printable(f"{label:<{width}}  {value}") for label, value in rows)


def _scored_by(summary: dict[str, Any]) -> str:
    who = summary["scored_by"]
    if not summary["solved"]:
        return ", ".join(who) or "-"
    return f"{who[0]}, confirmed by {who[1]}" if len(who) > 1 else f"{who[0]} alone"


def _fidelity(precision: str, s: dict[str, Any]) -> tuple[str, str]:
    if isinstance(s["action_error_mean"], float):
        found = f"mean {_share(s['action_error_mean'])} of the action's range, p99 {_share(s['action_error_p99'])}"
        return f"action error {precision} / fp32", f"{found}, on replay states"
    found = f"{_share(s['greedy_agreement'])} of replay states, ties {_share(s['ties'])}"
    return f"greedy agreement {precision} / fp32", found


def _returns(name: str, report: messages.Report | None) -> dict[str, Any]:
    values = report.episode_return if report else None
    return {
        f"{name}_return_mean": float(values.mean()) if values is not None else None,
        f"{name}_return_std": float(values.std()) if values is not None else None,
        f"{name}_returns": [float(v) for v in values] if values is not None else None,
    }


def _difference(published: messages.Report | None, float32: messages.Report | None) -> dict[str, Any]:
    """Of the same episodes, published less fp32."""
    difference = published.episode_return - float32.episode_return if published and float32 else None
    return {
        "return_difference": float(difference.mean()) if difference is not None else None,
        "return_difference_interval": compare.interval(difference) if difference is not None else None,
    }


def _interval(ends: tuple[float, float] | None) -> str:
    return f"{ends[0]:.1f} to {ends[1]:.1f}" if ends else "-"


def _spread(summary: dict[str, Any], name: str) -> str:
    returns = summary[f"{name}_returns"]
    if not returns:
        return "-"
    mean, std = summary[f"{name}_return_mean"], summary[f"{name}_return_std"]
    return f"{mean:.1f} +- {std:.1f} over {len(returns)} episodes ({min(returns):.0f} to {max(returns):.0f})"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _share(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, float) else str(value)


def _bytes(value: Any) -> str:
    if not isinstance(value, int):
        return str(value)
    return f"{value / 1e6:.2f} MB" if value >= 1e6 else f"{value / 1e3:.1f} kB"
