"""A policy as layers with frozen numbers: the form in which any algorithm hands it to quantization.

The first layer takes observations in raw units; whatever normaliser training used is folded in already. numpy only, so
that a policy can be rewritten into a model without touching TensorFlow.

Kernels have their outputs first, as in TFLite: each output's weights are contiguous, share a scale, and are written
into a model in this order. Transposing them cost more than all the arithmetic of quantizing them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Activation = Literal["none", "relu", "tanh"]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A dense layer: `activation(x @ kernel.T + bias)` on [B, in]; kernel [out, in], bias [out]."""

    kernel: FloatArray
    bias: FloatArray
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class Conv2D:
    """A convolution of [B, height, width, in] without padding; kernel [out, height, width, in], bias [out]."""

    kernel: FloatArray
    bias: FloatArray
    stride: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class Flatten:
    """A reshape from [B, ...] to [B, features], last axis fastest."""


@dataclass(frozen=True, slots=True, eq=False)
class Rescale:
    """The layer `x * gain + offset` on [B, n], each [n]: the last one of policies whose tanh bounds actions to -1..1.

    It stays in float, behind an int8 model's DEQUANTIZE: rounding it once more would only cost accuracy.
    """

    gain: FloatArray
    offset: FloatArray


Weighted = Dense | Conv2D
"""The layers that are trained, and quantized."""
Layer = Weighted | Flatten | Rescale
PolicyLayers = tuple[Layer, ...]


def arrays(policy: PolicyLayers) -> dict[str, FloatArray]:
    """Returns kernels and biases by stable name: `0/kernel`, `0/bias`, `2/kernel`, ..."""
    return {
        f"{i}/{name}": getattr(layer, name)
        for i, layer in enumerate(policy)
        if isinstance(layer, Weighted)
        for name in ("kernel", "bias")
    }


def with_arrays(policy: PolicyLayers, values: Iterable[FloatArray]) -> PolicyLayers:
    """Returns the policy with other numbers, given in the order of `arrays`."""
    remaining = iter(values)
    return tuple(
        replace(layer, kernel=next(remaining), bias=next(remaining)) if isinstance(layer, Weighted) else layer
        for layer in policy
    )


def weighted(policy: PolicyLayers) -> list[Weighted]:
    """Returns the layers that have weights, in order."""
    return [layer for layer in policy if isinstance(layer, Weighted)]


def finite(policy: PolicyLayers) -> bool:
    """Returns True if no weight or bias is NaN or infinite."""
    return all(bool(np.isfinite(array).all()) for array in arrays(policy).values())


def absorb(policy: PolicyLayers, gain: NDArray[Any], offset: NDArray[Any]) -> PolicyLayers:
    """Returns the policy g with g(x) = policy(x * gain + offset), by rewriting its first weights only.

    Exact but for float32 rounding: the sums are made in float64. Exact for convolutions too, as they do not pad.

    Args:
        policy: Layers, of which the first that has weights is rewritten.
        gain: Per observation element, any shape of that many elements; one element in front of a convolution.
        offset: As `gain`.
    """
    at, first = next((i, layer) for i, layer in enumerate(policy) if isinstance(layer, Weighted))
    kernel = first.kernel.astype(np.float64).reshape(len(first.kernel), -1)
    gain64, offset64 = np.asarray(gain, np.float64).reshape(-1), np.asarray(offset, np.float64).reshape(-1)
    assert gain64.size == 1 or isinstance(first, Dense)
    moved = kernel @ offset64 if offset64.size > 1 else kernel.sum(1) * offset64
    bias = first.bias + moved
    scaled = (kernel * gain64).reshape(first.kernel.shape)
    rewritten = replace(first, kernel=scaled.astype(np.float32), bias=bias.astype(np.float32))
    return (*policy[:at], rewritten, *policy[at + 1 :])


def centred(last: Dense, choices: Sequence[int] = ()) -> Dense:
    """Returns the layer with the mean over its outputs subtracted: same argmax, smallest range for eight bits.

    Args:
        last: The layer.
        choices: How many outputs belong together, where those are several groups: each has its own mean.
    """
    kernel, bias = last.kernel.astype(np.float64), last.bias.astype(np.float64)
    ends = np.cumsum(choices[:-1], dtype=int)
    kernels, biases = np.split(kernel, ends), np.split(bias, ends)
    return replace(
        last,
        kernel=np.concatenate([part - part.mean(0) for part in kernels]).astype(np.float32),
        bias=np.concatenate([part - part.mean() for part in biases]).astype(np.float32),
    )
