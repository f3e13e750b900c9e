"""DQN: double, dueling, n-step, Huber, hard target updates, Adam with a clipped global norm.

Mnih et al. 2015 with van Hasselt et al. 2016 (double), Wang et al. 2016 (dueling), Hessel et al. 2018 (n-step) and
Schaul et al. 2016 (importance weights). Deviations: Huber loss instead of clipped rewards, Adam instead of RMSProp, and
gradients through the dueling streams are not rescaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from broker.contract import errors, specs
from learner import config
from learner.algorithms import compiled
from learner.networks import layers, networks, optimizer
from learner.networks.losses import value_learning

Tensor = Any  # TensorFlow ships no types


class Dqn(compiled.Compiled):
    """Learns action values from replay.

    Args:
        spec: Fixes the network's inputs and outputs.
        settings: See config.DqnConfig.
        seed: Determines the initial weights; nothing else here is random.
    """

    name = "dqn"
    head: specs.Head = "q_values"
    METRICS = ("loss", "q_mean", "grad_norm", "td_abs_mean")

    @staticmethod
    def check(spec: specs.EnvSpec) -> None:
        """Raises SpecError unless actions are discrete."""
        if spec.action.kind != "discrete":
            raise errors.SpecError(
                f"DQN chooses among discrete actions, and this environment takes {spec.action.kind} ones",
                where=spec.describe(),
                todo="--algorithm d4pg or ddpg learns continuous actions, ppo or a2c several choices at once",
            )

    def __init__(self, spec: specs.EnvSpec, settings: config.DqnConfig, seed: int) -> None:
        self.check(spec)
        self._settings = settings
        rng = np.random.default_rng(seed)
        self._network = networks.QNetwork.build(spec, settings.hidden, settings.dueling, rng, settings.network)
        super().__init__(spec, compiled.with_adam(self._network.initial()), settings.normalizer_floor)

    def _gradient_step(
        self, state: compiled.Groups, updates: Tensor, batch: compiled.Minibatch
    ) -> tuple[compiled.Groups, Sequence[Tensor], Tensor]:
        """Takes one step of Adam on the Huber loss."""
        settings, q_values = self._settings, self._network.q_values
        weights, targets = state["weights"], state["targets"]

        q_t_value = q_values(targets, batch.bootstrap)
        q_t_selector = q_values(weights, batch.bootstrap) if settings.double else q_t_value
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            q_tm1 = q_values(weights, batch.observation)
            td_error = value_learning.q_learning(
                q_tm1, batch.action, batch.reward, batch.discount, q_t_value, q_t_selector
            )
            loss = tf.reduce_mean(batch.weight * value_learning.huber(td_error, settings.huber_delta))
        gradients, grad_norm = optimizer.clipped(tape.gradient(loss, weights), settings.max_grad_norm)

        weights, moments1, moments2 = optimizer.adam(
            weights, gradients, state["adam_m"], state["adam_v"], updates, settings.learning_rate
        )
        refresh = tf.equal(updates % settings.target_period, 0)
        targets = [tf.where(refresh, w, target) for w, target in zip(weights, targets, strict=True)]

        metrics = (loss, tf.reduce_mean(q_tm1), grad_norm, tf.reduce_mean(tf.abs(td_error)))
        return {"weights": weights, "targets": targets, "adam_m": moments1, "adam_v": moments2}, metrics, td_error

    def policy_layers(self) -> layers.PolicyLayers:
        """Returns the policy from raw observations to advantages with mean 0: same greedy action as Q-values."""
        return self._network.policy_layers([w.numpy() for w in self._groups["weights"]], self.normalizer)
