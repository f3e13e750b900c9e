"""What became of a policy that was deployed, for people."""

from __future__ import annotations

from typing import Any


def made(result: dict[str, Any]) -> str:
    """Returns what became of a policy, for people."""
    tried = result["canary"]
    lines = [
        f"{result['policy']}: {result['precision']}, {result['bytes'] / 1024:.1f} KB, to fleet {result['fleet']!r},"
        f" {result['env_id']}",
        *(_scored(result) if tried is None else _tried(result)),
    ]
    worse = "scores WORSE:" if tried is None else f"is {tried['verdict'].upper()}:"
    acting = ", ".join(result["acting"]) or "nobody yet"
    state = "is out" if result["deployed"] else f"{worse} the older one is out again,"
    lines.append(f"  it {state} as version {result['version']} of epoch {result['epoch']}; acting on that: {acting}")
    return "\n".join(lines)


def _scored(result: dict[str, Any]) -> list[str]:
    older = result["older"]
    returns = (
        f"  returns {result['return_mean']:.1f}, mean of {len(result['returns'])} episodes, by {result['scored_by']}"
    )
    if older is None:
        return [returns, "  the fleet had no policy before to compare it with"]
    if older["return_mean"] is None:
        return [returns, "  the older policy has no score"]
    low, high = result["difference_interval"]
    difference = f"difference {result['difference']:.1f}, 95 % {low:.1f} to {high:.1f}"
    return [returns, f"  the older policy {older['return_mean']:.1f}; {difference}"]


def _tried(result: dict[str, Any]) -> list[str]:
    tried, older = result["canary"], result["older"]
    return [
        f"  {tried['pairs']} pairs of episodes in {tried['took_s']:.0f} s: {tried['why']}",
        f"  returns {result['return_mean']:.1f} on {result['scored_by']}; the older policy"
        f" {older['return_mean']:.1f} on the others meanwhile",
    ]
