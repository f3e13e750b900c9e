"""tasks.toml holds only settings that exist, and says when a task is solved."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors
from broker.program import settings
from learner import __main__ as command_line
from learner import config
from learner.config import tasks


def effective(env_id: str, *flags: str, weakest: dict[str, Any] | None = None, **known: str) -> config.Settings:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    return config.effective(parser.parse_args(flags), env_id, ("a test", weakest or {}), **known)


@pytest.mark.parametrize(
    ("env_id", "algorithms", "solved"),
    [
        ("CartPole-v1", ["dqn", "ppo", "a2c"], 475.0),
        ("Acrobot-v1", ["dqn", "ppo"], -100.0),
        ("MountainCar-v0", ["dqn"], -110.0),
        ("LunarLander-v3", ["dqn", "ppo"], 200.0),
        ("Pendulum-v1", ["d4pg", "ddpg", "sac", "ppo"], -170.0),
        ("MountainCarContinuous-v0", ["ddpg"], 90.0),
        ("LunarLanderContinuous-v3", ["d4pg", "sac"], 200.0),
        ("dm_control/cartpole-balance-v0", ["d4pg"], 950.0),
        ("dm_control/cartpole-swingup-v0", ["d4pg"], 800.0),
        ("dm_control/reacher-easy-v0", ["d4pg"], 900.0),
        ("dm_control/walker-stand-v0", ["d4pg"], 900.0),
        ("BipedalWalker-v3", ["ppo"], 280.0),
        ("HalfCheetah-v5", ["sac"], 5000.0),
        ("MinAtar/Breakout-v1", ["dqn"], 10.0),
        ("MinAtar/SpaceInvaders-v1", ["dqn"], 44.0),
        ("ALE/Pong-v5", ["dqn"], 10.0),
    ],
)
def test_tuned_tasks_are_valid(env_id: str, algorithms: list[str], solved: float) -> None:
    assert effective(env_id).train.algorithm == algorithms[0], "the one that is taken if none is asked for"
    for algorithm in algorithms:
        found = effective(env_id, "--algorithm", algorithm)
        assert type(found.algorithm) is config.ALGORITHMS[algorithm]
        assert tasks.settings(env_id, algorithm) != tasks.settings(env_id)
        assert solved <= found.train.solved_return < float("inf")
        assert found.train.max_env_steps > found.train.learning_starts


def test_an_unknown_task_trains_on_the_defaults() -> None:
    assert effective("SomeoneElses-v3") == config.Settings(
        config.TrainConfig(), config.DqnConfig(), config.GateConfig()
    )
    assert effective("SomeoneElses-v3", "--algorithm", "ddpg").algorithm == config.DdpgConfig()


def test_what_is_tuned_for_one_algorithm_is_not_taken_for_another() -> None:
    assert tasks.settings("CartPole-v1", "dqn")["n_step"] == 10
    assert effective("CartPole-v1", "--algorithm", "d4pg").algorithm == config.D4pgConfig()


def test_while_the_task_is_not_known_no_setting_is_refused_as_another_algorithm_s() -> None:
    assert effective("", "--noise-std", "0.2").train.algorithm == config.AUTO
    tuned = effective("Pendulum-v1", "--noise-std", "0.2").algorithm
    assert isinstance(tuned, config.D4pgConfig)
    assert tuned.noise_std == 0.2
    assert effective("", "--noise-std", "0.2", weakest={"algorithm": "ddpg"}).algorithm.noise.std == 0.2
    with pytest.raises(errors.ConfigError, match="dqn has no --noise-std"):
        effective("", "--noise-std", "0.2", weakest={"algorithm": "dqn"})


def test_settings_of_another_algorithm_and_unknown_algorithms_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="d4pg has no --dueling, --huber-delta"):
        effective("Pendulum-v1", "--no-dueling", "--huber-delta", "1", "--noise-std", "0.2")
    with pytest.raises(errors.ConfigError, match="'sarsa' is unknown") as caught:
        effective("Pendulum-v1", "--algorithm", "sarsa")
    assert "dqn, ddpg, d4pg" in caught.value.todo
    with pytest.raises(errors.ConfigError, match=r"noise_std must be 0 to 1.*cannot lie between value_min"):
        effective("Pendulum-v1", "--noise-std", "2", "--value-min", "5")


def test_what_sac_cannot_do_is_refused() -> None:
    assert effective("", "--algorithm", "sac").algorithm == config.SacConfig(), (
        "its own defaults before the task is known"
    )
    flags = ("--algorithm", "sac", "--epsilon-start", "0.1", "--temperature", "0", "--atoms", "0")
    with pytest.raises(errors.ConfigError, match=r"epsilon must be 0.*temperature must be"):
        effective("SomeoneElses-v3", *flags)
    with pytest.raises(errors.ConfigError, match="sac has no --noise-std"):
        effective("SomeoneElses-v3", "--algorithm", "sac", "--noise-std", "0.1")


@pytest.mark.fault(23)
def test_the_algorithm_follows_from_the_actions_where_none_is_named() -> None:
    assert effective("SomeoneElses-v3", "--atoms", "11", actions="continuous").algorithm == config.D4pgConfig(atoms=11)
    assert effective("SomeoneElses-v3", actions="discrete").train.algorithm == "dqn"
    assert effective("SomeoneElses-v3", actions="multi_discrete").train.algorithm == "ppo"
    assert effective("Pendulum-v1", actions="continuous").train.algorithm == "d4pg", "the tuned one"
    assert effective("MountainCarContinuous-v0").train.algorithm == "ddpg"
    assert effective("CartPole-v1").train.algorithm == "dqn", "tuned for one alone"
    with pytest.raises(errors.ConfigError, match="dqn has no --atoms"):
        effective("SomeoneElses-v3", "--atoms", "11", actions="discrete")


@pytest.mark.fault(23)
def test_a_named_algorithm_must_fit_the_actions() -> None:
    with pytest.raises(errors.ConfigError, match="dqn learns discrete actions, and It-v0 takes continuous") as caught:
        effective("It-v0", "--algorithm", "dqn", actions="continuous")
    assert caught.value.todo == "leave it out, or name ddpg, d4pg, sac, ppo or a2c"
    with pytest.raises(errors.ConfigError, match="dqn learns discrete actions, and It-v0 takes multi_disc") as caught:
        effective("It-v0", "--algorithm", "dqn", actions="multi_discrete")
    assert caught.value.todo == "leave it out, or name ppo or a2c"


@pytest.mark.parametrize("name", ["ddpg", "sac"])
def test_a_run_that_goes_on_keeps_its_algorithm_where_another_is_tuned(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = effective("Pendulum-v1", "--algorithm", name, "--env", "Pendulum-v1", "--hidden", "8")
    (tmp_path / "config.toml").write_text(settings.dump(*chosen))
    assert command_line.main(["train", "--resume", str(tmp_path), "--dump-config", "--seed", "5"]) == errors.EXIT_OK
    resumed = tomllib.loads(capsys.readouterr().out)
    assert (resumed["algorithm"], resumed["hidden"], resumed["seed"]) == (name, [8], 5)
    assert resumed["target_rate"] == 0.005


@pytest.mark.fault(28)
def test_who_names_the_first_steps_means_them() -> None:
    assert effective("SomeoneElses-v3").train.learning_starts_s > 0
    assert effective("CartPole-v1", actions="discrete").train.learning_starts_s > 0, "tuned for a fast one"
    named = ("--learning-starts", "500")
    assert effective("SomeoneElses-v3", *named, actions="discrete").train.learning_starts_s == 0
    assert effective("SomeoneElses-v3", *named).train.learning_starts_s == 0
    assert effective("CartPole-v1", *named, "--learning-starts-s", "9").train.learning_starts_s == 9


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_what_learns_any_actions_is_taken_where_it_is_named_alone(actions: str) -> None:
    assert effective("It-v0", "--algorithm", "ppo", actions=actions).algorithm == config.PpoConfig()
    assert effective("It-v0", "--algorithm", "a2c", "--rho-bar", "2", actions=actions).train.algorithm == "a2c"
    assert effective("CartPole-v1", "--algorithm", "ppo").train.solved_return == 475.0
    with pytest.raises(errors.ConfigError, match="ppo has no --epsilon-start, --samples-per-insert"):
        effective("It-v0", "--algorithm", "ppo", "--samples-per-insert", "2", "--epsilon-start", "1", actions=actions)


def test_phases_that_cannot_be_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match=r"rollout_steps 100 is no multiple.*kept_steps 1100 is less than"):
        effective("It-v0", "--algorithm", "ppo", "--rollout-steps", "100", "--kept-steps", "1100")
    with pytest.raises(errors.ConfigError, match="epochs must be positive"):
        effective("It-v0", "--algorithm", "a2c", "--epochs", "0")
    with pytest.raises(errors.ConfigError, match="max_kl -1.0 not negative"):
        effective("It-v0", "--algorithm", "ppo", "--max-kl", "-1")
    with pytest.raises(errors.ConfigError, match="activation 'gelu' is unknown; use one of relu, tanh"):
        effective("It-v0", "--algorithm", "ppo", "--activation", "gelu")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--canary", "1", "--actors", "2"), "canary must be from 0 to below 1"),
        (("--canary", "-0.1", "--actors", "2"), "canary must be from 0 to below 1"),
        (("--canary", "0.5"), "actors must be 2 at least, not 1"),
        (("--canary", "0.5", "--deterministic"), "trials need two"),
        (("--canary", "0.5", "--actors", "2", "--algorithm", "ppo"), "learns from its newest policy alone"),
        (("--canary", "0.5", "--actors", "2", "--policy-expire-s", "60"), "policy_expire_s must be 0 with canary"),
    ],
)
def test_where_no_policy_can_be_tried_that_is_said(flags: tuple[str, ...], why: str) -> None:
    assert effective("CartPole-v1", "--canary", "0.5", "--actors", "2").train.canary == 0.5
    with pytest.raises(errors.ConfigError, match=why):
        effective("CartPole-v1", *flags)
