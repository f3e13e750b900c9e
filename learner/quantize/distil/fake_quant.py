"""What int8 does to numbers, in float and with gradients: TensorFlow's fake-quant operations with TFLite's conventions.

Rounding passes gradients on unchanged and clipping stops them (straight-through, Bengio et al. 2013; simulated
quantization as in Jacob et al. 2018, https://arxiv.org/abs/1712.05877).
"""

from __future__ import annotations

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


class Through(Protocol):
    """What happens to a tensor that int8 would round, on its way from one operation to the next."""

    def __call__(self, name: str, x: Tensor, limits: Range | None = None) -> Tensor:
        """Returns `x` rounded, or as it is.

        Args:
            name: Of the tensor; the same in every pass.
            x: The tensor.
            limits: Its range, where TFLite fixes one.
        """


def untouched(name: str, x: Tensor, limits: Range | None = None) -> Tensor:
    """A `Through` that leaves numbers alone."""
    return x
