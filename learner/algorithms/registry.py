"""Makes the algorithm that belongs to settings; config.ALGORITHMS has settings by the names of `--algorithm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from broker.contract import specs
from learner import config
from learner.algorithms import Algorithm, a2c, d4pg, ddpg, dqn, ppo, sac

_MAKERS: dict[type[config.AlgorithmConfig], Callable[[specs.EnvSpec, Any, int], Algorithm]] = {
    config.DqnConfig: dqn.Dqn,
    config.DdpgConfig: ddpg.Ddpg,
    config.D4pgConfig: d4pg.D4pg,
    config.SacConfig: sac.Sac,
    config.PpoConfig: ppo.Ppo,
    config.A2cConfig: a2c.A2c,
}


def make(settings: config.Settings, spec: specs.EnvSpec) -> Algorithm:
    """Makes the algorithm that the settings name, with initial weights.

    Raises:
        SpecError: It cannot learn in such an environment.
    """
    return _MAKERS[type(settings.algorithm)](spec, settings.algorithm, settings.train.seed)
