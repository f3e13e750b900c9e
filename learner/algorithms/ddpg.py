"""DDPG: a deterministic policy that climbs the critic's gradient; targets follow slowly.

Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971, with n-step returns. Deviations: Gaussian or correlated noise
(the actor's, `noise_*`), both learning rates and the targets' rate as in today's implementations, gradients of a
clipped global norm, no weight decay, no batch normalisation (observations are normalised once), the action enters the
critic at its first layer, and the policy pays for what int8 would round (`actor_critic`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from broker.contract import specs
from learner import config
from learner.algorithms import compiled
from learner.networks import actor_critic, layers, optimizer
from learner.networks.losses import value_learning

Tensor = Any  # TensorFlow ships no types


class Ddpg(compiled.Compiled):
    """Learns a deterministic policy and its action values from replay.

    Args:
        spec: Fixes the networks' inputs and outputs.
        settings: See config.DdpgConfig.
        seed: Determines the initial weights; nothing else here is random.
    """

    name = "ddpg"
    head: specs.Head = "deterministic"
    METRICS = ("loss", "q_mean", "grad_norm", "td_abs_mean", "actor_grad_norm", "action_abs_mean")

    @staticmethod
    def check(spec: specs.EnvSpec) -> None:
        """Raises SpecError unless actions are continuous."""
        actor_critic.check("DDPG", spec)

    def __init__(self, spec: specs.EnvSpec, settings: config.DdpgConfig, seed: int) -> None:
        self.check(spec)
        self._settings = settings
        rng = np.random.default_rng(seed)
        self._network = actor_critic.ActorCritic.build(
            spec, settings.hidden, settings.critic_hidden, 1, rng, settings.network
        )
        super().__init__(spec, compiled.with_adam(self._network.initial()), settings.normalizer_floor)

    def _gradient_step(
        self, state: compiled.Groups, updates: Tensor, batch: compiled.Minibatch
    ) -> tuple[compiled.Groups, Sequence[Tensor], Tensor]:
        """Takes one step of Adam for the critic and one for the actor, both from the weights before."""
        settings, net = self._settings, self._network
        actor, critic = net.split(state["weights"])
        target_actor, target_critic = net.split(state["targets"])

        q_t = net.critic(target_critic, batch.bootstrap, net.act(target_actor, batch.bootstrap))[:, 0]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(critic)
            q_tm1 = net.critic(critic, batch.observation, net.bounded(batch.action))[:, 0]
            td_error = value_learning.value_error(q_tm1, batch.reward, batch.discount, q_t)
            loss = tf.reduce_mean(batch.weight * 0.5 * tf.square(td_error))
        critic_gradients, grad_norm = optimizer.clipped(tape.gradient(loss, critic), settings.max_grad_norm)

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(actor)
            pre_tanh = net.pre_tanh(actor, batch.observation)
            action = tf.tanh(pre_tanh)
            value = net.critic(critic, batch.observation, action)[:, 0]
            cost = settings.action_cost * tf.reduce_mean(tf.reduce_sum(tf.square(pre_tanh), axis=1))
            cost += net.rounding_cost(settings.rounding_cost, actor, batch.observation, action, value)
            descent = cost - tf.reduce_mean(value)
        actor_gradients, actor_norm = optimizer.clipped(tape.gradient(descent, actor), settings.max_grad_norm)

        weights, moments1, moments2 = optimizer.adam_pair(
            (actor, critic),
            (actor_gradients, critic_gradients),
            net.split(state["adam_m"]),
            net.split(state["adam_v"]),
            updates,
            (settings.learning_rate, settings.critic_learning_rate),
        )
        rate = settings.target_rate
        targets = [target + rate * (w - target) for w, target in zip(weights, state["targets"], strict=True)]

        metrics = (
            loss, tf.reduce_mean(value), grad_norm, tf.reduce_mean(tf.abs(td_error)),
            actor_norm, tf.reduce_mean(tf.abs(action)),
        )  # fmt: skip
        return {"weights": weights, "targets": targets, "adam_m": moments1, "adam_v": moments2}, metrics, td_error

    def policy_layers(self) -> layers.PolicyLayers:
        """Returns the actor, from raw observations to actions within the environment's bounds."""
        return self._network.policy_layers([w.numpy() for w in self._groups["weights"]], self.normalizer)
