"""Chooses the scales of int8: of activations by their range, of weights by their size; with hysteresis where asked.

As TFLiteConverter chooses them, in float32 throughout (tensorflow/compiler/mlir/quantization/common/quantization_lib,
`legacy_float_scale`):

    weights      scale = 2 max|w| / 254
    bias         scale = input scale * weight scale
    activations  range widened to include 0; scale = (high - low) / 255, zero point = round(-128 - low / scale)

With hysteresis a scale stays from one policy to the next while what it is for still fits: fresh scales change in all
their digits with every publish, and shift every weight with them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors

FloatArray = NDArray[np.float32]
Range = tuple[float, float]
"""Lowest and highest value of a tensor."""

SLACK, _HEADROOM = 1.25, 1.06
"""The most by which a kept range may be too wide, and the least by which a new one is made wider than needed."""
_GRAIN = 0.125
"""Step of biases, as a share of a level of the output. Rounding the output costs eight times as much."""
_NEAR_ZERO = 1e-6
"""Weight ranges up to this are widened to it by the converter."""


class Unmapped(Exception):
    """A policy or a converted graph is not what templates are for: TFLiteConverter has to make the model. Says why."""


def activation_scale(low: float, high: float) -> tuple[np.float32, int]:
    """Returns the scale and the zero point of an int8 activation.

    Raises:
        PolicyError: The range is NaN or infinite.
        Unmapped: The range is nothing but 0.
    """
    low32, high32 = np.float32(min(low, 0.0)), np.float32(max(high, 0.0))
    scale = (high32 - low32) / np.float32(255)
    check_finite(float(scale), "activations")
    if scale == 0:
        raise Unmapped("a layer puts out nothing but zeros")
    zero_point = float(np.float32(-128 - float(low32) / float(scale)))
    return scale, min(127, max(-128, int(math.copysign(math.floor(abs(zero_point) + 0.5), zero_point))))


def write_weight_scales(scale: FloatArray, largest: FloatArray, *, hysteresis: bool) -> FloatArray:
    """Writes the scale(s) of weights whose sizes reach up to `largest`.

    Args:
        scale: The scales of the policy before, which are overwritten where they do not serve.
        largest: Largest size of the weights of each scale.
        hysteresis: Whether a scale stays while it is large enough, and at most a quarter too large.

    Returns:
        The sizes that the scales can hold.
    """
    if 2 * largest.min() <= _NEAR_ZERO:
        largest = np.where(2 * largest <= _NEAR_ZERO, np.maximum(largest, np.float32(_NEAR_ZERO / 2)), largest)
    if not hysteresis:
        scale[:] = (largest + largest) / np.float32(254)
        return largest
    held = scale * np.float32(127)
    stays = (largest <= held) & (held <= SLACK * largest)
    if not stays.all():
        scale[:] = np.where(stays, scale, _with_headroom(largest / np.float32(127)))
    return scale * np.float32(127)


def range_with_hysteresis(span: Range, kept: Range | None) -> Range:
    """Returns the range kept from an earlier policy where it serves for `span`; else that with some headroom."""
    low, high = min(span[0], 0.0), max(span[1], 0.0)  # as `activation_scale` widens it
    if kept and kept[0] <= low and high <= kept[1] and kept[1] - kept[0] <= SLACK * (high - low):
        return kept
    width = high - low
    scale = _with_headroom(np.array([width / 255], np.float32))
    grown = float(scale[0]) * 255 / width if width else 1.0
    return grown * low, grown * high


def _with_headroom(scale: FloatArray) -> FloatArray:
    """Returns scales that will do for what grows a little, with four significant bits.

    So has, in eight bits, the product of two of them, which is a bias's scale: of the four bytes of each, no more than
    two ever differ from one policy to the next.
    """
    significand, exponent = np.frexp(scale * np.float32(_HEADROOM))
    coarse: FloatArray = np.ldexp(np.ceil(significand * 16) / 16, exponent)
    return coarse


def coarse_bias(bias: FloatArray, level: FloatArray) -> FloatArray:
    """Rounds biases to powers of two well below a `level` of the output: less is noise, and patches carry it."""
    grain: FloatArray = np.maximum(np.exp2(np.floor(np.log2(level * np.float32(_GRAIN)))), 1)
    coarse: FloatArray = np.rint(bias / grain) * grain
    return coarse


def inverse(scale: FloatArray) -> FloatArray:
    """Returns 1 / scale, divided in float64 and then rounded, as the converter does."""
    return (1.0 / scale.astype(np.float64)).astype(np.float32)


def to_grid(x: NDArray[Any], scale: Any, zero_point: int = 0, levels: tuple[int, int] = (-128, 127)) -> NDArray[Any]:
    """Simulates quantization: returns `x` rounded to `levels` steps around the zero point, in the units it had."""
    low, high = levels
    restored: NDArray[Any] = np.clip(np.rint(x / scale), low - zero_point, high - zero_point) * scale
    return restored


def check_finite(largest: float, what: str) -> None:
    """Refuses numbers whose largest size is `largest`: NaN if one of them is, because numpy's maxima pass it on.

    Raises:
        PolicyError: They are not finite.
    """
    if not math.isfinite(largest):
        raise errors.PolicyError(
            f"{what} of the policy are NaN or infinite",
            reason="not_finite",
            todo="training has diverged: lower learning_rate or max_grad_norm and start from an older checkpoint",
        )
