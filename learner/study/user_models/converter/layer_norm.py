"""Layer normalisation made of operations that have int8 kernels.

What TFLiteConverter makes of keras.layers.LayerNormalization is no full-integer graph: NEG (of the mean) has no int8
kernel and stays float. And the variance goes through one int8 tensor: it varies with the square of the activations, so
a deviation a sixteenth of the largest one seen has one level of 256 left. Two exact rewrites:

* `l2`: L2_NORMALIZATION of the centred activations. It sums squares in 32 bits, so no variance is ever rounded; epsilon
  enters as one more element, sqrt(n epsilon), which is cut off again. Its output has 1/128 as a fixed scale, which
  leaves 128 / sqrt(n) levels per standard deviation: 16 for 64 units, 8 for 256.
* `rsqrt`: mean, square, mean and RSQRT as in the formula, with SUB in place of NEG and ADD. Its variance is one int8
  tensor, but its output has a range of its own: better for wide layers whose deviation varies little.

A linear dense layer in front subtracts the mean in its own weights, so that no mean is rounded either.

In ai-edge-litert L2_NORMALIZATION and RSQRT run as built-in kernels and the rest by XNNPACK, in tflite-runtime all of
it is built-in. Mean error of the outputs relative to their range, two random hidden layers with normalisation, inputs
whose size varies by exp(s N(0, 1)), and no dense layer helping:

| | 64 units, s = 0.3 | 64, s = 1 | 256, s = 0.3 | 256, s = 1 |
|---|---|---|---|---|
| Keras's own | 0.5 % | 13 % | 0.6 % | 14 % |
| `rsqrt` | 0.6 % | 12 % | 0.7 % | 13 % |
| `l2` | 0.6 % | 4 % | 1.0 % | 5 % |
"""

from __future__ import annotations

import math
from typing import Any, Literal

import keras
import tensorflow as tf

from learner.networks import fake_quant

Form = Literal["l2", "rsqrt"]
FORMS: tuple[Form, ...] = ("l2", "rsqrt")
Tensor = Any  # TensorFlow ships no types


class IntegerLayerNormalization(keras.layers.Layer):
    """Does what a LayerNormalization layer over the last axis does, with that layer's weights.

    Args:
        original: The layer to replace.
        form: Which operations to use.
        centred: Inputs have mean 0 over the last axis already: the dense layer before it sees to that.

    Attributes:
        through: What happens to each tensor inside that int8 rounds.
    """

    def __init__(self, original: Any, form: Form, *, centred: bool) -> None:
        super().__init__(name=f"{original.name}_{form}")
        self.original = original
        self._form = form
        self._centred = centred
        self.through: fake_quant.Through = fake_quant.untouched

    @staticmethod
    def fits(layer: Any) -> bool:
        """Returns True for layer normalisation over the last axis."""
        return (
            isinstance(layer, keras.layers.LayerNormalization)
            and list(layer.axis) == [-1]
            and not getattr(layer, "rms_scaling", False)
        )

    def call(self, inputs: Tensor) -> Tensor:
        """Normalises [..., n]."""
        x = inputs
        if not self._centred:
            mean = self.through("mean", tf.reduce_mean(x, axis=-1, keepdims=True))
            x = self.through("centred", x - mean)
        x, factor = self._by_l2(x) if self._form == "l2" else self._by_rsqrt(x)
        gamma, beta = self.original.gamma, self.original.beta
        scale = factor if gamma is None else self.through("gamma", factor * tf.convert_to_tensor(gamma))
        x = x * scale
        if beta is not None:
            x = self.through("scaled", x) + self.through("beta", tf.convert_to_tensor(beta))
        return x

    def _by_l2(self, centred: Tensor) -> tuple[Tensor, float]:
        width = centred.shape[-1]
        epsilon = math.sqrt(width * self.original.epsilon)
        padding = [[0, 0]] * (len(centred.shape) - 1) + [[0, 1]]
        padded = self.through("padded", tf.pad(centred, padding, constant_values=epsilon))
        # An epsilon that never acts is what the converter knows L2_NORMALIZATION by.
        unit = self.through("unit", tf.nn.l2_normalize(padded, -1, epsilon=1e-12), fake_quant.L2_RANGE)
        return unit[..., :width], math.sqrt(width)

    def _by_rsqrt(self, centred: Tensor) -> tuple[Tensor, float]:
        squares = self.through("squares", centred * centred)
        variance = self.through("variance", tf.reduce_mean(squares, axis=-1, keepdims=True))
        inverse = self.through("inverse", tf.math.rsqrt(self.through("shifted", variance + self.original.epsilon)))
        return self.through("normalised", centred * inverse), 1.0
