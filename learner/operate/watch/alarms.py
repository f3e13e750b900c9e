"""What of an actor its owner should look at, by the names that the page, the metrics and the logs have for it."""

from __future__ import annotations

from learner.operate.watch import members

DRIFTS = ("outside", "saturated", "returns")
"""Those that a learner finds in what an actor sends, and writes into its run."""
KINDS = ("silent", "refused", "throttled", "spool", "lag", "clock", "kernels", "refusals", "environment", *DRIFTS)
SPOOL_SHARE = 0.5
"""A spool fuller than this fills faster than the learner takes from it: it holds little where all is well."""
LAG_VERSIONS = 5
LAG_WINDOW_S = 60.0
RECENT_S = 60.0
"""Seconds for which what was counted anew is told."""
_NOW = 0xF  # of get_throttled: the other bits are for any time since the board's start
_WORDS = ("under-voltage", "frequency capped", "throttled", "soft temperature limit")


def of(member: members.Member, now_s: float) -> dict[str, str]:
    """Returns the alarms of an actor at a Unix time, with what each is about, by kind."""
    found: dict[str, str] = {}
    state = member.state
    if state is None:
        return found
    vitals = state.vitals
    if member.heard_s is not None and not member.is_live(now_s):
        found["silent"] = "went offline" if not state.online else f"nothing heard for {now_s - member.heard_s:.0f} s"
    if member.refused:
        found["refused"] = member.refused
    if not member.is_live(now_s):
        return found
    if vitals.throttled is not None and vitals.throttled & _NOW:
        found["throttled"] = ", ".join(word for bit, word in enumerate(_WORDS) if vitals.throttled >> bit & 1)
    if vitals.spool_share is not None and vitals.spool_share > SPOOL_SHARE:
        found["spool"] = f"the spool is {100 * vitals.spool_share:.0f} % full, {vitals.messages_held} messages"
    before = member.history.at(now_s - LAG_WINDOW_S, "policy_lag")
    if before is not None and vitals.policy_lag >= LAG_VERSIONS and vitals.policy_lag > before:
        found["lag"] = f"{vitals.policy_lag} versions behind, {before:.0f} a minute ago"
    if member.clock_error_s is not None and abs(member.clock_error_s) > members.CLOCK_ERROR_S:
        found["clock"] = f"the board's clock is off by {member.clock_error_s:+.0f} s"
    if vitals.delegate and "xnnpack" not in vitals.delegate.lower():
        found["kernels"] = f"runs on {vitals.delegate}, not on XNNPACK"
    if now_s - member.refusals_s < RECENT_S:
        found["refusals"] = ", ".join(f"{count} {reason}" for reason, count in sorted(vitals.refused.items()))
    if now_s - member.failures_s < RECENT_S:
        found["environment"] = vitals.env_failure or "the environment failed"
    return found | {kind: about for kind, about in member.drift.items() if kind in DRIFTS}
