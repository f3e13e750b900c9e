"""Continuous actions through a real fleet: noise on the actors, a learner that is killed, a task that is learned."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, messages
from learner.experience import ledger
from learner.files import checkpoint, run_directory
from learner.quantize.tflite import interpreter
from learner.run import local_fleet
from tests import conftest

pytestmark = pytest.mark.system

SMALL = ("--algorithm", "d4pg", "--hidden", "32", "--critic-hidden", "32", "--learning-starts", "400", "--no-energy")


def newest(run: Path) -> checkpoint.Checkpoint | None:
    return checkpoint.load_newest(run / "checkpoints")


def test_a_killed_run_goes_on_with_targets_moments_and_noise(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet, run = start_fleet(), run_root / "run"
    for index in range(2):
        fleet.start_actor(f"a{index}", ["--env", "Pendulum-v1", "--heartbeat-s", "0.5"])
    flags = ("--env", "Pendulum-v1", *SMALL, "--actors", "2", "--noise-std", "0.5", "--noise-ladder", "0.02")
    learner = fleet.start_learner([*flags, "--checkpoint-period-s", "0.5", "--run-dir", str(run)])
    conftest.wait_until(
        lambda: run.is_dir() and (found := newest(run)) is not None and found.parts["algorithm"]["updates"] > 100,
        "a checkpoint behind some updates",
        timeout_s=60.0,
    )
    learner.send_signal(signal.SIGKILL)
    learner.wait()
    saved = newest(run)
    assert saved is not None
    groups = {name.split("/")[0] for name in saved.parts["algorithm"]}
    assert groups == {"weights", "targets", "adam_m", "adam_v", "normalizer", "updates"}
    goal = int(saved.meta["limiter"]["inserted"]) + 8000  # more than grants let the actors be ahead of the updates
    fleet.start_learner(["--resume", str(run), "--max-env-steps", str(goal), "--evaluate-episodes", "3", "--json"])
    fleet.children["learner"].wait(120.0)
    summary = json.loads(fleet.learner_output())
    assert summary["env_steps"] >= goal
    assert summary["updates"] > int(saved.parts["algorithm"]["updates"])
    assert summary["policy_version"] > saved.meta["version"]
    assert 0.0 <= summary["action_error_mean"] <= summary["action_error_p99"] < 0.1
    assert summary["delegate"] == "XNNPACK"
    assert "action" not in summary["messages_refused"], "every action lies within the bounds"

    # The ladder: the first actor's steps jump, the last one's hardly do
    jumps: dict[str, list[float]] = {"a0": [], "a1": []}
    for actor, body in ledger.bodies(run / run_directory.LEDGER):
        experience = codec.decode(messages.Experience, body)
        if experience.version:
            ends = np.cumsum(experience.length)[:-1]
            parts = [part[:, 0] for part in np.split(experience.action, ends) if len(part) > 1]
            jumps[actor] += [float(np.abs(np.diff(part)).mean()) for part in parts]
    assert max(map(np.mean, jumps.values())) > 3 * min(map(np.mean, jumps.values()))


def test_sac_repeats_bit_for_bit_and_its_actors_tell_the_densities_of_int8(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    flags = (
        *(
            "--env",
            "Pendulum-v1",
            "--algorithm",
            "sac",
            "--hidden",
            "16",
            "--critic-hidden",
            "16",
            "--batch-size",
            "32",
        ),
        *(
            "--learning-rate",
            "0.01",
            "--learning-starts",
            "300",
            "--samples-per-insert",
            "8",
            "--max-env-steps",
            "1000",
        ),
        *("--publish-period-updates", "16", "--solved-return", "inf", "--evaluate-episodes", "2", "--no-energy"),
        *("--deterministic", "--seed", "7", "--json"),
    )
    results: list[Any] = []
    for run in (run_root / "one", run_root / "two"):
        fleet = start_fleet()
        fleet.start_actor("pi", ["--env", "Pendulum-v1"])
        fleet.start_learner([*flags, "--run-dir", str(run)])
        assert fleet.children["learner"].wait(120.0) == 0, fleet.log_tail("learner")
        saved = newest(run)
        assert saved is not None
        state = {name: array.tobytes() for name, array in saved.parts["algorithm"].items()}
        policies = {path.name: path.read_bytes() for path in (run / "policies").glob("*.tflite")}
        results.append((state, policies, json.loads(fleet.learner_output())["int8_returns"]))
    assert results[0] == results[1]
    assert "weights/log_temperature" in results[0][0]

    # What actors sent is the density by the very file that they acted with; of fp32 weights it is another
    policies, checked, off = results[0][1], 0, [0.0]
    for _, body in ledger.bodies(run_root / "one" / run_directory.LEDGER):
        sent = codec.decode(messages.Experience, body)
        model = policies.get(f"v{sent.version:06d}.int8.tflite")
        if not model:
            continue
        last = np.cumsum(sent.length + 1) - 1
        rows = interpreter.run(model, np.delete(sent.observation, last, axis=0))[0].astype(np.float64)
        mean, log_std = np.clip(rows[:, 0], -3, 3), -1.5 + 3.5 * np.tanh(rows[:, 1])
        action = np.asarray(sent.action, np.float64)[:, 0] / 2
        inner = np.abs(action) < 0.99  # further out float32 no longer tells what was in front of the tanh

        def density(mean: Any, action: Any, log_std: Any) -> Any:
            z = (np.arctanh(action) - mean) / np.exp(log_std)
            return -0.5 * z * z - log_std - 0.5 * np.log(2 * np.pi) - np.log(2 * (1 - action * action))

        told = sent.log_prob[inner]
        assert density(mean[inner], action[inner], log_std[inner]) == pytest.approx(told, abs=2e-3)
        off.append(np.abs(density(mean[inner] + 0.01, action[inner], log_std[inner]) - told).max())
        checked += int(inner.sum())
    assert checked > 200
    assert max(off) > 0.01, "a mean that is off by less than a step of int8 is noticed"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["d4pg", "ddpg", "sac"])
def test_trains_pendulum_with_int8_actors(algorithm: str, run_root: Path) -> None:
    command = [sys.executable, "-m", "learner", "demo", "--env", "Pendulum-v1", "--algorithm", algorithm, "--json"]
    done = subprocess.run(
        [*command, "--solved-return", "-250", "--run-dir", str(run_root / "run"), "--no-energy"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["int8_return_mean"] >= -250.0
    assert summary["env_steps"] <= 50_000
    low, high = summary["return_difference_interval"]
    assert low <= summary["return_difference"] <= high
