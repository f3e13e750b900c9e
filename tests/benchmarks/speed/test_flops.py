"""The operations of an update, by hand and as XLA has them in the program that runs."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from broker.contract import specs
from learner import config
from learner.algorithms import compiled, registry
from tests.benchmarks.speed import _flops

_OBSERVATION = specs.ObservationSpec((5,))
DISCRETE = specs.EnvSpec(_OBSERVATION, specs.ActionSpec("discrete", n=3))
CONTINUOUS = specs.EnvSpec(_OBSERVATION, specs.ActionSpec("continuous", shape=(2,), low=(-1.0,) * 2, high=(1.0,) * 2))
CASES: list[tuple[str, specs.EnvSpec, config.AlgorithmConfig]] = [
    ("dqn", DISCRETE, config.DqnConfig(hidden=(16, 24), dueling=False)),
    ("dqn", DISCRETE, config.DqnConfig(hidden=(16, 24), dueling=False, double=False)),
    ("dqn", DISCRETE, config.DqnConfig(hidden=(16, 24), dueling=True)),
    ("dqn", DISCRETE, config.DqnConfig(hidden=(16,), dueling=True)),
    ("ddpg", CONTINUOUS, config.DdpgConfig(hidden=(16, 24), critic_hidden=(40, 8))),
    ("d4pg", CONTINUOUS, config.D4pgConfig(hidden=(16, 24), critic_hidden=(40, 8))),
    ("sac", CONTINUOUS, config.SacConfig(hidden=(16, 24), critic_hidden=(40, 8))),
]


def test_a_plain_double_dqn_has_five_products_a_layer_but_for_the_first() -> None:
    settings = config.DqnConfig(hidden=(256, 256), dueling=False, double=True, batch_size=64)
    first, second, last = 4 * 256, 256 * 256, 256 * 2
    assert _flops.of_update(settings, 4, 2) == 2 * 64 * (4 * first + 5 * second + 5 * last)


def test_dueling_has_the_second_layer_twice() -> None:
    plain, dueling = (
        _flops.of_update(config.DqnConfig(hidden=(256, 256), dueling=dueling), 4, 2) for dueling in (False, True)
    )
    assert 1.9 < dueling / plain < 2.0


@pytest.mark.parametrize(("name", "spec", "settings"), CASES)
def test_xla_has_as_many_in_the_program(name: str, spec: specs.EnvSpec, settings: config.AlgorithmConfig) -> None:
    chosen = config.Settings(config.TrainConfig(algorithm=name), settings, config.GateConfig())
    agent = registry.make(chosen, spec)
    assert isinstance(agent, compiled.Compiled)
    k, b = 2, settings.batch_size
    action: Any = np.zeros((k, b), np.int32) if name == "dqn" else np.zeros((k, b, 2), np.float32)
    observation, number = np.zeros((k, b, 5), np.float32), np.zeros((k, b), np.float32)
    program = agent._steps.function.experimental_get_compiler_ir(
        observation, action, number, number, observation, number
    )
    found = sum(_products(program(stage="hlo")))
    expected = _flops.of_update(settings, spec.observation.size, spec.action.size)
    # Where the critic's inputs are joined, the gradient of the observations is computed and thrown away; and there are
    # the means of the distributions
    assert expected <= found < 1.06 * expected
    assert name != "dqn" or found == expected


def _products(program: str) -> list[int]:
    """Operations of every dot in an HLO text."""
    found = []
    dot = r"= f32\[([\d,]*)\]\S* dot\(f32\[([\d,]*)\].*?lhs_contracting_dims=\{(\d+)\}"
    for out, left, axis in re.findall(dot, program):
        sizes = [[int(n) for n in dims.split(",") if n] for dims in (out, left)]
        found.append(2 * math.prod(sizes[0]) * sizes[1][int(axis)])
    return found


def test_a_core_multiplies() -> None:
    assert _flops.core_rate() > 1e8
