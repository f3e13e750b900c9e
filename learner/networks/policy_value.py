"""Networks of algorithms that sample: a policy with a categorical or Gaussian head, and a value network of its own.

The policy is of ReLU layers, which int8 can equalise, or of tanh; the value network of tanh, but behind convolutions.

Inside, continuous actions are in units of half their range around its middle, and may lie beyond it: bounds clip them
on their way to the environment. The deviation of a Gaussian is the same in all states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import actor_critic, distributions, forward, layers, networks

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types

_SMALL = 1e-4
"""Kernel variance times inputs of the policy's last layer: first actions are alike in all states."""
_LOG_STD = "log_std"


@dataclass(frozen=True, slots=True, eq=False)
class PolicyValue:
    """The layers of both.

    Attributes:
        policy: From normalised observations to logits, or to the mean of an action.
        value: From normalised observations to one number.
        bounds: From inside to the environment's actions; None where they are choices.
        initial_std: First deviation of a Gaussian.
        choices: How many choices each element of an action has; empty unless there are several at once.
    """

    policy: layers.PolicyLayers
    value: layers.PolicyLayers
    bounds: layers.Rescale | None
    initial_std: float
    choices: tuple[int, ...] = ()

    @staticmethod
    def build(
        spec: specs.EnvSpec,
        hidden: Sequence[int],
        value_hidden: Sequence[int],
        initial_std: float,
        rng: np.random.Generator,
        network: str = "auto",
        activation: layers.Activation = "relu",
    ) -> PolicyValue:
        """Returns the initial layers.

        Args:
            spec: Describes the environment.
            hidden: Widths of the policy's hidden layers.
            value_hidden: Widths of the value network's.
            initial_std: First deviation of continuous actions, relative to half their range.
            rng: Draws the weights.
            network: Which convolutions, see `convolutions.stack`.
            activation: Of the policy's dense layers.
        """
        body, width = networks.torso(spec.observation, hidden, rng, network, activation)
        policy = (*body, networks.dense(width, spec.action.size, "none", rng, scale=_SMALL))
        # No actor runs it, so that it need not suit int8; ReLU took four times the steps on Acrobot (docs/decisions.md)
        of_values: layers.Activation = "relu" if networks.is_image(spec.observation) else "tanh"
        body, width = networks.torso(spec.observation, value_hidden, rng, network, of_values)
        value = (*body, networks.dense(width, 1, "none", rng, scale=0.01))
        bounds = actor_critic.rescale(spec.action) if spec.action.kind == "continuous" else None
        return PolicyValue(policy, value, bounds, initial_std, spec.action.choices)

    def initial(self) -> dict[str, FloatArray]:
        """Returns the weights by stable name, the policy's first; `split` separates them again."""
        # Named by their function, so that no weights of the other one are resumed with it
        policy, value = (
            name + ("_tanh" if any(layer.activation == "tanh" for layer in layers.weighted(stack)) else "")
            for name, stack in (("policy", self.policy), ("value", self.value))
        )
        found = {f"{policy}/{name}": array for name, array in layers.arrays(self.policy).items()}
        if self.bounds is not None:
            found[f"{policy}/{_LOG_STD}"] = np.full(self.bounds.gain.size, np.log(self.initial_std), np.float32)
        return found | {f"{value}/{name}": array for name, array in layers.arrays(self.value).items()}

    def split(self, weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Separates the policy's weights from the value network's."""
        count = len(layers.arrays(self.policy)) + (self.bounds is not None)
        return list(weights[:count]), list(weights[count:])

    def log_prob_and_entropy(
        self, policy_weights: Sequence[Tensor], x: Tensor, action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities [B] of the environment's actions [B, ...], and the entropies [B] or [] of all.

        Densities are those of actions in the environment's units, as actors give them.
        """
        if self.bounds is None:
            logits = forward.run_stored(self.policy, policy_weights, x)
            if self.choices:
                logits = distributions.by_element(logits, self.choices)
            return distributions.categorical_log_prob(logits, action), distributions.categorical_entropy(logits)
        mean = forward.run_stored(self.policy, policy_weights[:-1], x) * self.bounds.gain + self.bounds.offset
        log_std = policy_weights[-1] + np.log(self.bounds.gain)
        flat = tf.reshape(action, (-1, self.bounds.gain.size))
        return (
            distributions.gaussian_log_prob(mean, log_std, flat),
            distributions.gaussian_entropy(policy_weights[-1]),  # inside: a range's unit is no information
        )

    def values(self, value_weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """Returns the value network's output [B] for normalised observations."""
        return forward.run_stored(self.value, value_weights, x)[:, 0]

    def policy_layers(self, weights: Sequence[FloatArray], normalizer: networks.Normalizer) -> layers.PolicyLayers:
        """Returns the policy from raw observations to the outputs of its head: logits, or mean and log deviation."""
        policy_weights, _ = self.split(weights)
        policy = layers.absorb(layers.with_arrays(self.policy, policy_weights), normalizer.gain, normalizer.offset)
        last = policy[-1]
        assert isinstance(last, layers.Dense)
        if self.bounds is None:
            return (*policy[:-1], layers.centred(last, self.choices))
        return (*policy[:-1], *gaussian_tail(last, policy_weights[-1], self.bounds))


def gaussian_tail(
    last: layers.Dense, log_std: FloatArray, bounds: layers.Rescale
) -> tuple[layers.Dense, layers.Rescale]:
    """Returns the layers that end in means and log deviations [2 D], in the environment's units, from one of means.

    int8 has one scale for all outputs of a layer, and rounding a deviation with the scale of means would cost both. So
    deviations are constants of the float tail behind DEQUANTIZE, exact to the bit: the means' rows come twice, and the
    second time count for nothing. (Rows of zeros would do, but that their own scales are 0.)
    """
    twice = replace(last, kernel=np.concatenate([last.kernel] * 2), bias=np.concatenate([last.bias] * 2))
    gain = np.concatenate([bounds.gain, np.zeros_like(bounds.gain)])
    offset = np.concatenate([bounds.offset, (log_std + np.log(bounds.gain)).astype(np.float32)])
    return twice, layers.Rescale(gain, offset)
