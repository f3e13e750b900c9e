"""What a study is asked for, and which policies it finds under which names."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from broker.contract import errors
from learner.study.sweep import arguments, columns, plan, policies


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add(parser)
    return parser.parse_args(words)


def asked(*words: str) -> plan.Request:
    return plan.Request(**arguments.given(parsed(*words)))


def test_flags_become_a_request(tmp_path: Path) -> None:
    found = asked(
        "--policies", str(tmp_path), "--bits", "2..4", "--aware-bits", "none", "--precisions", "fp32,int8-plain"
    )
    assert (found.bits, found.aware_bits, found.precisions) == ((2, 3, 4), (), ("int8-plain",))
    assert found.columns == ("random", "fp32", "int8-plain", "w2", "w3", "w4")
    assert asked("--bits", "8,4,4").bits == (4, 8)
    assert asked("--distil-rounds", "5").distil_rounds == 5
    assert plan.bits_of("w4-aware") == (4, True) and plan.bits_of("w2") == (2, False) and plan.bits_of("fp16") is None
    assert arguments.given(parsed("--resume", "x")) == {}
    plan.check(found)


def test_every_precision_has_its_maker() -> None:
    assert tuple(columns.MAKERS) == plan.PRECISIONS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precisions": ("int9",)}, "precision 'int9' is unknown: there are fp16"),
        ({"bits": (1, 9)}, "weights of 1 bits are not offered.*weights of 9 bits"),
        ({"episodes": 1}, "--episodes must be at least 2, not 1"),
        ({"distil_rounds": 0}, "--distil-rounds must be at least 1, not 0"),
        ({"calibration_episodes": 3}, "--calibration-episodes must be at least 4"),
        ({"precisions": (), "bits": (), "aware_bits": ()}, "nothing to compare"),
        ({"env_kwargs": "[]"}, "no JSON object"),
        ({"env_kwargs": "{"}, "is no JSON"),
    ],
)
def test_what_makes_no_study_is_said(changes: dict[str, object], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        plan.check(dataclasses.replace(plan.Request(), **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to study"),
        (("--policies", "x", "--jobs", "0"), "--jobs"),
        (("--resume", "x", "-o", "y"), "two places"),
        (("--policies", "x", "--retry-failed"), "goes with --resume"),
    ],
)
def test_what_cannot_be_met_is_said(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        arguments.check(parsed(*words))


def test_policies_are_found_and_told_apart(tmp_path: Path) -> None:
    files = (
        "dqn-CartPole-v1.zip",
        "PPO-LunarLanderContinuous-v3.onnx",
        "dqn/CartPole-v1_1/CartPole-v1.zip",
        "deep/er/model.keras",
        "a2c-Pendulum-v1/saved_model.pb",
        "run/config.toml",
        "run/checkpoints/1",
        "run/policies/v1.zip",  # within a run nothing is a policy of its own
        "notes.txt",
        ".hidden/dqn-CartPole-v1.zip",
    )
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('algorithm = "d4pg"' if name.endswith("toml") else name)
    found = {entry.name: (entry.kind, entry.algorithm, entry.env) for entry in policies.find([str(tmp_path)], "")}
    assert found == {
        "PPO-LunarLanderContinuous-v3.onnx": (".onnx", "ppo", "LunarLanderContinuous-v3"),
        "a2c-Pendulum-v1": ("SavedModel", "a2c", "Pendulum-v1"),
        "deep/er/model.keras": (".keras", "", ""),
        "dqn-CartPole-v1.zip": (".zip", "dqn", "CartPole-v1"),
        "dqn/CartPole-v1_1/CartPole-v1.zip": (".zip", "dqn", "CartPole-v1"),
        "run": ("run", "d4pg", ""),
    }
    assert {entry.env for entry in policies.find([str(tmp_path)], "Acrobot-v1")} == {"Acrobot-v1"}
    twice = policies.find([str(tmp_path / "dqn-CartPole-v1.zip"), str(tmp_path / ".hidden")], "")
    assert len({entry.name for entry in twice}) == len({entry.path for entry in twice}) == 2


def test_nothing_to_study_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="there is no policy"):
        policies.find([str(tmp_path)], "")
    with pytest.raises(errors.ConfigError, match="no such file"):
        policies.find([str(tmp_path / "missing")], "")
