"""SAC: a stochastic policy that is paid for its entropy, twin critics, and a temperature that finds itself.

Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905. Deviations: all of a step is computed from the weights before it
(there: critics, then the actor, then the temperature), the log of the temperature is what Adam moves, a tanh bounds the
deviation of the Gaussian, gradients are of a clipped global norm, observations are normalised once, the policy pays for
what int8 would round (`actor_critic`), of n steps the entropy of the actions between is left out, and critics may say a
distribution of returns (`atoms`, as in `d4pg`; the twin of the lower mean counts, as in Fast TD3, Seo et al. 2025,
https://arxiv.org/abs/2505.22642).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from broker.contract import specs
from learner import config
from learner.algorithms import compiled
from learner.networks import actor_critic, distributions, layers, optimizer, soft_actor_critic
from learner.networks.losses import value_heads

Tensor = Any  # TensorFlow ships no types
_SEEDS = 1 << 31  # as many as int32 holds


def draw(seed: int, updates: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns two arrays of normal noise that only seed and number of an update decide: a resumed run has the same."""
    first, second = tf.unstack(tf.random.stateless_normal((2, *shape), (seed % _SEEDS, updates)))
    return first, second


class Sac(compiled.Compiled):
    """Learns a squashed Gaussian policy, its soft action values, and how much entropy is worth, from replay.

    Args:
        spec: Fixes the networks' inputs and outputs.
        settings: See config.SacConfig.
        seed: Determines the initial weights, and with the number of an update the actions sampled in it.
    """

    name = "sac"
    head: specs.Head = "squashed_gaussian"
    METRICS = (
        "loss", "q_mean", "grad_norm", "td_abs_mean", "actor_grad_norm", "action_abs_mean", "temperature", "entropy",
        "support_clipped",
    )  # fmt: skip

    @staticmethod
    def check(spec: specs.EnvSpec) -> None:
        """Raises SpecError unless actions are continuous."""
        actor_critic.check("SAC", spec)

    def __init__(self, spec: specs.EnvSpec, settings: config.SacConfig, seed: int) -> None:
        self.check(spec)
        self._settings, self._seed = settings, seed
        self._size = spec.action.size
        self._target_entropy = settings.target_entropy * self._size
        self._head = value_heads.of(settings.value_min, settings.value_max, settings.atoms)
        rng = np.random.default_rng(seed)
        net = self._network = soft_actor_critic.SoftActorCritic.build(
            spec, settings.hidden, settings.critic_hidden, settings.atoms, rng, settings.network
        )
        actor, critics = net.initial_actor(), net.initial_critics()
        self._actors, self._critics = len(actor), len(critics)
        log_temperature = {"log_temperature": np.array(math.log(settings.temperature), np.float32)}
        initial = compiled.with_adam(actor | critics | log_temperature)
        super().__init__(spec, initial | {"targets": critics}, settings.normalizer_floor)

    def _gradient_step(
        self, state: compiled.Groups, updates: Tensor, batch: compiled.Minibatch
    ) -> tuple[compiled.Groups, Sequence[Tensor], Tensor]:
        """Takes one step of Adam for critics, actor and temperature, all from the weights before."""
        settings, net, head = self._settings, self._network, self._head
        actor, critics, log_temperature = self._split(state["weights"])
        temperature = tf.exp(log_temperature)
        normal_tm1, normal_t = draw(self._seed, updates, (*batch.reward.shape, self._size))

        a_t, log_prob_t = distributions.squashed_gaussian_sample(*net.distribution(actor, batch.bootstrap), normal_t)
        reward = batch.reward - batch.discount * temperature * log_prob_t
        after = self._lower(net.critics(state["targets"], batch.bootstrap, a_t))
        target = head.target(reward, batch.discount, after)
        taken = actor_critic.bounded(net.bounds, batch.action)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(critics)
            twins = net.critics(critics, batch.observation, taken)
            loss = tf.add_n([tf.reduce_mean(batch.weight * head.loss(target, outputs)) for outputs in twins])
        critic_gradients, grad_norm = optimizer.clipped(tape.gradient(loss, critics), settings.max_grad_norm)

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(actor)
            mean, log_std = net.distribution(actor, batch.observation)
            action, log_prob = distributions.squashed_gaussian_sample(mean, log_std, normal_tm1)
            value = head.mean(self._lower(net.critics(critics, batch.observation, action)))
            mode = tf.tanh(mean)
            cost = settings.action_cost * tf.reduce_mean(tf.reduce_sum(tf.square(mean), axis=1))
            cost += actor_critic.rounding_cost(
                settings.rounding_cost, lambda some: net.mode_rounded(actor, some), batch.observation, mode, value
            )
            descent = cost + tf.reduce_mean(temperature * log_prob - value)
        actor_gradients, actor_norm = optimizer.clipped(tape.gradient(descent, actor), settings.max_grad_norm)

        entropy = -tf.reduce_mean(log_prob)
        rates = (settings.learning_rate, settings.critic_learning_rate, settings.temperature_learning_rate)
        weights, moments1, moments2 = optimizer.adam(
            state["weights"],
            [*actor_gradients, *critic_gradients, entropy - self._target_entropy],  # of the log of the temperature
            state["adam_m"],
            state["adam_v"],
            updates,
            [rates[0]] * len(actor) + [rates[1]] * len(critics) + [rates[2]],
        )
        rate, (_, critics, _) = settings.target_rate, self._split(weights)
        targets = [target + rate * (w - target) for w, target in zip(critics, state["targets"], strict=True)]

        td_error = tf.add_n([head.mean(target - head.estimate(outputs)) for outputs in twins]) / 2
        metrics = (
            loss, tf.reduce_mean(value), grad_norm, tf.reduce_mean(tf.abs(td_error)),
            actor_norm, tf.reduce_mean(tf.abs(mode)), temperature, entropy,
            head.clipped(reward, batch.discount),
        )  # fmt: skip
        return {"weights": weights, "targets": targets, "adam_m": moments1, "adam_v": moments2}, metrics, td_error

    def _lower(self, twins: Sequence[Tensor]) -> Tensor:
        """Returns the estimate [B, N] of the lower value, of what two critics put out."""
        first, second = map(self._head.estimate, twins)
        return tf.where((self._head.mean(first) < self._head.mean(second))[:, None], first, second)

    def _split(self, weights: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
        """Separates the weights of the actor, those of both critics, and the log of the temperature."""
        first, second = self._actors, self._actors + self._critics
        return list(weights[:first]), list(weights[first:second]), weights[second]

    def policy_layers(self) -> layers.PolicyLayers:
        """Returns the actor, from raw observations to what the head `squashed_gaussian` takes."""
        actor, _, _ = self._split(self._groups["weights"])
        return self._network.policy_layers([w.numpy() for w in actor], self.normalizer)
