"""Formats the report of `actorq-learner quantize` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(report: Mapping[str, Any]) -> str:
    """Returns the report as a table."""
    sizes, judged = report["bytes"], [("plain", report["plain"])]
    if report["aware"]:
        judged.append(("aware", report["aware"]))
    lines = [
        f"{report['output']}: {report['precision']}, {sizes['model'] / 1024:.1f} KB"
        f" ({sizes['float32'] / sizes['model']:.1f} times smaller than float32), {report['delegate']} kernels"
        f" of {report['runtime']}",
        f"judged on {report['rows']['judged']} of {report['rows']['judged'] + report['rows']['calibration']}"
        " observations, beside fp32:",
        "",
        f"  {'':28}" + "".join(f"{name:>12}" for name, _ in judged),
    ]
    shares = {
        "agreement": "greedy actions alike",
        "agreement_weighted": "  weighted by fp32's gap",
        "ties": "best two equal",
        "saturation": "outputs at an end of range",
    }
    if report["outputs"] == "actions":
        del shares["agreement"], shares["agreement_weighted"], shares["ties"]
    for key, label in shares.items():
        lines.append(f"  {label:28}" + "".join(f"{values[key]:12.2%}" for _, values in judged))
    for key, label in (("relative_mean", "mean error / range"), ("relative_max", "largest error / range")):
        lines.append(f"  {label:28}" + "".join(f"{max(values[key]):12.2%}" for _, values in judged))
    if report["aware"]:
        lines += ["", f"  written: {report['written']}"]
        if report["levelled"]:
            lines.append("  what its outputs have in common is taken out of them, which changes no greedy action")
    return "\n".join(lines)
