"""Simulated quantization: what int8 does to numbers, in float, with gradients, for training.

Rounding passes gradients on unchanged (straight-through, Bengio et al. 2013; simulated quantization as in Jacob et al.
2018, https://arxiv.org/abs/1712.05877). `kernel` and `activation` are TensorFlow's fake-quant operations with TFLite's
conventions; clipping stops gradients there. `by_largest` lets gradients reach the step, too, and clips nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

Tensor = Any  # TensorFlow ships no types
Range = tuple[Any, Any]
"""Lowest and highest value of a tensor: floats or scalar tensors."""

TANH_RANGE = L2_RANGE = (-1.0, 127 / 128)
"""TFLite fixes the output of TANH and L2_NORMALIZATION at scale 1/128 and zero point 0."""
_TINY = 1e-30  # a channel of zeros needs a range too


def kernel(weights: Tensor, bits: int = 8, *, outputs_first: bool = False) -> Tensor:
    """Rounds weights to -127..127 (or what fewer bits hold) times a scale of each output channel.

    Args:
        weights: [..., channels], as Keras has them; or with `outputs_first` [channels, ...], as `layers` has.
        bits: 2 to 8.
        outputs_first: Where the channels are.
    """
    if outputs_first:
        flat = tf.transpose(tf.reshape(weights, (weights.shape[0], -1)))
    else:
        flat = tf.reshape(weights, (-1, weights.shape[-1]))
    largest = tf.maximum(tf.stop_gradient(tf.reduce_max(tf.abs(flat), axis=0)), _TINY)
    rounded = tf.quantization.fake_quant_with_min_max_vars_per_channel(
        flat, -largest, largest, num_bits=bits, narrow_range=True
    )
    return tf.reshape(tf.transpose(rounded) if outputs_first else rounded, weights.shape)


def activation(x: Tensor, limits: Range) -> Tensor:
    """Rounds to 256 levels between the limits, and clips to them; zero is always a level."""
    low, high = (tf.cast(limit, tf.float32) for limit in limits)
    return tf.quantization.fake_quant_with_min_max_vars(x, tf.minimum(low, 0.0), tf.maximum(high, _TINY))


def by_largest(x: Tensor, levels: int, axis: tuple[int, ...] | None = None) -> Tensor:
    """Rounds to steps of which `levels` make the largest size along `axis`.

    Gradients pass through, and to the step as in Esser et al. 2020, https://arxiv.org/abs/1902.08153: otherwise a layer
    could make its rounding seem small by growing, where the step grows with it. They are written out: what TensorFlow
    derives looks for equally large elements, to share the step's gradient out among them.
    """

    @tf.custom_gradient
    def rounded(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        size = tf.abs(x)
        largest = tf.reduce_max(size, axis, keepdims=True)
        step = tf.maximum(largest, _TINY) / levels
        scaled = x / step
        error = tf.round(scaled) - scaled

        def gradient(upstream: Tensor) -> Tensor:
            to_step = upstream * error
            total = _column_sums(to_step) if axis == (0,) else tf.reduce_sum(to_step, axis, keepdims=True)
            return upstream + tf.where(size == largest, tf.sign(x) * total / levels, 0.0)

        return x + step * error, gradient

    return rounded(x)


def _column_sums(x: Tensor) -> Tensor:
    """Returns the sums of x [N, M] over its rows: [M].

    As a product, since XLA takes a sum into the loop before it, and runs that down one column after the other: 220 us
    instead of 15 for 256x256. It does so with a single row of ones, too.
    """
    return tf.reduce_mean(tf.matmul(tf.ones((8, x.shape[0])), x), axis=0)


class Through(Protocol):
    """Simulates what int8 does to a tensor on its way from one operation to the next."""

    def __call__(self, name: str, x: Tensor, limits: Range | None = None) -> Tensor:
        """Returns `x` rounded, or as it is.

        Args:
            name: Name of the tensor; the same in every pass.
            x: The tensor.
            limits: Its range, where TFLite fixes one.
        """


def untouched(name: str, x: Tensor, limits: Range | None = None) -> Tensor:
    """Leaves numbers alone: the `Through` of fp32."""
    return x
