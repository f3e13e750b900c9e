"""The common base of PPO and A2C: what happens once a phase, around the gradient steps.

1. The normaliser takes in the phase's observations. It is folded into every policy that goes out (`layers.absorb`), so
   that it may go on moving; what the acting policy was is told by the log-probabilities alone.
2. Values and log-probabilities of the phase's steps, by the weights as they are now.
3. Advantages and targets (`policy_gradient`), in the rewards' unit.
4. Advantages are normalised over the phase. Targets are divided by their root mean square over all phases; when that
   changes, the value network's last layer is rescaled, so that it says what it said before (van Hasselt et al. 2016,
   https://arxiv.org/abs/1602.07714, the scale alone).
5. Gradient steps, K in one call (`compiled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import specs
from learner import algorithms, config
from learner.algorithms import compiled
from learner.experience import rollouts
from learner.networks import layers, networks, optimizer, policy_gradient, policy_value

Tensor = Any  # TensorFlow ships no types
_RATE_END = 0.1
"""The share of the step sizes that is left after `decay_updates`."""


class Minibatch(NamedTuple):
    """B steps of a phase, with normalised observations."""

    observation: Tensor  # [B, features], or [B, height, width, channels]
    action: Tensor  # [B] int32, or [B, *shape] float32
    log_mu: Tensor  # [B], by the policy that acted
    advantage: Tensor  # [B]
    target: Tensor  # [B], of the value, in units of `_value_scale`
    value: Tensor  # [B], at the phase's start, in the same units


class OnPolicy(compiled.Compiled):
    """An algorithm that samples its actions, without its advantages and its loss.

    Args:
        spec: Fixes the networks' inputs and outputs.
        settings: What all such algorithms have.
        seed: Determines the initial weights; nothing else here is random.
    """

    METRICS = (
        "loss", "q_mean", "grad_norm", "td_abs_mean", "actor_grad_norm", "entropy", "ratio_clipped", "kl_from_acting",
    )  # fmt: skip

    @staticmethod
    def check(spec: specs.EnvSpec) -> None:
        """Any actions will do."""

    def __init__(self, spec: specs.EnvSpec, settings: config.OnPolicyConfig, seed: int) -> None:
        self._settings = settings
        self.head = settings.head(spec.action)
        self._network = policy_value.PolicyValue.build(
            spec,
            settings.hidden,
            settings.value_hidden,
            settings.initial_std,
            np.random.default_rng(seed),
            settings.network,
        )
        initial = self._network.initial()
        zeros = {name: np.zeros_like(array) for name, array in initial.items()}
        super().__init__(spec, {"weights": initial, "adam_m": zeros, "adam_v": zeros}, settings.normalizer_floor)
        width = 1 if networks.is_image(spec.observation) else spec.observation.size
        # Count, means and variances of observations; count and mean square of value targets
        self._observed = tf.Variable(np.zeros(1 + 2 * width), trainable=False, name="seen/observations")
        self._targeted = tf.Variable(np.zeros(2), trainable=False, name="seen/targets")
        observation, action = spec.observation, spec.action
        self._looked = tf.function(  # not by XLA, which compiles each number of pieces anew
            self._look,
            autograph=False,
            input_signature=(
                tf.TensorSpec((None, *observation.shape), observation.dtype),
                tf.TensorSpec((None,), tf.int64),
                tf.TensorSpec((None, *action.shape), tf.int32 if action.kind == "discrete" else tf.float32),
            ),
        )

    def normalize(self, observations: NDArray[Any]) -> None:
        """Sets the input normaliser by the first observations [N, *shape]; each phase's are added to them."""
        if self._spec.observation.dtype == "uint8":
            return
        seen = self._observed.numpy()
        count, mean, variance = seen[0], *np.split(seen[1:], 2)
        flat = observations.reshape(len(observations), -1).astype(np.float64)
        total, shift = count + len(flat), flat.mean(0) - mean
        variance = (count * variance + len(flat) * flat.var(0) + count * len(flat) / total * shift**2) / total
        mean = mean + shift * len(flat) / total
        self._observed.assign(np.concatenate([[total], mean, variance]))
        gain = 1 / np.maximum(np.sqrt(variance), self._normalizer_floor)
        self._gain.assign(gain.astype(np.float32))
        self._offset.assign((-mean * gain).astype(np.float32))

    def update(self, batch: rollouts.Phase) -> algorithms.Update:
        """Takes the gradient steps of a phase."""
        self.normalize(batch.observation)
        outputs, log_pi = (a.numpy() for a in self._looked(batch.observation, batch.at, batch.action))
        values = outputs * self._value_scale
        v_tm1, v_t = values[batch.at], values[batch.at + 1]
        found = self._estimates(batch, v_tm1, v_t, log_pi - batch.log_prob)
        scale = self._rescale_values(found.target)
        advantage = policy_gradient.normalized(found.advantage, float(self._settings.advantage_floor * scale))
        steps = batch.minibatches
        return self._take_steps(
            batch.observation[batch.at[steps]],
            batch.action[steps],
            batch.log_prob[steps],
            advantage[steps],
            (found.target / scale)[steps],
            (v_tm1 / scale)[steps],
        )

    def _estimates(
        self,
        batch: rollouts.Phase,
        v_tm1: NDArray[np.float32],
        v_t: NDArray[np.float32],
        log_rho: NDArray[np.float32],
    ) -> policy_gradient.Estimates:
        """Returns advantages and value targets of a phase.

        Args:
            batch: The phase.
            v_tm1: Values of what its steps start from [N], in the rewards' unit.
            v_t: Values of what they come to [N].
            log_rho: log pi - log mu of their actions [N].
        """
        raise NotImplementedError

    def _policy_loss(self, log_pi: Tensor, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """Returns the loss [B] of the policy without its entropy, and the share of steps that a bound holds back."""
        raise NotImplementedError

    def _value_loss(self, value: Tensor, batch: Minibatch) -> Tensor:
        """Returns the loss [B] of the value network."""
        raise NotImplementedError

    def _gradient_step(
        self, state: compiled.Groups, updates: Tensor, batch: Minibatch
    ) -> tuple[compiled.Groups, Sequence[Tensor], Tensor]:
        """Takes one step of Adam for the policy and one for the value network; they share nothing."""
        settings, net = self._settings, self._network
        policy, value = net.split(state["weights"])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(policy)
            log_pi, entropy = net.log_prob_and_entropy(policy, batch.observation, batch.action)
            loss, held_back = self._policy_loss(log_pi, batch)
            entropy = tf.reduce_mean(entropy)
            descent = tf.reduce_mean(loss) - settings.entropy_cost * entropy
        policy_gradients, policy_norm = optimizer.clipped(tape.gradient(descent, policy), settings.max_grad_norm)

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(value)
            v = net.values(value, batch.observation)
            loss = tf.reduce_mean(self._value_loss(v, batch))
        value_gradients, value_norm = optimizer.clipped(tape.gradient(loss, value), settings.max_grad_norm)

        left = 1.0
        if settings.decay_updates:
            done = tf.cast(updates, tf.float32) / settings.decay_updates
            left = tf.maximum(1 - (1 - _RATE_END) * done, _RATE_END)
        rates = [settings.learning_rate * left] * len(policy) + [settings.value_learning_rate * left] * len(value)
        weights, moments1, moments2 = optimizer.adam(
            [*policy, *value],
            policy_gradients + value_gradients,
            state["adam_m"],
            state["adam_v"],
            updates,
            rates,
        )
        log_ratio = log_pi - batch.log_mu
        td_error = batch.target - v
        metrics = (
            loss, tf.reduce_mean(v), value_norm, tf.reduce_mean(tf.abs(td_error)), policy_norm, entropy, held_back,
            # Schulman's estimate, http://joschu.net/blog/kl-approx.html: never negative, of little variance
            tf.reduce_mean(policy_gradient.ratio(log_pi, batch.log_mu) - 1 - log_ratio),
        )  # fmt: skip
        return {"weights": weights, "adam_m": moments1, "adam_v": moments2}, metrics, td_error

    def _minibatch(self, arrays: Sequence[Tensor]) -> Minibatch:
        batch = Minibatch(*arrays)
        return batch._replace(observation=self._normalized(batch.observation))

    def _look(self, observation: Tensor, at: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the value network's outputs [N + P] for observations, and log pi [N] of the actions taken at some."""
        policy, value = self._network.split([w.read_value() for w in self._groups["weights"]])
        x = self._normalized(observation)
        log_pi, _ = self._network.log_prob_and_entropy(policy, tf.gather(x, at), action)
        return self._network.values(value, x), log_pi

    @property
    def _value_scale(self) -> np.float32:
        """The unit of the value network's outputs."""
        count, square = self._targeted.numpy()
        return np.float32(max(np.sqrt(square), 1e-4) if count else 1.0)

    def _rescale_values(self, target: NDArray[np.float32]) -> np.float32:
        """Takes new targets into their root mean square, which becomes the unit of values; returns that."""
        before, (count, square) = self._value_scale, self._targeted.numpy()
        total = count + len(target)
        square += (float(np.mean(np.square(target, dtype=np.float64))) - square) * len(target) / total
        self._targeted.assign(np.array([total, square]))
        scale = self._value_scale
        for variable in self._groups["weights"][-2:]:  # the value network's last kernel and bias
            variable.assign(variable.numpy() * (before / scale))
        return scale

    def policy_layers(self) -> layers.PolicyLayers:
        """Returns the policy from raw observations to logits, or to mean and log deviation."""
        return self._network.policy_layers([w.numpy() for w in self._groups["weights"]], self.normalizer)

    def _all(self) -> list[Any]:
        return [*super()._all(), self._observed, self._targeted]
