"""`actorq-learner quantize --env`: agents from file to judged .tflite, by actors that play them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import errors
from learner import __main__ as main
from learner.quantize import compare, gate
from learner.study import play
from learner.study.user_models import command, recipe, requests, returns
from learner.study.user_models.formats import sb3
from tests.learner.study.user_models import agents

pytestmark = pytest.mark.system
CONTROLLER = np.array([0.1, 0.5, 4.0, 1.5])
"""Pushes CartPole to the right where its product with the observation is positive: 500 in every episode."""


def balancer(path: Path, sign: float = 1.0) -> Path:
    """A DQN that does: ReLUs of both signs of the state, and values beside which that difference is small."""
    hidden = np.concatenate([np.eye(4), -np.eye(4)])
    difference = 0.1 * sign * np.concatenate([CONTROLLER, -CONTROLLER])
    tensors: dict[str, NDArray[Any]] = {
        "q_net.q_net.0.weight": hidden.astype(np.float32),
        "q_net.q_net.0.bias": np.zeros(8, np.float32),
        "q_net.q_net.2.weight": np.stack([np.zeros(8), difference]).astype(np.float32) + np.float32(1),
        "q_net.q_net.2.bias": np.full(2, 50, np.float32),
    }
    return agents.save(path, tensors, agents.box(np.full(4, -1), np.full(4, 1)), agents.discrete(2))


def test_an_agent_is_calibrated_judged_and_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, output = balancer(tmp_path / "agent.zip"), tmp_path / "out.tflite"
    command = ["quantize", str(path), "--env", "CartPole-v1", "-o", str(output), "--episodes", "10", "--json"]
    code = main.main([*command, "--calibration-episodes", "8"])
    said = capfd.readouterr()
    assert code == errors.EXIT_OK, said.err
    report = json.loads(said.out)
    assert json.loads(output.with_suffix(".json").read_text()) == report
    assert report["passed"] and report["source"] == "SB3 DQN"
    assert report["rows"]["split"] == "episodes" and report["rows"]["judged"] == report["rows"]["calibration"] / 3
    assert report["returns"]["fp32"] == 500 and report["returns"]["low"] >= -0.05 * 500
    assert report["returns"]["random"] < 50 and report["returns"]["episodes"] == 10
    assert report["candidates"]["recipe"]["agreement"] > 0.9
    took = report["seconds"]
    assert 0 < took["episodes"] < took["total"] and took["distil"] == 0


def test_a_policy_that_loses_is_inferior_and_more_episodes_are_not_asked_for(tmp_path: Path) -> None:
    files = []
    for name, sign in (("good", 1.0), ("bad", -1.0)):
        agent = recipe.ChainSubject(sb3.read(balancer(tmp_path / f"{name}.zip", sign)))
        files.append(tmp_path / f"{name}.tflite")
        files[-1].write_bytes(agent.float32())
    verdict = returns.judge(files[0], files[1], play.Task("CartPole-v1"), 10, 0, "q_values")
    assert not verdict.passed
    assert verdict.episodes == 10 and verdict.fp32 == 500 and verdict.compared.high < -400
    assert returns.judge(files[0], files[0], play.Task("CartPole-v1"), 10, 0, "q_values").passed


@pytest.mark.parametrize(
    ("low", "high", "undecided"), [(-60.0, 10.0, True), (-60.0, -30.0, False), (-20.0, 5.0, False)]
)
def test_who_is_refused_for_want_of_episodes_is_told_so(
    tmp_path: Path, low: float, high: float, undecided: bool
) -> None:
    """5 % of 520 - 20 may be lost, so 25."""
    path = balancer(tmp_path / "agent.zip")
    own: dict[str, Any] = {"model": path, "calibration": None, "output": tmp_path / "out.tflite", "precision": "int8"}
    own |= {"outputs": None, "aware": False, "steps": 1, "seed": 0, "force": False, "verbose": False}
    request = requests.Request(**own, env="CartPole-v1", episodes=50)
    compared = compare.Returns(500.0, (low + high) / 2, low, high, low / 500, low >= -25)
    played = returns.Verdict(400, 520.0, 20.0, compared, "", "")
    assert played.is_undecided is undecided
    subject = recipe.ChainSubject(sb3.read(path))
    made = command._Candidate(
        "recipe", subject.make(np.eye(4, dtype=np.float32), "int8"), gate.Verdict(True, ""), {}, 0.0
    )
    assert ("--episodes 200 may decide it" in command._refusal(request, subject, made, played).todo) is undecided


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            ["--env", "Acrobot-v1"],
            errors.SpecError.exit_code,
            "maps [4] to 2 values, and Acrobot-v1 has obs float32[6]",
        ),
        (["--env", "Pendulum-v1"], errors.SpecError.exit_code, "to do: name the environment"),
        (["--env", "NoSuchThing-v1"], errors.EnvironmentFailure.exit_code, "NoSuchThing"),
        ([], errors.ConfigError.exit_code, "from --calibration OBS.npz or from --env ID"),
        (["--env", "CartPole-v1", "--episodes", "3"], errors.ConfigError.exit_code, "at least 10"),
        (["--env", "CartPole-v1", "--action-low", "1"], errors.ConfigError.exit_code, "go together"),
    ],
)
def test_what_does_not_fit_is_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], code: int, message: str
) -> None:
    path = balancer(tmp_path / "agent.zip")
    assert main.main(["quantize", str(path), "-o", str(tmp_path / "out.tflite"), *flags]) == code
    error = capfd.readouterr().err
    assert message in error and error.count("error:") == 1
    assert not list(tmp_path.glob("out*"))
