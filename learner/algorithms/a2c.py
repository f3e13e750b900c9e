"""A2C: one gradient step a phase, or few, by the advantages of the steps taken; V-trace makes up for who took them.

Mnih et al. 2016, https://arxiv.org/abs/1602.01783, in its synchronous form; its n-step returns are those of V-trace,
Espeholt et al. 2018, https://arxiv.org/abs/1802.01561. For the policy that acted is never the one that learns: it is
int8, and may be a few versions old (`max_rollout_lag`). Deviations: Adam instead of RMSProp, advantages normalised over
a phase, and policy and value network share nothing (`on_policy`).
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from broker.contract import specs
from learner import config
from learner.algorithms import on_policy

Tensor = Any  # TensorFlow ships no types


class A2c(on_policy.OnPolicy):
    """Learns a policy that samples, by its advantages; see `on_policy.OnPolicy`."""

    name = "a2c"

    def __init__(self, spec: specs.EnvSpec, settings: config.A2cConfig, seed: int) -> None:
        self._trace_bounds = settings.rho_bar, settings.c_bar
        super().__init__(spec, settings, seed)

    def _policy_loss(self, log_pi: Tensor, batch: on_policy.Minibatch) -> tuple[Tensor, Tensor]:
        assert self._trace_bounds is not None
        cut = tf.reduce_mean(tf.cast(log_pi - batch.log_mu > math.log(self._trace_bounds[0]), tf.float32))
        return -log_pi * batch.advantage, cut

    def _value_loss(self, value: Tensor, batch: on_policy.Minibatch) -> Tensor:
        return 0.5 * tf.square(value - batch.target)
