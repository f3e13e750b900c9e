"""Ingest workers on Ray beside a learner that does all in its own process: what they take in, and its updates.

What they take in is recorded (`_recorded.py`). Updates are of the same fleet in turn: Mosquitto with TLS, a real
learner that samples from two shards of replay or from its own, two real actors of CartPole at a control rate.
Everything shares this machine.

WORKERS_PARTS names some of its parts: recorded, kill, updates, thresholds (`_thresholds.py`).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from broker.contract import errors, topics
from tests.benchmarks import _load, _recorded, _thresholds

TURNS = int(os.environ.get("WORKERS_TURNS", "3"))
PARTS = os.environ.get("WORKERS_PARTS", "recorded,kill,updates,thresholds").split(",")
PHASE_S = float(os.environ.get("WORKERS_PHASE_S", "15"))
LEARNER = [
    *("--learning-starts", "400", "--samples-per-insert", "100000", "--hidden", "256,256", "--batch-size", "64"),
    *("--max-env-steps", "100000000", "--solved-return", "inf"),
]


def run() -> Iterator[dict[str, Any]]:
    """Yields the rows of each part."""
    if importlib.util.find_spec("ray") is None:
        raise errors.RuntimeMissing("Ray is not installed", todo="pip install 'actorq-fleet[ray]'")
    if "recorded" in PARTS:
        yield from _recorded.rows()
    if "kill" in PARTS:
        yield from _recorded.kill_rows()
    if "updates" in PARTS:
        yield _updates()
    if "thresholds" in PARTS:
        yield from _thresholds.rows()


def _updates() -> dict[str, Any]:
    pairs = [(_updates_per_s(2), _updates_per_s(0)) for _ in range(TURNS)]
    ratios = [sharded / local for sharded, local in pairs]
    return {
        "benchmark": "workers",
        "case": "updates/s with two shards of replay on Ray, DQN, MLP 256x2, batch 64",
        "value": round(statistics.median(sharded for sharded, _ in pairs), 1),
        "unit": "updates/s",
        "reference": round(statistics.median(local for _, local in pairs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "runs": TURNS,
        "spread": round(max(ratios) - min(ratios), 3),
        "explain": "reference: the same without --ingest-workers, in turn",
    }


def _updates_per_s(workers: int) -> float:
    with _load.Site(8) as site:
        names = [f"actor-{number:04}" for number in range(8)]
        chosen = [next(name for name in names if topics.shard_of(name, 2) == shard) for shard in range(2)]
        for name in chosen:
            site.actor(name, "--env", "CartPole-v1", "--rate-hz", "100")
        learner = site.learner("--actors", "2", *LEARNER, "--ingest-workers", str(workers))
        while site.newest_metrics()["updates"] < 200:
            time.sleep(0.1)
        time.sleep(PHASE_S)
        site.stop_learner(learner)
        lines = (site.directory / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        rates = [row["updates_per_s"] for row in rows if row["updates"] > 400]
        return float(statistics.median(itertools.islice(reversed(rates), int(PHASE_S) - 2)))
