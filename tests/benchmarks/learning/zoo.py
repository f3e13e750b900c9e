"""Quantizes a directory of Stable-Baselines3 agents by `actorq-learner quantize`, and judges each by paired returns.

Nothing is fetched: the environment variable ACTORQ_ZOO names a directory of .zip files, as rl-baselines3-zoo lays them
out (github.com/DLR-RM/rl-trained-agents): ALGORITHM/ENV_1/ENV.zip, statistics beside them. `value` is the low end of
the paired 95 % interval, as a share of (fp32 - random); `reference` is what may be lost.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.contract import errors
from learner.quantize import compare

_NOW = (
    (r"(LunarLander.*)-v2", r"\1-v3"), (r"(HalfCheetah|Hopper|Walker2d|Swimmer)-v3", r"\1-v4"),
    (r"(\w+)NoFrameskip-v4", r"ale_py:\1NoFrameskip-v4"),
)  # fmt: skip
"""The ids that today's Gymnasium has for what agents were trained on."""


def run() -> Iterator[dict[str, Any]]:
    """Yields a row per agent.

    Raises:
        RuntimeMissing: There is no directory of agents.
    """
    zoo = os.environ.get("ACTORQ_ZOO", "")
    agents = sorted(file for file in Path(zoo).glob("*/*/*.zip") if file.stem != "best_model") if zoo else []
    if not agents:
        raise errors.RuntimeMissing(
            "there are no agents",
            todo="ACTORQ_ZOO=DIR, a clone of github.com/DLR-RM/rl-trained-agents or files laid out as there",
        )
    with tempfile.TemporaryDirectory(prefix="actorq-zoo-") as directory:
        for agent in agents:
            yield _row(agent, Path(directory))


def _row(agent: Path, directory: Path) -> dict[str, Any]:
    env_id = agent.stem
    for old, new in _NOW:
        env_id = re.sub(f"^{old}$", new, env_id)
    case = f"{agent.parts[-3]} {agent.stem}"
    output = directory / f"{agent.parts[-3]}-{agent.stem}.tflite"
    command = [sys.executable, "-m", "learner", "quantize", str(agent), "--env", env_id, "-o", str(output), "--json"]
    done = subprocess.run([*command, "--force-publish"], capture_output=True, text=True, check=False)
    base = {"benchmark": "zoo", "case": case, "unit": "share of (fp32 - random), low end", "reference": -compare.MARGIN}
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if line.startswith("error: ")), "error: it ended")
        return base | {"value": None, "ratio": None, "runs": 0, "spread": None, "explain": said}
    report = json.loads(done.stdout)
    played, judged = report["returns"], report["candidates"][report["written"]]
    low, span = played["low_relative"], played["fp32"] - played["random"]
    return base | {
        "value": None if low is None else round(low, 4),
        "ratio": None,
        "runs": played["episodes"],
        "spread": round((played["high"] - played["low"]) / span, 4) if span > 0 else None,
        "explain": _explain(report, played, judged),
    }


def _explain(report: dict[str, Any], played: dict[str, Any], judged: dict[str, Any]) -> str:
    if report["outputs"] == "values":
        fidelity = f"agreement {judged['agreement']:.4f}, ties {judged['ties']:.4f}"
    else:
        fidelity = f"mean error {judged['action_error_mean']:.4f} of the range, p99 {judged['action_error_p99']:.4f}"
    return (
        f"{'ships' if report['passed'] else 'REFUSED'}; {report['source']}; {fidelity}; return {played['mean']:.1f},"
        f" fp32 {played['fp32']:.1f}, random {played['random']:.1f}; {report['rows']['outside']:.4f} of held-out"
        f" observations outside; {report['written']}; {played['delegate']}"
    )
