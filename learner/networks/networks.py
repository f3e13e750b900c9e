"""Networks from an environment's spec: initial layers, the input normaliser, the Q-network.

Weights are plain lists of arrays beside the layers they belong to, not objects that own them. Networks run with those
of training, as `stored` has them; what they export, and start from, is as `layers` has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import convolutions, forward, layers

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types

is_image = convolutions.is_image


@dataclass(frozen=True, slots=True, eq=False)
class Normalizer:
    """The scaling `x * gain + offset` in front of the network; [features], or [1] in front of a convolution."""

    gain: FloatArray
    offset: FloatArray

    @staticmethod
    def identity(observation: specs.ObservationSpec) -> Normalizer:
        """Returns the normaliser that leaves floats alone and brings bytes to 0..1."""
        width = 1 if is_image(observation) else observation.size
        gain = 1 / 255 if observation.dtype == "uint8" else 1.0
        return Normalizer(np.full(width, gain, np.float32), np.zeros(width, np.float32))

    @staticmethod
    def fitted(observation: specs.ObservationSpec, sample: NDArray[Any], floor: float) -> Normalizer:
        """Returns the one for mean 0 and deviation 1 per feature over `sample` [N, *shape]; for bytes, `identity`.

        Deviations below `floor` count as `floor`: what hardly moved while exploring may move far later on.
        """
        if observation.dtype == "uint8":
            return Normalizer.identity(observation)
        flat = sample.reshape(len(sample), -1).astype(np.float64)
        gain = 1 / np.maximum(flat.std(0), floor)
        return Normalizer(gain.astype(np.float32), (-flat.mean(0) * gain).astype(np.float32))


def dense(
    n_in: int, n_out: int, activation: layers.Activation, rng: np.random.Generator, scale: float = 2.0
) -> layers.Dense:
    """Returns a layer of kernel variance `scale / n_in` (2 suits ReLUs: He et al. 2015) and zero bias."""
    bound = math.sqrt(3 * scale / n_in)
    # Drawn by inputs, as the runs were from which the tuned settings come: the same seed gives the same network
    kernel = rng.uniform(-bound, bound, (n_in, n_out)).T.astype(np.float32, order="C")
    return layers.Dense(kernel, np.zeros(n_out, np.float32), activation)


def torso(
    observation: specs.ObservationSpec,
    hidden: Sequence[int],
    rng: np.random.Generator,
    network: str = "auto",
    activation: layers.Activation = "relu",
) -> tuple[layers.PolicyLayers, int]:
    """Returns layers from a normalised observation to `hidden[-1]` features, behind convolutions for images.

    Args:
        observation: What it is for.
        hidden: Widths of dense layers.
        rng: Draws the weights.
        network: Which convolutions, see `convolutions.stack`.
        activation: Of dense layers; that of convolutions is ReLU.

    Returns:
        The layers and the number of their output features.
    """
    stack: list[layers.Layer] = []
    width = observation.size
    if chain := convolutions.stack(network, observation):
        height, across, channels = observation.shape
        for filters, size, stride in chain:
            flat = dense(size * size * channels, filters, "relu", rng)
            stack.append(layers.Conv2D(flat.kernel.reshape(filters, size, size, channels), flat.bias, stride, "relu"))
            height, across, channels = (height - size) // stride + 1, (across - size) // stride + 1, filters
        width = height * across * channels
        stack.append(layers.Flatten())
    elif len(observation.shape) > 1:
        stack.append(layers.Flatten())
    for n_out in hidden:
        stack.append(dense(width, n_out, activation, rng))
        width = n_out
    return tuple(stack), width


@dataclass(frozen=True, slots=True, eq=False)
class QNetwork:
    """Action values of discrete actions; dueling as in Wang et al. 2016, https://arxiv.org/abs/1511.06581.

    Dueling: q = value + advantage - mean advantage, with a hidden layer of its own for each stream. Plain: no value
    stream, and q is what `advantage` says.
    """

    torso: layers.PolicyLayers
    advantage: layers.PolicyLayers
    value: layers.PolicyLayers

    @staticmethod
    def build(
        spec: specs.EnvSpec, hidden: Sequence[int], dueling: bool, rng: np.random.Generator, network: str = "auto"
    ) -> QNetwork:
        """Returns the initial layers; with dueling the last of `hidden` is the width of either stream."""
        shared = hidden[:-1] if dueling else hidden
        body, width = torso(spec.observation, shared, rng, network)

        def head(outputs: int) -> layers.PolicyLayers:
            # Outputs start small, so that the first targets are rewards and not noise.
            if not dueling:
                return (dense(width, outputs, "none", rng, scale=0.01),)
            return (dense(width, hidden[-1], "relu", rng), dense(hidden[-1], outputs, "none", rng, scale=0.01))

        return QNetwork(body, head(spec.action.size), head(1) if dueling else ())

    @property
    def parts(self) -> dict[str, layers.PolicyLayers]:
        """The three stacks by name."""
        return {"torso": self.torso, "advantage": self.advantage, "value": self.value}

    def initial(self) -> dict[str, FloatArray]:
        """Returns weights by stable name, in the order of `q_values`."""
        return {f"{part}/{name}": a for part, stack in self.parts.items() for name, a in layers.arrays(stack).items()}

    def q_values(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """Returns the values [B, actions] of normalised float32 observations x [B, ...]."""
        torso_w, advantage_w, value_w = self._split(weights)
        features = forward.run_stored(self.torso, torso_w, x)
        advantage = forward.run_stored(self.advantage, advantage_w, features)
        if not self.value:
            return advantage
        value = forward.run_stored(self.value, value_w, features)
        return value + advantage - tf.reduce_mean(advantage, axis=1, keepdims=True)

    def policy_layers(self, weights: Sequence[FloatArray], normalizer: Normalizer) -> layers.PolicyLayers:
        """Returns the greedy policy: raw observation to advantages with mean 0. No argmax needs the value stream."""
        policy = self.advantage_layers(weights, normalizer)
        last = policy[-1]
        assert isinstance(last, layers.Dense)
        return (*policy[:-1], layers.centred(last))

    def advantage_layers(self, weights: Sequence[FloatArray], normalizer: Normalizer) -> layers.PolicyLayers:
        """Returns the advantage stream as trained, from raw observations: its mean over actions may be anything."""
        torso_w, advantage_w, _ = self._split(weights)
        policy = layers.with_arrays(self.torso, torso_w) + layers.with_arrays(self.advantage, advantage_w)
        return layers.absorb(policy, normalizer.gain, normalizer.offset)

    def q_layers(self, weights: Sequence[FloatArray], normalizer: Normalizer) -> layers.PolicyLayers:
        """Returns the whole network as one stack, from raw observations to action values.

        With dueling the two streams run side by side in layers as wide as both, and the last layer adds them up.
        """
        if not self.value:
            return self.advantage_layers(weights, normalizer)
        torso_w, advantage_w, value_w = self._split(weights)
        advantage, value = (
            [layer for layer in layers.with_arrays(stream, arrays) if isinstance(layer, layers.Dense)]
            for stream, arrays in ((self.advantage, advantage_w), (self.value, value_w))
        )
        first = layers.Dense(
            np.vstack([advantage[0].kernel, value[0].kernel]), np.hstack([advantage[0].bias, value[0].bias]), "relu"
        )
        last = layers.centred(advantage[1])
        last = layers.Dense(
            np.hstack([last.kernel, np.repeat(value[1].kernel, last.bias.size, axis=0)]),
            last.bias + value[1].bias,
            "none",
        )
        policy = (*layers.with_arrays(self.torso, torso_w), first, last)
        return layers.absorb(policy, normalizer.gain, normalizer.offset)

    def _split(self, weights: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        a = len(layers.arrays(self.torso))
        b = a + len(layers.arrays(self.advantage))
        return weights[:a], weights[a:b], weights[b:]
