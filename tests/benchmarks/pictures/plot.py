"""Draws what `make bench ONLY=load` printed: python -m tests.benchmarks.pictures.plot ROWS.jsonl OUT.svg."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from edge_actor.bench import chart

PARTS = ("learner", "broker", "actors")


def load(rows: list[str]) -> str:
    """Cores in use by number of connections, for all and for each process."""
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in ("all", *PARTS)}
    for row in map(json.loads, rows):
        if row["benchmark"] != "load" or row["unit"] != "cores":
            continue
        connections = float(row["case"].split()[0])
        series["all"].append((connections, row["value"]))
        for part in PARTS:
            found = re.search(rf"\b{part} ([0-9.]+)", row["explain"])
            assert found is not None, row
            series[part].append((connections, float(found[1])))
    return chart.lines("TLS connections at 50 steps/s each", "connections", "cores in use", series)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(load(Path(sys.argv[1]).read_text().splitlines()))
