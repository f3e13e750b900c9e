"""The common base of PPO and A2C: what happens once a phase, around the gradient steps.

1. The normaliser takes in the observations that the phase's steps start from. It is folded into every policy that goes
   out (`layers.absorb`), so that it may move on; what the acting policy was is told by the log-probabilities alone.
2. Values and log-probabilities of the phase's steps, by the weights as they are now.
3. Advantages and targets (`policy_gradient`), in the rewards' unit: generalized ones, or V-trace's.
4. Advantages are normalised over the phase. Targets are divided by their root mean square over all phases; when that
   changes, the value network's last layer is rescaled, so that it says what it said before (van Hasselt et al. 2016,
   https://arxiv.org/abs/1602.07714, the scale alone).
5. Gradient steps, K in one call (`compiled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import specs
from learner import algorithms, config
from learner.algorithms import compiled, xla
from learner.experience.buffers import rollouts
from learner.networks import layers, networks, optimizer, policy_value
from learner.networks.losses import policy_gradient

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


class Packed(NamedTuple):
    """N steps of a phase, in sequences laid end to end, in two arrays: handing one over takes up to 100 us.

    What the S sequences come to is filled up with zeros to one of few numbers: for each TensorFlow compiles anew.
    """

    observation: Any  # [N + S, *shape], what the steps start from, and then `Steps.bootstrap`
    numbers: Any  # [5 + D, N] float32, the rest of `Steps`, its integers exactly: all of them are below 2^24

    @staticmethod
    def of(phase: rollouts.Phase) -> Packed:
        """Returns the steps of a phase."""
        ends, n = phase.at[phase.is_last] + 1, len(phase.at)
        room = max(1, n // 8)
        while room < len(ends):
            room *= 2
        room = min(room, n)
        observation = np.zeros((n + room, *phase.observation.shape[1:]), phase.observation.dtype)
        observation[:n] = phase.observation[phase.at]
        observation[n : n + len(ends)] = phase.observation[ends]
        action = phase.action.reshape(n, -1).T
        numbers = np.empty((5 + len(action), n), np.float32)
        numbers[:4] = phase.log_prob, phase.reward, phase.discount, phase.is_last
        numbers[4] = np.arange(1, n + 1)
        numbers[4, phase.is_last] = np.arange(n, n + len(ends))
        numbers[5:] = action
        return Packed(observation, numbers)


class Steps(NamedTuple):
    """The same, unpacked in TensorFlow."""

    observation: Tensor  # [N, *shape], what they start from, as it came
    bootstrap: Tensor  # [S, *shape], what the last steps of sequences come to, in their order; then nothing but zeros
    following: Tensor  # [N] int32, where what a step comes to is among both of these
    action: Tensor  # [N] int32, or [N, *shape] float32
    log_mu: Tensor  # [N]
    reward: Tensor  # [N]
    discount: Tensor  # [N]
    is_last: Tensor  # [N] bool

    @staticmethod
    def of(action_spec: specs.ActionSpec, observation: Tensor, numbers: Tensor) -> Steps:
        """Returns the steps that are in `Packed`."""
        n = numbers.shape[1]
        log_mu, reward, discount, is_last, following = tf.unstack(numbers[:5])
        action = tf.reshape(tf.transpose(numbers[5:]), (n, *action_spec.shape))
        return Steps(
            observation[:n],
            observation[n:],
            tf.cast(following, tf.int32),
            action if action_spec.kind == "continuous" else tf.cast(action, tf.int32),
            log_mu,
            reward,
            discount,
            is_last > 0,
        )


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

    _trace_bounds: tuple[float, float] | None = None
    """V-trace's rho_bar and c_bar; None: generalized advantages, which leave who acted to the loss."""

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
            cast(layers.Activation, settings.activation),  # which the configuration has checked
        )
        initial = self._network.initial()
        zeros = {name: np.zeros_like(array) for name, array in initial.items()}
        super().__init__(spec, {"weights": initial, "adam_m": zeros, "adam_v": zeros}, settings.normalizer_floor)
        width = 1 if networks.is_image(spec.observation) else spec.observation.size
        # Count, means and variances of observations; count and mean square of value targets
        self._observed = tf.Variable(np.zeros(1 + 2 * width), trainable=False, name="seen/observations")
        self._targeted = tf.Variable(np.zeros(2), trainable=False, name="seen/targets")
        self._estimated = tf.function(self._estimates, autograph=False)
        self._at_once = xla.Program(self._whole_phase)

    def normalize(self, observations: NDArray[Any]) -> None:
        """Sets the input normaliser by the first observations [N, *shape]; each phase's are added to them."""
        self._update_normalizer(tf.convert_to_tensor(observations))

    def update(self, batch: rollouts.Phase) -> algorithms.Update:
        """Takes the gradient steps of a phase.

        Of one step, all is one compiled call: its values and log-probabilities are those of the loss, so that XLA
        computes them once. Of several, minibatches are gathered between two calls, where a copy of rows is quicker.
        """
        packed = Packed.of(batch)
        if len(batch.minibatches) == 1:
            return self._told(*self._at_once(*packed))
        found = [array.numpy() for array in self._estimated(*map(tf.constant, packed))]
        arrays = packed.observation[: len(batch.at)], batch.action, batch.log_prob, *found
        return self._take_steps(*(array[batch.minibatches] for array in arrays))

    def _whole_phase(self, *packed: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what `_gradient_steps` does of one minibatch of all steps that are `Packed`."""
        steps, found = Steps.of(self._spec.action, *packed), self._estimates(*packed)
        return self._gradient_steps(*(a[None] for a in (steps.observation, steps.action, steps.log_mu, *found)))

    def _estimates(self, *packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns normalised advantages, and the values' targets and values, in their new unit, of `Packed`: [N] each.

        Takes the steps into the normaliser and into the unit of values.
        """
        steps, settings = Steps.of(self._spec.action, *packed), self._settings
        self._update_normalizer(steps.observation)
        x, behind = self._normalized(steps.observation), self._normalized(steps.bootstrap)
        policy, value = self._network.split([w.variable.read_value() for w in self._groups["weights"]])
        log_pi, _ = self._network.log_prob_and_entropy(policy, x, steps.action)
        v_tm1, v_behind = (self._network.values(value, seen) * self._value_scale for seen in (x, behind))
        v_t = tf.gather(tf.concat([v_tm1, v_behind], axis=0), steps.following)
        found = self._advantages(steps, v_tm1, v_t, log_pi - steps.log_mu)
        scale = self._rescale_values(found.target)
        advantage = policy_gradient.normalized(found.advantage, settings.advantage_floor * scale)
        return advantage, found.target / scale, v_tm1 / scale

    def _advantages(self, steps: Steps, v_tm1: Tensor, v_t: Tensor, log_rho: Tensor) -> policy_gradient.Estimates:
        """Returns advantages and value targets.

        Args:
            steps: The phase.
            v_tm1: Values of what its steps start from [N], in the rewards' unit.
            v_t: Values of what they come to [N].
            log_rho: log pi - log mu of their actions [N].
        """
        known = steps.reward, steps.discount, v_tm1, v_t, steps.is_last
        if self._trace_bounds is None:
            return policy_gradient.generalized_advantages(*known, self._settings.trace_decay)
        return policy_gradient.vtrace(*known, log_rho, self._settings.trace_decay, *self._trace_bounds)

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
        td_error = batch.target - v
        metrics = (
            loss, tf.reduce_mean(v), value_norm, tf.reduce_mean(tf.abs(td_error)), policy_norm, entropy, held_back,
            tf.reduce_mean(policy_gradient.divergence(log_pi, batch.log_mu)),
        )  # fmt: skip
        return {"weights": weights, "adam_m": moments1, "adam_v": moments2}, metrics, td_error

    def _minibatch(self, arrays: Sequence[Tensor]) -> Minibatch:
        batch = Minibatch(*arrays)
        return batch._replace(observation=self._normalized(batch.observation))

    def _update_normalizer(self, observations: Tensor) -> None:
        """Takes observations [N, *shape] into the normaliser; frames of bytes are as they are."""
        if self._spec.observation.dtype == "uint8":
            return
        n, seen = float(observations.shape[0]), self._observed.read_value()
        count, (mean, variance) = seen[0], tf.split(seen[1:], 2)
        flat = tf.cast(tf.reshape(observations, (observations.shape[0], -1)), tf.float64)
        middle = tf.reduce_mean(flat, axis=0)
        spread = tf.reduce_mean(tf.square(flat - middle), axis=0)
        total, shift = count + n, middle - mean
        variance = (count * variance + n * spread + count * n / total * tf.square(shift)) / total
        mean = mean + shift * n / total
        self._observed.assign(tf.concat([total[None], mean, variance], axis=0))
        gain = 1 / tf.maximum(tf.sqrt(variance), self._normalizer_floor)
        self._gain.assign(tf.cast(gain, tf.float32))
        self._offset.assign(tf.cast(-mean * gain, tf.float32))

    @property
    def _value_scale(self) -> Tensor:
        """The unit of the value network's outputs: float32 scalar."""
        count, square = tf.unstack(self._targeted.read_value())
        root = tf.where(count > 0, tf.maximum(tf.sqrt(square), 1e-4), 1.0)
        return tf.cast(root, tf.float32)

    def _rescale_values(self, target: Tensor) -> Tensor:
        """Takes new targets [N] into their root mean square, which becomes the unit of values; returns that."""
        before, (count, square) = self._value_scale, tf.unstack(self._targeted.read_value())
        n = float(target.shape[0])
        total = count + n
        square += (tf.reduce_mean(tf.square(tf.cast(target, tf.float64))) - square) * n / total
        self._targeted.assign(tf.stack([total, square]))
        scale = self._value_scale
        for weight in self._groups["weights"][-2:]:  # the value network's last kernel and bias
            weight.variable.assign(weight.variable.read_value() * (before / scale))
        return scale

    def policy_layers(self) -> layers.PolicyLayers:
        """Returns the policy from raw observations to logits, or to mean and log deviation."""
        return self._network.policy_layers([w.numpy() for w in self._groups["weights"]], self.normalizer)

    def _all(self) -> list[Any]:
        return [*super()._all(), self._observed, self._targeted]
