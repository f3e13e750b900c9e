"""Formats the report of `actorq-learner quantize` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARES = {
    "agreement": "greedy actions alike",
    "agreement_weighted": "  weighted by fp32's gap",
    "ties": "best two equal",
    "saturation": "best two equal at an end of range",
    "action_error_mean": "mean error / range",
    "action_error_p99": "its 99th percentile",
}


def table(report: Mapping[str, Any]) -> str:
    """Returns the report as a table."""
    sizes, rows, judged = report["bytes"], report["rows"], report["candidates"]
    lines = [
        f"{report['source']} to {report['output']}: {report['precision']}, {sizes['model'] / 1024:.1f} KB"
        f" ({sizes['float32'] / sizes['model']:.1f} times smaller than float32), {report['delegate']} kernels"
        f" of {report['runtime']}",
        *([report["said"]] if report["said"] else []),
        f"judged on {rows['judged']} of {rows['judged'] + rows['calibration']} observations, split by {rows['split']},"
        f" beside fp32; {rows['outside']:.2%} of them lie outside of what was calibrated:",
        "",
        f"  {'':34}" + "".join(f"{name:>14}" for name in judged),
    ]
    for key, label in _SHARES.items():
        if all(key in values for values in judged.values()):
            lines.append(f"  {label:34}" + "".join(f"{values[key]:14.2%}" for values in judged.values()))
    for key, label in (("relative_mean", "mean error / range of outputs"), ("relative_max", "largest error / range")):
        cells = (f"{max(values[key]):14.2%}" if values[key] else f"{'-':>14}" for values in judged.values())
        lines.append(f"  {label:34}" + "".join(cells))
    lines.append("")
    played = report["returns"]
    if played:
        share = (
            "" if played["low_relative"] is None else f", {played['low_relative']:.1%} of fp32 - chance at the low end"
        )
        lines.append(
            f"  returns, {played['episodes']} episodes: {played['mean']:.1f}; fp32 {played['fp32']:.1f}, chance"
            f" {played['random']:.1f}; difference {played['difference']:.1f}, 95 % {played['low']:.1f} to"
            f" {played['high']:.1f}{share}"
        )
    else:
        lines.append("  not played: fresh episodes may show what these observations do not (--env compares returns)")
    learned = report["distil"]
    if learned:
        lines.append(
            f"  distilled in {learned['wall_s']:.0f} s ({learned['cpu_s']:.0f} s of processor time),"
            f" {learned['rounds']} rounds, {learned['steps']} steps on {learned['rows']} observations; ended:"
            f" {learned['ended']}"
        )
        lines += [f"  {learned['unseen']}"] if learned["unseen"] else []
    if "nonzero" in report:
        lines.append(f"  weights of {report['weight_bits']} bits, {report['nonzero']:.1%} of them not 0")
    if len(judged) > 1:
        lines.append(f"  written: {report['written']}")
    if report["levelled"]:
        lines.append("  what its outputs have in common is taken out of them, which changes no greedy action")
    took = report["seconds"]
    lines.append(
        f"  {took['total']:.1f} s, {took['episodes']:.1f} of them for episodes, {took['distil']:.1f} for distilling"
    )
    if not report["passed"]:
        lines.append("  INFERIOR, and written by --force-publish")
    return "\n".join(lines)
