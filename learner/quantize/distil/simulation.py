"""Simulates the int8 model that the recipe (`ptq`, `requantize`) makes of layers, with gradients, for training.

`aware` does this for the plain model of the converter. Here the input is hi and lo, channels are equalised, outputs
saturate where the recipe lets them, and weights may be pruned or have fewer bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from learner.networks import fake_quant, forward, layers
from learner.quantize import bits, calibrate, input_scaling
from learner.quantize.distil import compression

Tensor = Any  # TensorFlow ships no types


class Simulation:
    """The forward pass of one architecture; ranges, factors and masks are variables, so that it is traced once.

    Args:
        policy: Layers, of which only the kinds and sizes matter; a `Rescale` at the end is left out.
        compressed: What weights are left.
        affine: How the model scales its input; None where it does not.
        passes: Whether gradients pass where the outputs saturate: actions may do so on the wrong side. Values that do
            are clear, and would grow for ever.
    """

    def __init__(
        self,
        policy: layers.PolicyLayers,
        compressed: compression.Compression,
        affine: input_scaling.Affine | None,
        *,
        passes: bool,
    ) -> None:
        self._passes = passes
        self._stack = tuple(layer for layer in policy if not isinstance(layer, layers.Rescale))
        self._bits, self._features = compressed.weight_bits, affine.gain.shape if affine and affine.hi_lo else None
        weighted = layers.weighted(policy)
        self._last = len(weighted) - 1
        self._limits = tf.Variable(tf.zeros((len(weighted) + 1, 2)), trainable=False)
        self._factors = [tf.Variable(tf.ones(layer.bias.size), trainable=False) for layer in weighted[:-1]]
        self.masks = [tf.Variable(tf.ones(layer.kernel.shape), trainable=False) for layer in weighted]

    def refresh(self, params: calibrate.QuantParams) -> None:
        """Takes over what the int8 model of the weights as they are now would be fitted to."""
        self._limits.assign([params.input, *params.outputs])
        for variable, factor in zip(self._factors, params.factors or (), strict=False):
            variable.assign(factor)

    def run(self, weights: Sequence[Tensor], x: Tensor, *, rounds: bool = True) -> Tensor:
        """Returns outputs [B, n] before any `Rescale`, as int8 has them.

        Args:
            weights: In the order of `layers.arrays`, for inputs that are scaled and not split into hi and lo.
            x: Inputs as the int8 model has them behind its scaling, [B, ...]; hi alone where nothing rounds.
            rounds: False for fp32, pruned all the same.
        """
        if rounds:
            x = fake_quant.activation(x, (self._limits[0, 0], self._limits[0, 1]))
        return forward.run(self._stack, weights, x, self._round if rounds else self._prune)

    def _prune(self, what: str, at: int, x: Tensor) -> Tensor:
        return x * self.masks[at] if what == "kernel" else x

    def _round(self, what: str, at: int, x: Tensor) -> Tensor:
        if what == "kernel":
            return self._kernel(at, x * self.masks[at])
        if what == "tanh":
            return fake_quant.activation(x, fake_quant.TANH_RANGE)
        limits = self._limits[at + 1, 0], self._limits[at + 1, 1]
        if at == self._last:
            rounded = fake_quant.activation(x, limits)
            return x + tf.stop_gradient(rounded - x) if self._passes else rounded
        return fake_quant.activation(x / self._factors[at], limits) * self._factors[at]

    def _kernel(self, at: int, kernel: Tensor) -> Tensor:
        if self._bits < bits.BITS_MAX:
            kernel = fake_quant.kernel(kernel, self._bits, outputs_first=True)
        if at == 0:
            if self._features is not None:
                features = tf.reshape(kernel, (-1, *self._features))
                kernel = tf.concat([features, features / input_scaling.LO_GAIN], axis=-1)
                kernel = tf.reshape(kernel, (kernel.shape[0], int(np.prod(kernel.shape[1:]))))
            return fake_quant.kernel(kernel, outputs_first=True)
        factor, shape = self._factors[at - 1], kernel.shape
        by_channel = tf.reshape(kernel, (shape[0], -1, factor.shape[0])) * factor
        rounded = fake_quant.kernel(by_channel, outputs_first=True) / factor
        return tf.reshape(rounded, shape)


def inputs(affine: input_scaling.Affine | None, observations: NDArray[Any]) -> NDArray[np.float32]:
    """Returns raw observations [N, *shape] as the int8 model has them behind its scaling."""
    return affine.apply(observations) if affine else observations.astype(np.float32)
