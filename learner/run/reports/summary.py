"""The summary of a run: one dict with units in its names, and the table that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from learner.run.reports import breakdown, console, energy

_KEYS = (
    *("env_id", "algorithm", "seed", "solved", "solved_return", "solved_env_steps", "env_steps", "updates"),
    *("episodes", "learner_wall_s"),
    *("finished_unix_s", "precision", "{}_return_mean", "{}_return_std", "{}_returns", "fp32_return_mean"),
    *("fp32_return_std", "fp32_returns", "return_difference", "return_difference_interval", "score_seed", "scored_by"),
    *("greedy_agreement", "greedy_agreement_weighted", "ties", "action_error_mean", "action_error_p99"),
    *("kl_mean", "kl_p99"),
    *("policy_version", "policies_published", "policies_held_back", "policy_{}_bytes", "policy_fp32_bytes"),
    *("calibrate_ms_p50", "quantize_ms_p50", "gate_ms_p50", "delta_ms_p50", "send_ms_p50", "keyframes"),
    *("keyframe_bytes", "deltas", "delta_bytes", "bytes_per_policy", "publish_to_acting_ms_p50"),
    *("publish_to_acting_ms_p99", "publish_to_acting_count", "policy_lag_mean_versions", "invoke_us_p50"),
    *("invoke_us_p99", "observation_to_action_us_p50", "observation_to_action_us_p99", "runtime", "delegate"),
    *("experience_messages", "messages_refused", "steps_refused", "steps_missed", "steps_stale", "steps_unsampled"),
    *("steps_too_old", "experience_age_s_p50", "experience_age_s_p99", "messages_of_unknown_age"),
    *("steps_quarantined", "recoveries", "canary"),
    *("audited_messages", "audited_steps", "audited_with_tolerance", "audit_cpu_s", "audits_passed_over"),
    *("actors_named", "actors_held", "steps_held", "actors_drifting"),
    *("message_budget_per_s", "message_budget_per_s_least", "ingest_capacity_per_s"),
    *("writes_failed", "env_failures", "nothing_learned", "bytes_received", "bytes_sent", "breakdown"),
    *("training_s", "learner_cpu_s", "actors_cpu_s", "learner_idle_share", "env_steps_per_s", "session_env_steps"),
    "energy",
)
"""The keys of a summary, in this order; {} stands for the precision of the policies."""


def make(stages: Iterable[Mapping[str, Any]], used: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the summary of a session that has ended; a figure that was not taken is None.

    Args:
        stages: What each stage says; of what two count by one name, counts are added up.
        used: The energy of learner and actors (see `energy.summary`).
    """
    found: dict[str, Any] = {"energy": dict(used)}
    for stage in stages:
        for name, value in stage.items():
            found[name] = _added(found[name], value) if name in found else value
    names = [name.format(found["precision"]) for name in _KEYS]
    return {name: found[name] for name in dict.fromkeys(names)}


def table(summary: dict[str, Any]) -> str:
    """Returns the summary as aligned lines of label and value."""
    s = {key: ("-" if value is None else value) for key, value in summary.items()}
    precision = summary["precision"]
    wall = s.get("train_wall_s", s["learner_wall_s"])
    rows = [
        ("environment", f"{s['env_id']}, {s['algorithm']}, seed {s['seed']}"),
        ("environment steps", f"{s['env_steps']:,} in {s['episodes']:,} episodes{_solved_after(summary)}"),
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
        (
            "age of experience",
            f"p50 {_number(s['experience_age_s_p50'])} s, p99 {_number(s['experience_age_s_p99'])} s, entering replay",
        ),
        ("invoke only", f"p50 {_number(s['invoke_us_p50'])} us, p99 {_number(s['invoke_us_p99'])} us"),
        (
            "observation to action",
            f"p50 {_number(s['observation_to_action_us_p50'])} us, p99 {_number(s['observation_to_action_us_p99'])} us",
        ),
        ("runtime, kernels", f"{s['runtime']}, {s['delegate']}"),
        ("MQTT at the learner", f"{_bytes(s['bytes_received'])} in, {_bytes(s['bytes_sent'])} out"),
        *breakdown.rows(summary),
        ("refused", ", ".join(f"{k} {v}" for k, v in summary["messages_refused"].items()) or "nothing"),
        *(
            [("too old to learn from", _stale(summary["steps_stale"], summary["steps_too_old"]))]
            if s["steps_stale"]
            else []
        ),
        *(
            (f"environment of {actor_id}", f"failed {one['count']:,} times: {one['message']}")
            for actor_id, one in summary["env_failures"].items()
        ),
        *energy.rows(summary["energy"]),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(console.printable(f"{label:<{width}}  {value}") for label, value in rows)


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return dict(Counter(one) + Counter(other))
    return one + other


def _stale(steps: int, too_old: int) -> str:
    return f"{steps:,} steps" + (f", {too_old:,} of them by --max-experience-age-s" if too_old else "")


def _solved_after(summary: dict[str, Any]) -> str:
    steps = summary["solved_env_steps"]
    return "" if steps is None else f"; {steps:,} until the policy that solved it was made"


def _scored_by(summary: dict[str, Any]) -> str:
    who = summary["scored_by"]
    if not summary["solved"]:
        return ", ".join(who) or "-"
    return f"{who[0]}, confirmed by {who[1]}" if len(who) > 1 else f"{who[0]} alone"


def _fidelity(precision: str, s: dict[str, Any]) -> tuple[str, str]:
    if isinstance(s["kl_mean"], float):
        found = f"{s['kl_mean']:.2g} nats of replay states, p99 {s['kl_p99']:.2g}"
        return f"KL divergence {precision} / fp32", found
    if isinstance(s["action_error_mean"], float):
        found = f"mean {_share(s['action_error_mean'])} of the action's range, p99 {_share(s['action_error_p99'])}"
        return f"action error {precision} / fp32", f"{found}, on replay states"
    found = f"{_share(s['greedy_agreement'])} of replay states, ties {_share(s['ties'])}"
    return f"greedy agreement {precision} / fp32", found


def _interval(ends: tuple[float, float] | None) -> str:
    return f"{ends[0]:z.1f} to {ends[1]:z.1f}" if ends else "-"


def _spread(summary: dict[str, Any], name: str) -> str:
    returns = summary[f"{name}_returns"]
    if not returns:
        return "-"
    mean, std = summary[f"{name}_return_mean"], summary[f"{name}_return_std"]
    return f"{mean:z.1f} +- {std:.1f} over {len(returns)} episodes ({min(returns):z.0f} to {max(returns):z.0f})"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _share(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, float) else str(value)


def _bytes(value: Any) -> str:
    if not isinstance(value, int):
        return str(value)
    return f"{value / 1e6:.2f} MB" if value >= 1e6 else f"{value / 1e3:.1f} kB"
