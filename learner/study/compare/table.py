"""Shows the rows of a comparison to people."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from learner.study.compare import plan


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as text: a block for each regime and size, and under each what explains its steps per second."""
    lines: list[str] = []
    for (regime, hidden), block in itertools.groupby(rows, key=lambda row: (row["regime"], tuple(row["hidden"]))):
        found = list(block)
        lines += ["", f"{found[0]['env_id']}, {plan.widths(hidden)}, {regime}"]
        cells = [("", "", f"{found[0]['over']}", "", "ratio", "95 %", "seeds")]
        cells += [
            (
                row["peer"] or row["precision"],
                row["case"].rpartition(": ")[2],
                _number(row["reference"]),
                f"{_number(row['value'])} {row['unit']}",
                f"{row['ratio']:.2f}x" if row["ratio"] is not None else f"{row['difference']:+.4g}",
                f"{row['interval'][0]:.3g} to {row['interval'][1]:.3g}" if row["interval"] else "-",
                str(row["runs"]),
            )
            for row in found
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        for line in cells:
            lines.append("  ".join(f"{text:<{width}}" for text, width in zip(line, widths, strict=True)).rstrip())
        told = dict.fromkeys(row["explain"] for row in found if row["measure"] in ("env_steps_per_s", "threshold_s"))
        lines += [f"  {explain}" for explain in told]
    return "\n".join(lines[1:])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
