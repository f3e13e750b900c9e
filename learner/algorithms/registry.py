"""Algorithms by the name that `--algorithm` takes; config.ALGORITHMS has their settings under the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from broker import specs
from learner import config
from learner.algorithms import Algorithm, d4pg, ddpg, dqn

_MAKERS: dict[str, Callable[[specs.EnvSpec, Any, int], Algorithm]] = {
    "dqn": dqn.Dqn,
    "ddpg": ddpg.Ddpg,
    "d4pg": d4pg.D4pg,
}


def make(settings: config.Settings, spec: specs.EnvSpec) -> Algorithm:
    """The algorithm that the settings name, with initial weights.

    Raises:
        SpecError: It cannot learn in such an environment.
    """
    return _MAKERS[settings.train.algorithm](spec, settings.algorithm, settings.train.seed)
