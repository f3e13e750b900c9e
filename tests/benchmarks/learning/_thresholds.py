"""Whole runs with two ingest workers until the published int8 policy is good, beside the same without, seed by seed.

`actorq-learner demo` with the settings that are tuned for each task: a broker, a learner and two actors, one of either
shard. WORKERS_TASKS names the tasks with commas, WORKERS_SEEDS the seeds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.contract import errors
from tests.benchmarks import _kept

TASKS = os.environ.get("WORKERS_TASKS", "CartPole-v1,Pendulum-v1").split(",")
SEEDS = os.environ.get("WORKERS_SEEDS", "0,1,2").split(",")
WORKERS = 2


def rows() -> Iterator[dict[str, Any]]:
    """Yields a row a task: seconds from the first process started until training ended, and steps."""
    for task in TASKS:
        pairs = [(_trained(task, seed, WORKERS), _trained(task, seed, 0)) for seed in SEEDS]
        with_workers, without = zip(*pairs, strict=True)
        wall_s = [one["wall_s"] for one in with_workers]
        solved, wanted = sum(one["solved"] for one in with_workers), with_workers[0]["solved_return"]
        yield {
            "benchmark": "workers",
            "case": f"{task}, {with_workers[0]['algorithm']}, {WORKERS} ingest workers: until a policy is good",
            "value": round(statistics.median(wall_s), 1),
            "unit": "s",
            "reference": round(statistics.median(one["wall_s"] for one in without), 1),
            "ratio": round(statistics.median(one["wall_s"] / other["wall_s"] for one, other in pairs), 2),
            "runs": len(pairs),
            "spread": round(max(wall_s) - min(wall_s), 1),
            "explain": f"{solved} of {len(pairs)} reached {wanted:g} by the run's own scores; "
            f"seeds {', '.join(SEEDS)}: {_told(with_workers)}; reference, without workers: {_told(without)}. All tuned "
            "settings as they are: workers refuse none of them",
        }


def _trained(task: str, seed: str, workers: int) -> dict[str, Any]:
    def train() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name:
            os.chmod(name, 0o755)  # Mosquitto runs as another user
            command = [sys.executable, "-m", "learner", "demo", "--env", task, "--seed", seed, "--no-energy", "--json"]
            command += ["--ingest-workers", str(workers), "--run-dir", str(Path(name) / "run")]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
            if done.returncode not in (
                errors.EXIT_OK,
                errors.NotSolved.exit_code,
            ):  # not solved counts
                raise RuntimeError(f"{task} with {workers} workers ended with {done.returncode}, seed {seed}")
            summary = json.loads(done.stdout)
        keys = ("algorithm", "solved", "solved_return", "env_steps", "int8_return_mean")
        return {"wall_s": summary["train_wall_s"], **{key: summary[key] for key in keys}}

    return _kept.or_found(["thresholds", task, seed, workers], train)


def _told(runs: tuple[dict[str, Any], ...]) -> str:
    return ", ".join(
        f"{one['wall_s']:.1f} s, {one['env_steps'] / 1000:.0f}k steps, {one['int8_return_mean']:.0f}" for one in runs
    )
