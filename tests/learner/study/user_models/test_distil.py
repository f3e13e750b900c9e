"""`actorq-learner quantize --distil`: students of a policy that was trained on CartPole, judged by actors that play."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import errors
from learner import __main__ as main
from learner.quantize.distil import dagger, training
from learner.quantize.tflite import template
from learner.study.user_models import distilled
from tests.learner.study.user_models import agents

TEACHER = Path(__file__).with_name("cartpole_dqn.npz")
"""float16 weights of a DQN that `actorq-learner demo` trained, two hidden layers of 32 units."""


def agent(path: Path) -> Path:
    """That DQN as an agent's file."""
    with np.load(TEACHER) as file:
        tensors: dict[str, NDArray[Any]] = {name: file[name].astype(np.float32) for name in file.files}
    return agents.save(path, tensors, agents.box(np.full(4, -1), np.full(4, 1)), agents.discrete(2))


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return agent(tmp_path / "agent.zip")


def quantize(path: Path, *flags: str) -> int:
    return main.main(["quantize", str(path), "-o", str(path.with_name("out.tflite")), "--json", *flags])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_STEPS", 300)
    monkeypatch.setattr(training, "_STEPS_FRESH", 1000)
    monkeypatch.setattr(dagger, "ROUNDS", 2)


@pytest.mark.system
def test_a_student_ships_where_rounding_does_not(teacher: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--env", "CartPole-v1", "--episodes", "10", "--calibration-episodes", "8", "--weight-bits", "2"]
    assert quantize(teacher, *flags) == errors.PolicyError.exit_code
    refused = capfd.readouterr().err
    assert "(inferior)" in refused and "--distil trains what is left of the weights" in refused
    code = quantize(teacher, *flags, "--distil", "--distil-minutes", "10")
    said = capfd.readouterr()
    assert code == errors.EXIT_OK, said.err
    report = json.loads(said.out)
    assert report["written"] == "distilled" and report["passed"] and report["weight_bits"] == 2
    assert report["returns"]["low_relative"] >= -0.05 and report["returns"]["fp32"] > 400
    assert list(report["candidates"]) == ["compressed", "distilled"]
    told = report["distil"]
    assert told["rounds"] >= 1 and told["judged"] in (1, 2) and told["unseen"] == ""
    assert told["wall_s"] > 0 and told["cpu_s"] > 0
    took = report["seconds"]
    assert took["distil"] == told["wall_s"] and told["judged_s"] < took["episodes"] < took["total"] - took["distil"]
    assert f"distil, round {told['rounds']}" in said.err and "return" in said.err  # progress
    places = template.locate(teacher.with_name("out.tflite").read_bytes(), 3, per_channel=True).layers
    assert all(len(np.unique(np.abs(place.weights[:, :4]))) == 2 for place in places)


@pytest.mark.usefixtures("short")
def test_without_an_environment_the_report_says_what_was_not_seen(
    teacher: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = np.random.default_rng(0).normal(size=(1024, 4)) * [1, 0.5, 0.05, 0.5]
    np.savez(teacher.with_name("rows.npz"), observations=rows.astype(np.float32))
    flags = ["--calibration", str(teacher.with_name("rows.npz")), "--distil", "--hidden", "16", "--prune", "0.25"]
    flags += ["--distil-minutes", "10"]
    code = quantize(teacher, *flags)
    said = capfd.readouterr()
    assert code == errors.EXIT_OK, said.err
    report = json.loads(said.out)
    assert report["written"] == "distilled" and report["returns"] is None
    assert report["distil"]["unseen"] == distilled._UNSEEN and report["distil"]["hidden"] == [16]
    assert report["distil"]["ended"] in ("converged", "rounds") and report["nonzero"] <= 0.8
    assert report["bytes"]["model"] < 6000
    code = quantize(teacher, "--calibration", str(teacher.with_name("rows.npz")), "--force", "--prune", "0.1")
    report = json.loads(capfd.readouterr().out)
    assert code == errors.EXIT_OK and report["written"] == "compressed" and report["distil"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden", "64,64"], "--hidden is the shape of a student"),
        (["--distil-minutes", "1"], "--distil-minutes is for a student"),
        (["--distil", "--distil-minutes", "0"], "must be above 0"),
        (["--distil", "--distil-minutes", "nan"], "must be above 0"),
        (["--distil", "--hidden", "0"], "1 to 8192 units"),
        (["--distil", "--aware"], "--aware trains the policy as it is"),
        (["--prune", "0.5", "--aware"], "and --prune makes another"),
        (["--distil", "--precision", "float16"], "--distil is for int8"),
        (["--weight-bits", "4", "--precision", "dynamic"], "--weight-bits is for int8"),
        (["--weight-bits", "1"], "weights of 1 bits"),
        (["--prune", "1"], "a share of 1"),
    ],
)
def test_what_does_not_go_together_is_one_error(
    teacher: Path, capfd: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert quantize(teacher, "--env", "CartPole-v1", *flags) == errors.ConfigError.exit_code
    error = capfd.readouterr().err
    assert message in error and error.count("error:") == 1
    assert not list(teacher.parent.glob("out*"))


@pytest.mark.usefixtures("short")
def test_a_policy_that_is_no_chain_is_distilled_into_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keras.utils.set_random_seed(1)
    entry = keras.Input((4,))
    x = keras.layers.Dense(16, activation="selu")(entry)
    path = tmp_path / "model.keras"
    keras.Model(entry, keras.layers.Dense(2)(keras.layers.Concatenate()([x, entry]))).save(path)
    np.savez(tmp_path / "rows.npz", observations=np.random.default_rng(0).normal(size=(2048, 4)).astype(np.float32))
    flags = ["--calibration", str(tmp_path / "rows.npz"), "--outputs", "actions"]
    flags += ["--action-low", "-1", "--action-high", "1"]
    assert quantize(path, *flags, "--distil") == errors.ConfigError.exit_code
    assert "--distil --hidden 64,64" in capfd.readouterr().err
    code = quantize(path, *flags, "--distil", "--hidden", "32,32", "--distil-minutes", "10")
    said = capfd.readouterr()
    assert code == errors.EXIT_OK, said.err
    report = json.loads(said.out)
    assert report["candidates"]["distilled"]["action_error_mean"] < 0.02
    assert {operation["name"] for operation in report["operations"]} >= {"FULLY_CONNECTED"}
