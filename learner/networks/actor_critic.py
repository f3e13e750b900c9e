"""Networks for continuous actions: an actor that ends in tanh, and a critic of observation and action.

Inside, every action lies in -1..1. Only the exported policy (`policy_layers`) and `bounded` know the environment's
bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner.networks import fake_quant, forward, layers, networks, stored

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types

SMALL = 0.01
"""Kernel variance times inputs, of last layers: first actions lie in the middle, and first targets are rewards."""
ROUNDED = 4
"""One in so many observations of a minibatch is enough to show what rounding does. All of them cost twice the time."""


def check(algorithm: str, spec: specs.EnvSpec) -> None:
    """Raises SpecError unless actions are continuous (their bounds are finite: ActionSpec sees to it)."""
    if spec.action.kind != "continuous":
        raise errors.SpecError(
            f"{algorithm} learns continuous actions, and this environment takes {spec.action.kind} ones",
            where=spec.describe(),
            todo="--algorithm dqn chooses among discrete actions, ppo and a2c also several at once",
        )


def rescale(action: specs.ActionSpec) -> layers.Rescale:
    """Returns the layer that brings actions from -1..1 to the bounds, per element."""
    low, high = np.array(action.low, np.float64), np.array(action.high, np.float64)
    return layers.Rescale(((high - low) / 2).astype(np.float32), ((high + low) / 2).astype(np.float32))


def run_rounded(stack: layers.PolicyLayers, weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """Runs a policy with kernels (by output channel) and hidden layers (by tensor) rounded as in int8.

    Nothing else is rounded: int8 holds enough of the input and of what tanh receives (`learner/quantize/ptq.py`).
    """
    last = len(layers.weighted(stack)) - 1

    def rounding(what: str, at: int, x: Tensor) -> Tensor:
        return x if what == "kernel" or at == last else fake_quant.by_largest(x, 255)

    rounded = [
        fake_quant.by_largest(weight, 127, stored.output_axes(array.shape)) if array.ndim > 1 else weight
        for weight, array in zip(weights, layers.arrays(stack).values(), strict=True)
    ]
    return forward.run_stored(stack, rounded, x, rounding)


def rounding_cost(
    price: float, act_rounded: Callable[[Tensor], Tensor], x: Tensor, action: Tensor, value: Tensor
) -> Tensor:
    """Returns what a policy pays for the actions that int8 rounding moves: a scalar in units of return.

    A steep policy costs nothing in fp32 and loses most to int8. So int8 is simulated, and its squared error has a
    price. That makes policies smooth where states lie (as CAPS does, Mysore et al. 2021,
    https://arxiv.org/abs/2012.06644) and evens out weights and activations, as much as rounding needs it.

    Args:
        price: Cost of an error of 1 % of the range, in standard deviations of `value`.
        act_rounded: Gives the actions of the policy when it is rounded.
        x: Normalised observations [B, ...].
        action: The policy's actions for them [B, size] in -1..1.
        value: The critic's values of them [B].
    """
    some = max(1, x.shape[0] // ROUNDED)
    percent = 50 * (act_rounded(x[:some]) - action[:some])
    error = tf.reduce_mean(tf.reduce_sum(tf.square(percent), axis=1))
    return price * error * tf.stop_gradient(tf.math.reduce_std(value))


def bounded(bounds: layers.Rescale, action: Tensor) -> Tensor:
    """Brings actions [B, *shape] within the bounds to -1..1: [B, size]."""
    flat = tf.reshape(action, (-1, bounds.gain.size))
    return (flat - bounds.offset) / bounds.gain


@dataclass(frozen=True, slots=True, eq=False)
class Critic:
    """The layers of a critic of observation and action.

    Attributes:
        encoder_layers: A convolutional stack for images; empty for vectors.
        dense_layers: From encoded observations beside actions to the outputs.
    """

    encoder_layers: layers.PolicyLayers
    dense_layers: layers.PolicyLayers

    @staticmethod
    def build(
        spec: specs.EnvSpec, hidden: Sequence[int], outputs: int, rng: np.random.Generator, network: str = "auto"
    ) -> Critic:
        """Returns the initial layers; arguments as of `ActorCritic.build`."""
        encoder, width = networks.torso(spec.observation, (), rng, network)
        dense: list[layers.Layer] = []
        width += spec.action.size
        for n_out in hidden:
            dense.append(networks.dense(width, n_out, "relu", rng))
            width = n_out
        dense.append(networks.dense(width, outputs, "none", rng, scale=SMALL))
        return Critic(encoder, tuple(dense))

    def initial(self) -> dict[str, FloatArray]:
        """Returns the weights by stable name, in the order of `run`."""
        parts = {"encoder": self.encoder_layers, "critic": self.dense_layers}
        return {f"{part}/{name}": a for part, stack in parts.items() for name, a in layers.arrays(stack).items()}

    def run(self, weights: Sequence[Tensor], x: Tensor, action: Tensor) -> Tensor:
        """Returns the outputs [B, outputs] for normalised observations and actions [B, size] in -1..1."""
        count = len(layers.arrays(self.encoder_layers))
        features = forward.run_stored(self.encoder_layers, weights[:count], x)
        return forward.run_stored(self.dense_layers, weights[count:], tf.concat([features, action], axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class ActorCritic:
    """The layers of both.

    Attributes:
        actor_layers: From normalised observations to actions in -1..1.
        critic_layers: The critic.
        bounds: From -1..1 to the environment's bounds.
    """

    actor_layers: layers.PolicyLayers
    critic_layers: Critic
    bounds: layers.Rescale

    @staticmethod
    def build(
        spec: specs.EnvSpec,
        hidden: Sequence[int],
        critic_hidden: Sequence[int],
        outputs: int,
        rng: np.random.Generator,
        network: str = "auto",
    ) -> ActorCritic:
        """Returns the initial layers.

        Args:
            spec: Describes an environment of continuous actions.
            hidden: Widths of the actor's hidden layers.
            critic_hidden: Widths of the critic's.
            outputs: Number of the critic's outputs: 1 value, or the logits of a distribution.
            rng: Draws the weights.
            network: Which convolutions, see `convolutions.stack`.
        """
        size = spec.action.size
        body, width = networks.torso(spec.observation, hidden, rng, network)
        actor = (*body, networks.dense(width, size, "tanh", rng, scale=SMALL))
        return ActorCritic(actor, Critic.build(spec, critic_hidden, outputs, rng, network), rescale(spec.action))

    def initial(self) -> dict[str, FloatArray]:
        """Returns the weights by stable name, the actor's first; `split` separates them again."""
        actor = {f"actor/{name}": array for name, array in layers.arrays(self.actor_layers).items()}
        return actor | self.critic_layers.initial()

    def split(self, weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Separates the actor's weights from the critic's."""
        count = len(layers.arrays(self.actor_layers))
        return list(weights[:count]), list(weights[count:])

    def act(self, actor_weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """Returns actions [B, size] in -1..1 for normalised observations."""
        return tf.tanh(self.pre_tanh(actor_weights, x))

    def pre_tanh(self, actor_weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """Returns what the actor's last layer hands to tanh [B, size]."""
        last = self.actor_layers[-1]
        assert isinstance(last, layers.Dense)
        return forward.run_stored((*self.actor_layers[:-1], replace(last, activation="none")), actor_weights, x)

    def act_rounded(self, actor_weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """Does what `act` does, rounded as `run_rounded` says."""
        return run_rounded(self.actor_layers, actor_weights, x)

    def rounding_cost(
        self, price: float, actor_weights: Sequence[Tensor], x: Tensor, action: Tensor, value: Tensor
    ) -> Tensor:
        """Returns what `rounding_cost` says of this actor; `action` is the result of `act` for x [B, ...]."""
        return rounding_cost(price, lambda some: self.act_rounded(actor_weights, some), x, action, value)

    def critic(self, critic_weights: Sequence[Tensor], x: Tensor, action: Tensor) -> Tensor:
        """Returns the critic's outputs [B, outputs] for normalised observations and actions [B, size] in -1..1."""
        return self.critic_layers.run(critic_weights, x, action)

    def bounded(self, action: Tensor) -> Tensor:
        """Brings actions of the environment [B, *shape] to -1..1: [B, size]."""
        return bounded(self.bounds, action)

    def policy_layers(self, weights: Sequence[FloatArray], normalizer: networks.Normalizer) -> layers.PolicyLayers:
        """Returns the actor alone, from raw observations to actions within the environment's bounds."""
        actor = layers.with_arrays(self.actor_layers, self.split(weights)[0])
        return (*layers.absorb(actor, normalizer.gain, normalizer.offset), self.bounds)
