"""tasks.toml holds only settings that exist, and says when a task is solved."""

from __future__ import annotations

import argparse

import pytest

from broker import settings
from learner import config, tasks

CONFIGS = (config.TrainConfig, config.DqnConfig, config.GateConfig)


def effective(env_id: str) -> config.Settings:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, *CONFIGS)
    tables = [("tasks.toml", tasks.settings(env_id))]
    values = settings.resolve(CONFIGS, parser.parse_args([]), tables=tables, env_prefix="ACTORQ_TEST_")
    train, algorithm, gate = CONFIGS
    return config.check(
        config.Settings(settings.build(train, values), settings.build(algorithm, values), settings.build(gate, values))
    )


@pytest.mark.parametrize(
    ("env_id", "solved"),
    [("CartPole-v1", 475.0), ("Acrobot-v1", -100.0), ("MountainCar-v0", -110.0), ("LunarLander-v3", 200.0)],
)
def test_tuned_tasks_are_valid(env_id: str, solved: float) -> None:
    train = effective(env_id).train
    assert solved <= train.solved_return < float("inf")
    assert train.max_env_steps > train.learning_starts


def test_an_unknown_task_trains_on_the_defaults() -> None:
    assert effective("SomeoneElses-v3") == config.Settings(
        config.TrainConfig(), config.DqnConfig(), config.GateConfig()
    )
