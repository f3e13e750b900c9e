"""The one TensorFlow pass over a policy's layers, with a hook at each tensor that int8 would round.

The same pass trains weights as variables, evaluates targets, is traced with constants for conversion, and simulates
int8 by its hook (`fake_quant`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import tensorflow as tf

from learner.networks import convolutions, layers, stored

Tensor = Any  # TensorFlow ships no types


class Rounding(Protocol):
    """Simulates what int8 does to a tensor on its way through `run`."""

    def __call__(self, what: Literal["kernel", "linear", "tanh"], at: int, x: Tensor) -> Tensor:
        """Returns `x`, rounded or as it is.

        Args:
            what: A layer's kernel, its outputs behind ReLU but in front of tanh, or the outputs of tanh.
            at: Which of the layers with weights, from 0.
            x: The tensor; a kernel has its outputs first.
        """


def run(
    stack: layers.PolicyLayers,
    weights: Sequence[Tensor],
    x: Tensor,
    rounding: Rounding = lambda what, at, x: x,
    convolve: Callable[[Tensor, Tensor, int], Tensor] = convolutions.by_products,
) -> Tensor:
    """Runs `stack` on float32 x [B, ...] with `weights` in the order of `layers.arrays`."""
    remaining, at = iter(weights), -1
    for layer in stack:
        if isinstance(layer, layers.Flatten):
            x = tf.reshape(x, (-1, math.prod(x.shape[1:])))
            continue
        if isinstance(layer, layers.Rescale):
            x = x * layer.gain + layer.offset
            continue
        at += 1
        kernel = rounding("kernel", at, next(remaining))
        if isinstance(layer, layers.Dense):
            x = tf.matmul(x, kernel, transpose_b=True)
        else:
            x = convolve(x, kernel, layer.stride)
        x = tf.nn.bias_add(x, next(remaining))
        x = rounding("linear", at, tf.nn.relu(x) if layer.activation == "relu" else x)
        if layer.activation == "tanh":
            x = rounding("tanh", at, tf.tanh(x))
    return x


def run_stored(
    stack: layers.PolicyLayers, weights: Sequence[Tensor], x: Tensor, rounding: Rounding = lambda what, at, x: x
) -> Tensor:
    """Does what `run` does with weights as training stores them; XLA takes the transposing into the products."""
    arrays = layers.arrays(stack).values()
    turned = [tf.transpose(w) if stored.is_turned(a.shape) else w for w, a in zip(weights, arrays, strict=True)]
    return run(stack, turned, x, rounding)
