"""Measures how far int8 policies act like fp32: `actorq-learner fidelity` for one trained run of each task.

`value` is the share of held-back replay states on which a policy chooses as fp32 does; of continuous actions their mean
error, relative to their range. `reference` is that of plain int8.
The environment variable ACTORQ_BENCH_RUNS may name a directory of run directories; tasks that have none there are
trained first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EPISODES = {
    "CartPole-v1": 100,
    "Acrobot-v1": 400,
    "MountainCar-v0": 400,
    "LunarLander-v3": 400,
    "Pendulum-v1": 100,
    "MountainCarContinuous-v0": 100,
    "LunarLanderContinuous-v3": 400,
}
"""Episodes of a policy, by task. 400 where a few decide: one more swing costs MountainCar 80 of 110, Acrobot may
swing on until it is cut off, and landings are chaotic: one other choice in 500 (float16) moves a return by 40. After
100 the interval is as wide as what is asked of it, whatever the policy."""
PUBLISHED, SHIPPED = "as published", "all together (ships)"
"""The first is there only of a run that ended with its task solved."""
PLAIN = "plain int8"


def run() -> Iterator[dict[str, Any]]:
    """Yields one row per task and way of making a policy."""
    given = os.environ.get("ACTORQ_BENCH_RUNS")
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name:
        for task, episodes in EPISODES.items():
            directory = (_find(Path(given), task) if given else None) or _train(task, Path(name))
            command = [sys.executable, "-m", "learner", "fidelity", str(directory), "--json"]
            done = subprocess.run([*command, "--episodes", str(episodes)], stdout=subprocess.PIPE, check=True)
            study = json.loads(done.stdout)
            by_name = {row["recipe"]: row for row in study["rows"]}
            judged = by_name.get(PUBLISHED, by_name[SHIPPED])
            for row in study["rows"]:
                yield _row(study, row, by_name[PLAIN], _verdict(row) if row is judged else "")


def _find(runs: Path, task: str) -> Path | None:
    """The newest run of a task."""
    files = [file for file in runs.glob("*/config.toml") if tomllib.loads(file.read_text())["env"] == task]
    return max(files, key=lambda file: file.stat().st_mtime).parent if files else None


def _train(task: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "learner", "demo", "--env", task, "--seed", "0", "--json"]
    subprocess.run([*command, "--run-dir", str(directory / task)], stdout=subprocess.DEVNULL, check=False)
    return directory / task  # a run that was not solved has a checkpoint too


def _row(study: dict[str, Any], row: dict[str, Any], plain: dict[str, Any], verdict: str) -> dict[str, Any]:
    measure = "agreement" if study["actions"] == "discrete" else "error_mean"
    return {
        "benchmark": "fidelity",
        "case": f"{study['env_id']}, {row['recipe']}",
        "value": round(row[measure], 4),
        "unit": "share of states" if measure == "agreement" else "share of the action's range",
        "reference": round(plain[measure], 4),
        "ratio": round(row[measure] / plain[measure], 3),
        "runs": study["episodes"],
        "spread": round(row["return_high"] - row["return_low"], 1) if "return_mean" in row else None,
        "explain": _explain(study, row) + verdict,
    }


def _explain(study: dict[str, Any], row: dict[str, Any]) -> str:
    if study["actions"] == "continuous":
        text = f"of {study['states']} states; 99th percentile {row['error_p99']:.4f}, largest {row['error_max']:.4f}"
    else:
        decided = "-" if row["agreement_decided"] is None else f"{row['agreement_decided']:.4f}"
        text = (
            f"{decided} where fp32's best two differ by over 1 % of the advantages' range, {row['decided']:.3f} of "
            f"{study['states']} states; ties {row['ties']:.4f}, regret {row['regret']:.6f} of that range"
        )
    if "return_mean" not in row:
        return f"{text}; not played: {study['not_played']}"
    return (
        f"{text}; return {row['return_mean']:.1f}, fp32 {study['fp32_return']:.1f}, random "
        f"{study['random_return']:.1f}; less fp32 {row['return_difference']:.1f}, paired 95 % interval "
        f"{row['return_low']:.1f} to {row['return_high']:.1f} (spread is its width), non-inferior: "
        f"{row['return_non_inferior']}; {study['runtime']}, {row['delegate']}"
    )


def _verdict(row: dict[str, Any]) -> str:
    """Returns what is required of the policies that ship, and whether they show it."""
    if "error_mean" in row:
        wanted = [
            ("mean error at most 0.01", row["error_mean"] <= 0.01),
            ("99th percentile at most 0.03", row["error_p99"] <= 0.03),
        ]
    else:
        wanted = [
            ("agreement at least 0.9", row["agreement"] >= 0.9),
            ("at least 0.99 where decided", row["agreement_decided"] is None or row["agreement_decided"] >= 0.99),
            ("ties at most 0.02", row["ties"] <= 0.02),
        ]
    wanted.append(("non-inferior return", bool(row.get("return_non_inferior"))))
    missed = [what for what, met in wanted if not met]
    return f"; MISSED: {', '.join(missed)}" if missed else "; all that is required of it is met"
