"""`actorq-learner deploy` on a real fleet: a policy goes out, acts, is scored, and taken back if it is worse."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import errors
from learner import __main__ as main
from learner.run import local_fleet
from tests import conftest
from tests.learner.study.user_models import agents

pytestmark = [pytest.mark.system, pytest.mark.mosquitto]
CONTROLLER = np.array([0.1, 0.5, 4.0, 1.5])
"""Pushes CartPole to the right where its product with the observation is positive."""
SHARED = 1e4
"""Part of both hidden units, beside which eight bits lose what they differ by."""


def balancer(path: Path) -> Path:
    """A DQN that balances the pole by one hidden unit for either action."""
    return _agent(path, np.stack([-CONTROLLER, CONTROLLER]))


def lost_in_rounding(path: Path) -> Path:
    """The same by fp32, and no policy at all in int8."""
    return _agent(path, SHARED * np.ones((2, 4)) + np.stack([-CONTROLLER, CONTROLLER]))


def _agent(path: Path, hidden: Any) -> Path:
    tensors = {
        "q_net.q_net.0.weight": hidden.astype(np.float32),
        "q_net.q_net.0.bias": np.full(2, 4 * SHARED if np.abs(hidden).max() > SHARED else 20, np.float32),
        "q_net.q_net.2.weight": np.eye(2, dtype=np.float32),
        "q_net.q_net.2.bias": np.zeros(2, np.float32),
    }
    return agents.save(path, tensors, agents.box(np.full(4, -1), np.full(4, 1)), agents.discrete(2))


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back what the command does to signals: it runs in this process, which has loaded TensorFlow once."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_policy_goes_out_acts_is_scored_and_one_that_is_worse_is_taken_back(
    start_fleet: Callable[..., local_fleet.LocalFleet],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fleet = start_fleet("mosquitto")
    monkeypatch.setenv("ACTORQ_HOME", str(fleet.directory / "home"))
    rated = ["--env", "CartPole-v1", "--rate-hz", "50", "--heartbeat-s", "0.2"]
    fleet.start_actor("steady", rated)
    observations = tmp_path / "observations.npz"
    spread = np.array([1.0, 1.0, 0.1, 1.0])
    np.savez(observations, observations=np.random.default_rng(0).normal(size=(512, 4)).astype(np.float32) * spread)

    def deploy(file: Path, *options: str, code: int = errors.EXIT_OK) -> tuple[dict[str, Any], str]:
        where = ["--fleet", fleet.name, "--broker", fleet.address, "--json", "--episodes", "5", "--wait-s", "60"]
        ended = main.main(["deploy", str(file), *where, "--calibration", str(observations), *options])
        said = capfd.readouterr()
        assert ended == code, said.err
        assert "Traceback" not in said.err
        return json.loads(said.out) if said.out else {}, said.err

    good, bad = balancer(tmp_path / "good.zip"), lost_in_rounding(tmp_path / "bad.zip")
    first, said = deploy(good)
    assert first["deployed"] and first["gate_passed"] and first["older"] is None
    assert first["acting"] == ["steady"] and first["return_mean"] == 500.0, "scored by the actor that acts on it"
    assert "acts on steady" in said

    _, refused = deploy(bad, code=errors.PolicyError.exit_code)
    assert "acts otherwise than the original" in refused and "--force-publish" in refused

    worse, said = deploy(bad, "--force-publish", code=errors.PolicyError.exit_code)
    assert not worse["deployed"] and not worse["gate_passed"]
    assert worse["return_mean"] < 100.0 and worse["older"]["return_mean"] == 500.0
    assert worse["older"]["sha256"] == first["sha256"], "what brokers had retained"
    assert (worse["epoch"], worse["version"]) == (first["epoch"] + 1, 2), "the older one is the newest version"
    assert worse["acting"] == ["steady"] and "goes out again" in said
    assert worse["experience_not_taken"] == 0

    late = fleet.start_actor("late", rated)  # no learner is at work: it acts on what is retained
    log = fleet.directory / "logs" / "late.log"
    conftest.wait_until(lambda: f"policy {worse['epoch']}.2 acts" in log.read_text(), "it acts", 60.0)
    assert late.poll() is None and not fleet.ended()


@pytest.mark.usefixtures("handlers")
def test_an_actor_whose_environment_the_policy_does_not_fit(
    start_fleet: Callable[..., local_fleet.LocalFleet],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fleet = start_fleet("mosquitto")
    monkeypatch.setenv("ACTORQ_HOME", str(fleet.directory / "home"))
    fleet.start_actor("acrobot", ["--env", "Acrobot-v1", "--heartbeat-s", "0.2"])
    observations = tmp_path / "observations.npz"
    np.savez(observations, observations=np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32))
    log = fleet.directory / "logs" / "acrobot.log"
    conftest.wait_until(lambda: log.exists() and "actor acrobot boot" in log.read_text(), "it starts", 60.0)
    words = ["deploy", str(balancer(tmp_path / "good.zip")), "--calibration", str(observations), "--wait-s", "10"]
    assert main.main([*words, "--fleet", fleet.name, "--broker", fleet.address]) == errors.SpecError.exit_code
    assert "maps [4] to 2 values, and Acrobot-v1 has" in capfd.readouterr().err
    assert not fleet.ended(), "it is left as it is"


def test_a_fleet_without_keys_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACTORQ_HOME", str(tmp_path))
    assert main.main(["deploy", "policy.tflite", "--fleet", "nowhere"]) == errors.IdentityError.exit_code
    assert "has no keys" in capfd.readouterr().err
