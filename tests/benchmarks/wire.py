"""Published bytes per policy over real runs, against the fp32 .tflite of the same policies.

Each run is `actorq-learner demo` on this machine with the tuned settings, until it is solved or for a minute. A row is
the mean over all policies of its runs, one per seed; `spread` is the range of the runs' own ratios. A run that is
solved within seconds publishes few policies, which differ much: its ratio is the smallest. Everything counts:
keyframes, deltas, headers, seals.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from broker.contract import errors
from tests.benchmarks import _broker

WALL_S = 60
CASES: tuple[tuple[str, Sequence[str], int], ...] = (
    ("CartPole-v1", (), 5),
    ("CartPole-v1", ("--hidden", "256,256"), 3),
    ("LunarLander-v3", (), 2),
)
"""Task, settings, seeds."""


def run() -> Iterator[dict[str, Any]]:
    """Yields a row per case."""
    for env, arguments, seeds in CASES:
        yield _row(env, arguments, [_summary(env, seed, arguments) for seed in range(seeds)])


def _summary(env: str, seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name:
        command = [sys.executable, "-m", "learner", "demo", "--env", env, "--seed", str(seed), "--json", "--no-energy"]
        command += ["--run-dir", str(Path(name) / "run"), "--max-wall-s", str(WALL_S), "--max-env-steps", "1000000"]
        command += arguments
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (errors.EXIT_OK, errors.NotSolved.exit_code):
        raise RuntimeError(f"{env} ended with {done.returncode}: {done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def _row(env: str, arguments: Sequence[str], runs: list[dict[str, Any]]) -> dict[str, Any]:
    float32 = runs[0]["policy_fp32_bytes"]
    policies = [run["policies_published"] for run in runs]
    published = [run["keyframe_bytes"] + run["delta_bytes"] for run in runs]
    ratios = [float32 * n / size for n, size in zip(policies, published, strict=True)]
    keyframes, deltas = sum(run["keyframes"] for run in runs), sum(run["deltas"] for run in runs)
    return {
        "benchmark": "wire",
        "broker": _broker.kind(),
        "case": " ".join((env, *arguments)),
        "value": round(sum(published) / sum(policies)),
        "unit": "bytes",
        "reference": float32,
        "ratio": round(float32 * sum(policies) / sum(published), 2),
        "runs": len(runs),
        "spread": round(max(ratios) - min(ratios), 2),
        "explain": f"mean payload per policy; int8 model {runs[0]['policy_int8_bytes']} bytes; {keyframes} keyframes "
        f"({sum(run['keyframe_bytes'] for run in runs)} bytes), {deltas} deltas "
        f"({sum(run['delta_bytes'] for run in runs)} bytes). Run by run: "
        + "; ".join(
            f"{ratio:.2f} with {n} policies, {'solved' if run['solved'] else 'not solved'} in "
            f"{run['learner_wall_s']:.0f} s"
            for ratio, n, run in zip(ratios, policies, runs, strict=True)
        ),
    }
