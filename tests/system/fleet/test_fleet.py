"""Fleets of real processes: foreign environments, resuming, a second run, lock-step, and every way to be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import errors
from learner.run import local_fleet
from tests import conftest as brokers
from tests.system.conftest import QUICK, STICK, command

pytestmark = pytest.mark.system
StartFleet = Callable[..., local_fleet.LocalFleet]


def finish(fleet: local_fleet.LocalFleet, timeout_s: float = 120.0) -> tuple[int, dict[str, Any]]:
    """Waits for the learner; its exit code and summary."""
    learner = fleet.children["learner"]
    output, _ = learner.communicate(timeout=timeout_s)
    return learner.returncode, json.loads(output) if output else {}


def log_says(fleet: local_fleet.LocalFleet, name: str, text: str) -> Callable[[], bool]:
    file = fleet.directory / "logs" / f"{name}.log"
    return lambda: file.exists() and text in file.read_text()


def test_an_environment_that_only_the_actor_can_import(start_fleet: StartFleet, run_root: Path) -> None:
    fleet = start_fleet()
    fleet.start_actor("bench", ["--env", f"{STICK}:Stick", "--envs", "4"])
    fleet.start_learner([*QUICK, "--run-dir", str(run_root / "run"), "--solved-return", "9.9", "--json"])
    code, summary = finish(fleet)
    assert code == errors.EXIT_OK
    assert summary["int8_return_mean"] >= 9.9
    assert "Stick" in summary["env_id"]


def test_resumes_with_higher_versions_and_a_new_run_is_accepted(start_fleet: StartFleet, run_root: Path) -> None:
    fleet = start_fleet()
    fleet.start_actor("pi", ["--env", f"{STICK}:Stick"])
    first_run = ["--run-dir", str(run_root / "first"), "--publish-period-updates", "100", "--json"]
    fleet.start_learner([*QUICK, *first_run, "--max-env-steps", "2000"])
    code, first = finish(fleet)
    assert code == errors.EXIT_OK

    fleet.start_learner(["--resume", str(run_root / "first"), "--max-env-steps", "4000", "--json"])
    code, resumed = finish(fleet)
    assert code == errors.EXIT_OK
    assert resumed["policy_version"] > first["policy_version"]
    assert resumed["updates"] > first["updates"]
    assert resumed["env_steps"] >= 4000
    assert resumed["publish_to_acting_count"] > 0

    fleet.start_learner([*QUICK, "--run-dir", str(run_root / "second"), "--max-env-steps", "2000", "--json"])
    code, second = finish(fleet)
    assert code == errors.EXIT_OK
    assert second["publish_to_acting_count"] > 0, "policies of the new run act, though their versions start over"
    assert second["policy_version"] < resumed["policy_version"]


def test_the_same_seed_gives_the_same_weights_and_bytes(start_fleet: StartFleet, run_root: Path) -> None:
    results = []
    for attempt in ("one", "two"):
        fleet = start_fleet()
        fleet.start_actor("pi", ["--env", "CartPole-v1"])
        run = run_root / attempt
        fleet.start_learner(
            [*QUICK, "--deterministic", "--seed", "7", "--run-dir", str(run), "--max-env-steps", "3000"]
            + ["--publish-period-updates", "100", "--solved-return", "inf", "--json"]
        )
        code, summary = finish(fleet)
        assert code == errors.EXIT_OK
        with np.load(sorted((run / "checkpoints").glob("*.npz"))[-1]) as saved:
            weights = {key: saved[key].tobytes() for key in saved.files if key.startswith("algorithm/")}
        policies = {path.name: path.read_bytes() for path in (run / "policies").glob("*.tflite")}
        results.append((weights, policies, summary["env_steps"], summary["int8_returns"]))
    assert len(results[0][1]) >= 3
    assert results[0][2:] == results[1][2:]
    assert results[0][1] == results[1][1], "the .tflite bytes differ"
    assert results[0][0] == results[1][0], "the weights differ"


def test_a_second_learner_is_turned_away(start_fleet: StartFleet, run_root: Path) -> None:
    fleet = start_fleet()
    fleet.start_learner(["--run-dir", str(run_root / "run"), "--no-energy"])
    home = fleet.directory / "home"
    epoch = home / "fleets" / fleet.name / "epoch"
    brokers.wait_until(epoch.exists, "the first learner is there")
    done = command("learner", "train", "--fleet", fleet.name, "--broker", fleet.address, "--no-energy", home=home)
    assert done.returncode == errors.FleetBusy.exit_code
    assert "another learner is live" in done.stderr


def test_an_actor_with_another_spec_is_turned_away(start_fleet: StartFleet, run_root: Path) -> None:
    fleet = start_fleet()
    fleet.start_actor("first", ["--env", "CartPole-v1"])
    goes_on = ["--solved-return", "inf", "--max-env-steps", "10000000"]  # however late the second one comes
    fleet.start_learner([*QUICK, "--run-dir", str(run_root / "run"), "--publish-period-updates", "100", *goes_on])
    brokers.wait_until(lambda: list((run_root / "run").glob("policies/*")), "training goes on", timeout_s=60.0)
    other = fleet.start_actor("second", ["--env", "Acrobot-v1"])
    assert other.wait(120.0) == errors.ActorRefused.exit_code
    assert "float32[6]" in fleet.log_tail("second")
    assert fleet.children["first"].poll() is None
    assert fleet.children["learner"].poll() is None


@pytest.mark.fault(23)
def test_an_algorithm_refuses_actions_that_it_cannot_choose(start_fleet: StartFleet, run_root: Path) -> None:
    fleet = start_fleet()
    fleet.start_actor("pendulum", ["--env", "Pendulum-v1"])
    fleet.start_learner([*QUICK, "--algorithm", "dqn", "--run-dir", str(run_root / "run")])
    code, _ = finish(fleet)
    assert code == errors.ConfigError.exit_code
    assert not (run_root / "run").exists(), "it is said before the networks are made"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "--broker", "127.0.0.1:1"], errors.BrokerUnreachable.exit_code, "actorq-broker up"),
        (["train", "--config", "CONFIG"], errors.ConfigError.exit_code, "did you mean 'learning_rate'"),
        (["train", "--gamma", "high"], errors.ConfigError.exit_code, "gamma must be a number"),
        (["train", "--deterministic", "--actors", "2"], errors.ConfigError.exit_code, "one actor"),
        (["train", "--resume", "nowhere"], errors.RunError.exit_code, "no run to resume"),
        (["train", "--learning-rat", "1"], errors.EXIT_USAGE, "unrecognized arguments"),
        (["frain"], errors.EXIT_USAGE, "invalid choice"),
    ],
)
def test_bad_input_has_a_clear_error_and_its_code(arguments: list[str], code: int, words: str, run_root: Path) -> None:
    (run_root / "wrong.toml").write_text("learning_rte = 0.1\n")
    filled = [str(run_root / "wrong.toml") if word == "CONFIG" else word for word in arguments]
    done = command("learner", *filled, home=run_root / "home")
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_environment_ends_the_demo(run_root: Path) -> None:
    done = command(
        "learner", "demo", "--env", "CartPool-v1", "--run-dir", str(run_root / "run"), home=run_root / "home"
    )
    assert done.returncode == errors.EnvironmentFailure.exit_code
    assert "CartPool-v1" in done.stderr
