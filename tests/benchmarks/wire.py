"""Published bytes per policy over a real run, against the fp32 .tflite of the same policy.

Each run is `actorq-learner demo` on this machine with the tuned settings, until it is solved or for a minute.
Everything counts: keyframes, deltas, manifests, seals.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from broker import errors

WALL_S = 60
CASES: tuple[tuple[str, Sequence[str]], ...] = (
    ("CartPole-v1", ()),
    ("CartPole-v1", ("--hidden", "256,256")),
    ("LunarLander-v3", ()),
)


def run() -> Iterator[dict[str, Any]]:
    """Yields one row per run."""
    for env, arguments in CASES:
        yield _row(env, arguments)


def _row(env: str, arguments: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name:
        command = [sys.executable, "-m", "learner", "demo", "--env", env, "--seed", "0", "--json", "--no-energy"]
        command += ["--run-dir", str(Path(name) / "run"), "--max-wall-s", str(WALL_S), "--max-env-steps", "1000000"]
        command += arguments
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (errors.EXIT_OK, errors.NotSolved.exit_code):
        raise RuntimeError(f"{env} ended with {done.returncode}: {done.stderr[-2000:]}")
    summary = json.loads(done.stdout)
    float32 = summary["policy_fp32_bytes"]
    return {
        "benchmark": "wire",
        "case": " ".join((env, *arguments)),
        "value": summary["bytes_per_policy"],
        "unit": "bytes",
        "reference": float32,
        "ratio": round(float32 / summary["bytes_per_policy"], 2),
        "runs": summary["policies_published"],
        "spread": None,
        "explain": f"mean payload per policy; int8 model {summary['policy_int8_bytes']} bytes; {summary['keyframes']} "
        f"keyframes ({summary['keyframe_bytes']} bytes), {summary['deltas']} deltas ({summary['delta_bytes']} bytes); "
        f"{summary['updates']} updates, {summary['env_steps']} steps, "
        f"{'solved' if summary['solved'] else 'not solved'} in {summary['learner_wall_s']:.0f} s",
    }
