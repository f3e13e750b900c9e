"""Rounds weights to fewer than eight bits, for studies of how many a policy needs.

The rounded weights are still stored and run as int8 or floats: what changes is the policy, not its size or speed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors
from learner.networks import layers
from learner.quantize import scales

FloatArray = NDArray[np.float32]
BITS_MIN, BITS_MAX = 2, 8


def rounded(policy: layers.PolicyLayers, bits: int) -> layers.PolicyLayers:
    """Returns the policy with its kernels rounded to `bits` bits, one symmetric scale per output channel.

    Biases stay: int8 models hold them in 32 bits. With 8 bits nothing is done, because conversion to int8 does it.

    Args:
        policy: Layers as the converter gets them, so after `input_scaling.compensate`.
        bits: 2 (-1, 0 and 1 times the scale) to 8.

    Raises:
        ConfigError: So many bits are not offered.
    """
    if not BITS_MIN <= bits <= BITS_MAX:
        raise errors.ConfigError(f"weights of {bits} bits are not offered", todo=f"use {BITS_MIN} to {BITS_MAX}")
    if bits == BITS_MAX:
        return policy
    return tuple(
        replace(layer, kernel=_rounded(layer.kernel, bits)) if isinstance(layer, layers.Weighted) else layer
        for layer in policy
    )


def _rounded(kernel: FloatArray, bits: int) -> FloatArray:
    """Keeps the largest weight of each output channel as it is."""
    largest = np.abs(kernel).max(tuple(range(1, kernel.ndim)), keepdims=True)
    levels = 2 ** (bits - 1) - 1
    scale = np.where(largest > 0, largest, 1).astype(np.float64) / levels
    return scales.to_grid(kernel, scale, levels=(-levels, levels)).astype(np.float32)


def rounded_by_layer(policy: layers.PolicyLayers, bits: int) -> layers.PolicyLayers:
    """Returns the policy with its kernels rounded as QuaRL rounds them after training, for comparison with it.

    A step is (|min| + |max|) / 2^bits of a dense layer's weights, or of a convolution's by output channel
    (github.com/harvard-edge/QuaRL, baseline/new_ptq.py); biases and activations stay as they are.
    """
    return tuple(
        replace(layer, kernel=_rounded_by_range(layer.kernel, bits)) if isinstance(layer, layers.Weighted) else layer
        for layer in policy
    )


def _rounded_by_range(kernel: FloatArray, bits: int) -> FloatArray:
    axes = tuple(range(kernel.ndim)) if kernel.ndim == 2 else tuple(range(1, kernel.ndim))
    wide = kernel.astype(np.float64)
    span = np.abs(wide.min(axes, keepdims=True)) + np.abs(wide.max(axes, keepdims=True))
    step = np.where(span > 0, span, 1) / 2**bits
    rounded: FloatArray = (np.rint(wide / step) * step).astype(np.float32)
    return rounded
