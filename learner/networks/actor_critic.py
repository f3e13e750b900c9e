"""Networks for continuous actions: an actor that ends in tanh, and a critic of observation and action.

Inside, every action lies in -1..1. Only the exported policy (`policy_layers`) and `bounded` know the environment's
bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner.networks import layers, networks

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types

_SMALL = 0.01
"""Kernel variance times inputs, of last layers: first actions lie in the middle, and first targets are rewards."""
_ROUNDED = 4
"""One in so many observations of a minibatch shows what rounding does. All of them cost twice the time."""
_TINY = 1e-30  # a channel of zeros needs a step too


def check(algorithm: str, spec: specs.EnvSpec) -> None:
    """Raises SpecError unless actions are continuous (their bounds are finite: ActionSpec sees to it)."""
    if spec.action.kind != "continuous":
        raise errors.SpecError(
            f"{algorithm} learns continuous actions, and this environment takes discrete ones",
            where=spec.describe(),
            todo="--algorithm dqn chooses among discrete actions",
        )


def rescale(action: specs.ActionSpec) -> layers.Rescale:
    """From -1..1 to the bounds, per element of the action."""
    low, high = np.array(action.low, np.float64), np.array(action.high, np.float64)
    return layers.Rescale(((high - low) / 2).astype(np.float32), ((high + low) / 2).astype(np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class ActorCritic:
    """Layers of both; the critic's `encoder` is the convolutional stack for images, and empty for vectors."""

    actor: layers.PolicyLayers
    encoder: layers.PolicyLayers
    critic: layers.PolicyLayers
    bounds: layers.Rescale

    @staticmethod
    def build(
        spec: specs.EnvSpec, hidden: Sequence[int], critic_hidden: Sequence[int], outputs: int, rng: np.random.Generator
    ) -> ActorCritic:
        """Initial layers.

        Args:
            spec: With continuous actions.
            hidden: Widths of the actor's hidden layers.
            critic_hidden: Widths of the critic's.
            outputs: Of the critic: 1 value, or logits of a distribution.
            rng: Of the weights.
        """
        size = spec.action.size
        body, width = networks.torso(spec.observation, hidden, rng)
        actor = (*body, networks.dense(width, size, "tanh", rng, scale=_SMALL))
        encoder, width = networks.torso(spec.observation, (), rng)
        critic: list[layers.Layer] = []
        width += size
        for n_out in critic_hidden:
            critic.append(networks.dense(width, n_out, "relu", rng))
            width = n_out
        critic.append(networks.dense(width, outputs, "none", rng, scale=_SMALL))
        return ActorCritic(actor, encoder, tuple(critic), rescale(spec.action))

    def initial(self) -> dict[str, FloatArray]:
        """Weights by stable name, the actor's first: `split` takes them apart."""
        parts = {"actor": self.actor, "encoder": self.encoder, "critic": self.critic}
        return {f"{part}/{name}": a for part, stack in parts.items() for name, a in layers.arrays(stack).items()}

    def split(self, weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The actor's and the critic's."""
        count = len(layers.arrays(self.actor))
        return list(weights[:count]), list(weights[count:])

    def act(self, actor_weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """Actions [B, size] in -1..1 for normalised observations."""
        return tf.tanh(self.drive(actor_weights, x))

    def drive(self, actor_weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """What goes into the actor's tanh [B, size]."""
        last = self.actor[-1]
        assert isinstance(last, layers.Dense)
        return networks.forward((*self.actor[:-1], replace(last, activation="none")), actor_weights, x)

    def act_rounded(self, actor_weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """`act` with kernels and hidden layers rounded as int8 rounds them: by output channel, and by tensor.

        Nothing else is: of the input and of what goes into tanh int8 holds enough (`quantize/refine.py`).
        """
        last = len(layers.weighted(self.actor)) - 1

        def rounding(what: str, at: int, x: Tensor) -> Tensor:
            if what == "kernel":
                return _rounded(x, 127, tuple(range(1, len(x.shape))))
            return x if at == last else _rounded(x, 255)

        return networks.forward(self.actor, actor_weights, x, rounding)

    def rounding_cost(
        self, price: float, actor_weights: Sequence[Tensor], x: Tensor, action: Tensor, value: Tensor
    ) -> Tensor:
        """What a policy pays for the actions that int8 rounding moves: a scalar in units of return.

        A steep policy costs nothing in fp32 and loses most to int8. So int8 is simulated, and its squared error has a
        price. That makes policies smooth where states lie (as CAPS does, Mysore et al. 2021,
        https://arxiv.org/abs/2012.06644) and evens out weights and activations, as much as rounding needs it.

        Args:
            price: Of an error of 1 % of the range, in deviations of `value`.
            actor_weights: Of the policy.
            x: Normalised observations [B, ...].
            action: What `act` gives for them.
            value: What the critic gives for them [B].
        """
        some = max(1, x.shape[0] // _ROUNDED)
        percent = 50 * (self.act_rounded(actor_weights, x[:some]) - action[:some])
        error = tf.reduce_mean(tf.reduce_sum(tf.square(percent), axis=1))
        return price * error * tf.stop_gradient(tf.math.reduce_std(value))

    def judge(self, critic_weights: Sequence[Tensor], x: Tensor, action: Tensor) -> Tensor:
        """The critic's outputs [B, outputs] for normalised observations and actions [B, size] in -1..1."""
        count = len(layers.arrays(self.encoder))
        features = networks.forward(self.encoder, critic_weights[:count], x)
        return networks.forward(self.critic, critic_weights[count:], tf.concat([features, action], axis=1))

    def bounded(self, action: Tensor) -> Tensor:
        """Actions [B, size] in -1..1 from those of the environment [B, *shape]."""
        flat = tf.reshape(action, (-1, self.bounds.gain.size))
        return (flat - self.bounds.offset) / self.bounds.gain

    def policy_layers(self, weights: Sequence[FloatArray], normalizer: networks.Normalizer) -> layers.PolicyLayers:
        """The actor alone, from raw observations to actions within the environment's bounds."""
        actor = layers.with_arrays(self.actor, self.split(weights)[0])
        return (*layers.absorb(actor, normalizer.gain, normalizer.offset), self.bounds)


def _rounded(x: Tensor, levels: int, axis: tuple[int, ...] | None = None) -> Tensor:
    """Rounds to steps of which so many make the largest size along `axis`.

    Gradients pass through, and to the step as in Esser et al. 2020, https://arxiv.org/abs/1902.08153: otherwise a layer
    could make its rounding seem small by growing, where the step grows with it.
    """
    step = tf.maximum(tf.reduce_max(tf.abs(x), axis, keepdims=True), _TINY) / levels
    scaled = x / step
    return x + step * tf.stop_gradient(tf.round(scaled) - scaled)
