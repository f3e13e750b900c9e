"""Measures whether dueling earns its cost: time to a solved task with and without it, over seeds, on tuned tasks.

With dueling an update takes 1.9 times the operations (`ONLY=update`). Each seed is run both ways, one after the other
in alternating order, as whole fleets on this machine. `value` is the median time to the threshold with dueling,
`reference` the median without; a ratio above 1 says that dueling pays. A run that does not get there counts as so many
seconds as it had. The tasks' settings were tuned with dueling.

ACTORQ_BENCH_SEEDS (10) says how many seeds; ACTORQ_BENCH_TASKS names the tasks, with commas; ACTORQ_BENCH_WALL_S (120)
is the longest that a run may take.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import errors

TASKS = "CartPole-v1,Acrobot-v1,MountainCar-v0,LunarLander-v3"
WAYS = ("dueling", "no-dueling")
RESAMPLES = 10_000
Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""The summaries of both ways, by seed."""


def run() -> Iterator[dict[str, Any]]:
    """Yields two rows per task: time, and steps of the environment."""
    seeds = int(os.environ.get("ACTORQ_BENCH_SEEDS", "10"))
    wall_s = float(os.environ.get("ACTORQ_BENCH_WALL_S", "120"))
    for task in os.environ.get("ACTORQ_BENCH_TASKS", TASKS).split(","):
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for seed in range(seeds):
            for way in WAYS if seed % 2 else WAYS[::-1]:
                summary = _summary(task, seed, way, wall_s)
                runs[way].append(summary)
                print(
                    f"{task}, seed {seed + 1} of {seeds}, --{way}: {summary['learner_wall_s']:.1f} s, "
                    f"{summary['steps']} steps, {'solved' if summary['solved'] else 'not solved'}",
                    file=sys.stderr,
                    flush=True,
                )
        yield _row(f"{task}, time to {runs[WAYS[0]][0]['solved_return']:g}", "s", "learner_wall_s", runs)
        yield _row(f"{task}, steps to {runs[WAYS[0]][0]['solved_return']:g}", "steps", "steps", runs)


def _summary(task: str, seed: int, way: str, wall_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name:
        command = [sys.executable, "-m", "learner", "demo", "--env", task, "--seed", str(seed), f"--{way}", "--json"]
        command += ["--no-energy", "--run-dir", str(Path(name) / "run"), "--max-wall-s", str(wall_s)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (errors.EXIT_OK, errors.NotSolved.exit_code):
        raise RuntimeError(f"{task} ended with {done.returncode}: {done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    steps = summary["solved_env_steps"]  # when the policy was made that passed: the fleet goes on while it is scored
    return summary | {"steps": summary["env_steps"] if steps is None else steps}


def _row(case: str, unit: str, key: str, runs: Runs) -> dict[str, Any]:
    with_it, without = (np.array([summary[key] for summary in runs[way]], float) for way in WAYS)
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(with_it), size=(RESAMPLES, len(with_it)))
    ratios = np.median(without[drawn], 1) / np.median(with_it[drawn], 1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    value, reference = statistics.median(with_it), statistics.median(without)
    solved = [sum(bool(summary["solved"]) for summary in runs[way]) for way in WAYS]
    rates = [statistics.median(s["updates"] / s["learner_wall_s"] for s in runs[way]) for way in WAYS]
    return {
        "benchmark": "dueling",
        "case": case,
        "value": round(value, 2),
        "unit": unit,
        "reference": round(reference, 2),
        "ratio": round(reference / value, 2),
        "runs": len(with_it),
        "spread": round(high - low, 2),
        "explain": f"ratio is without dueling over with it, 95 % of resampled seeds {low:.2f} to {high:.2f}; with it "
        f"{with_it.min():.5g} to {with_it.max():.5g}, solved {solved[0]} of {len(with_it)}, {rates[0]:.0f} updates/s; "
        f"without {without.min():.5g} to {without.max():.5g}, solved {solved[1]}, {rates[1]:.0f} updates/s",
    }
