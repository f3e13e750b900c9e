"""PPO: several epochs on each phase, with the ratio of probabilities clipped; generalized advantages.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of its first implementation that CleanRL and
Stable-Baselines3 keep: advantages normalised (here over a phase), values clipped, small last layers. The ratio is that
of the fp32 policy's probabilities to those that the int8 policy on the actor gave, so that rounding is corrected like
any other difference between the two; a phase may have steps of a few versions (`max_rollout_lag`). A minibatch on which
the policy has left the acting one by more than `max_kl` has the divergence alone for its loss: the references stop the
phase there, if asked to (`target_kl`), and clipping does not hold a policy whose deviation is small. Deviations: policy
and value network have gradients clipped and step sizes of their own, Adam's epsilon is 1e-8, weights have He's scale
instead of being orthogonal, the policy's layers are ReLU unless `activation` says tanh, and values are in units of
their root mean square instead of rewards being scaled (`on_policy`).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from broker.contract import specs
from learner import config
from learner.algorithms import on_policy
from learner.networks.losses import policy_gradient

Tensor = Any  # TensorFlow ships no types


class Ppo(on_policy.OnPolicy):
    """Learns a policy that samples, by proximal steps; see `on_policy.OnPolicy`."""

    name = "ppo"

    def __init__(self, spec: specs.EnvSpec, settings: config.PpoConfig, seed: int) -> None:
        self._clip, self._value_clip, self._max_kl = settings.clip, settings.value_clip, settings.max_kl
        super().__init__(spec, settings, seed)

    def _policy_loss(self, log_pi: Tensor, batch: on_policy.Minibatch) -> tuple[Tensor, Tensor]:
        ratio = policy_gradient.ratio(log_pi, batch.log_mu)
        clipped = tf.reduce_mean(tf.cast(tf.abs(ratio - 1) > self._clip, tf.float32))
        loss = -policy_gradient.clipped_surrogate(ratio, batch.advantage, self._clip)
        if self._max_kl:
            divergence = policy_gradient.divergence(log_pi, batch.log_mu)
            loss = tf.where(tf.reduce_mean(divergence) > self._max_kl, divergence, loss)
        return loss, clipped

    def _value_loss(self, value: Tensor, batch: on_policy.Minibatch) -> Tensor:
        return policy_gradient.clipped_value_loss(value, batch.value, batch.target, self._value_clip)
