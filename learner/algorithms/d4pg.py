"""D4PG: a deterministic policy, a critic of the whole distribution of returns, n-step targets.

Barth-Maron et al. 2018, https://arxiv.org/abs/1804.08617, with the categorical critic of Bellemare et al. 2017; the
settings are Acme's (51 atoms, n-step 5, targets copied every 100 updates), which ActorQ used. Deviations: widths,
learning rates and support by task, Gaussian or correlated noise with a ladder over the fleet (the actor's, `noise_*`),
no layer normalisation (it does not become int8), the action enters the critic at its first layer, and the policy pays
for what int8 would round (`actor_critic`).
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
from learner.networks.losses import value_heads

Tensor = Any  # TensorFlow ships no types


class D4pg(compiled.Compiled):
    """Learns a deterministic policy and the distribution of its returns from replay.

    Args:
        spec: Fixes the networks' inputs and outputs.
        settings: See config.D4pgConfig.
        seed: Determines the initial weights; nothing else here is random.
    """

    name = "d4pg"
    head: specs.Head = "deterministic"
    METRICS = (
        "loss", "q_mean", "grad_norm", "td_abs_mean", "actor_grad_norm", "action_abs_mean", "support_clipped",
    )  # fmt: skip

    @staticmethod
    def check(spec: specs.EnvSpec) -> None:
        """Raises SpecError unless actions are continuous."""
        actor_critic.check("D4PG", spec)

    def __init__(self, spec: specs.EnvSpec, settings: config.D4pgConfig, seed: int) -> None:
        self.check(spec)
        self._settings = settings
        self._head = value_heads.Categorical(settings.value_min, settings.value_max, settings.atoms)
        rng = np.random.default_rng(seed)
        self._network = actor_critic.ActorCritic.build(
            spec, settings.hidden, settings.critic_hidden, settings.atoms, rng, settings.network
        )
        super().__init__(spec, compiled.with_adam(self._network.initial()), settings.normalizer_floor)

    def _gradient_step(
        self, state: compiled.Groups, updates: Tensor, batch: compiled.Minibatch
    ) -> tuple[compiled.Groups, Sequence[Tensor], Tensor]:
        """Takes one step of Adam for the critic and one for the actor, both from the weights before."""
        settings, net, head = self._settings, self._network, self._head
        actor, critic = net.split(state["weights"])
        target_actor, target_critic = net.split(state["targets"])

        logits_t = net.critic(target_critic, batch.bootstrap, net.act(target_actor, batch.bootstrap))
        target = head.target(batch.reward, batch.discount, head.estimate(logits_t))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(critic)
            logits_tm1 = net.critic(critic, batch.observation, net.bounded(batch.action))
            loss = tf.reduce_mean(batch.weight * head.loss(target, logits_tm1))
        critic_gradients, grad_norm = optimizer.clipped(tape.gradient(loss, critic), settings.max_grad_norm)
        td_error = head.mean(target - head.estimate(logits_tm1))

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(actor)
            pre_tanh = net.pre_tanh(actor, batch.observation)
            action = tf.tanh(pre_tanh)
            value = head.mean(head.estimate(net.critic(critic, batch.observation, action)))
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
        refresh = tf.equal(updates % settings.target_period, 0)
        targets = [tf.where(refresh, w, target) for w, target in zip(weights, state["targets"], strict=True)]

        metrics = (
            loss, tf.reduce_mean(value), grad_norm, tf.reduce_mean(tf.abs(td_error)),
            actor_norm, tf.reduce_mean(tf.abs(action)), head.clipped(batch.reward, batch.discount),
        )  # fmt: skip
        return {"weights": weights, "targets": targets, "adam_m": moments1, "adam_v": moments2}, metrics, td_error

    def policy_layers(self) -> layers.PolicyLayers:
        """Returns the actor, from raw observations to actions within the environment's bounds."""
        return self._network.policy_layers([w.numpy() for w in self._groups["weights"]], self.normalizer)
