"""Per-feature scaling of an int8 model's input, and hi/lo inputs.

An int8 input tensor has a single scale: a feature that moves by 0.2 beside one that moves by 20 keeps three levels.
So each feature is brought to the same range in float before it is quantized (`tflite.graph_edits`), and the first
layer's weights undo the scaling (`compensate`). The model then still answers for raw observations, and the two extra
float operations cost 0.1 us (both are delegated).

A continuous action follows its observation closely, and 255 levels of a feature are then too few: a policy that turns
from one end of its action to the other within a twentieth of a feature's range jumps by 8 % with every level. With
`hi_lo` a feature arrives as two int8 numbers: hi, rounded, and lo, LO_GAIN times what rounding took away, in two
columns of the first kernel. That is twelve bits of observation through an int8 graph. A third fewer choices differ from
fp32's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.networks import layers
from learner.quantize import scales

FloatArray = NDArray[np.float32]

ENDS = (-1.0, 127 / 128)
"""The range of a scaled feature: 255 steps, of which 128 make 1."""
STEP = 1 / 128
"""The distance between two levels of a scaled feature."""
LO_GAIN = 16
"""The factor that gives what rounding took away, at most half a step, 16 levels; its weights are a 16th as large."""
_HALF_RANGE_FLOOR = 1e-3
"""Relative to its size, how far a feature that stood still during calibration may later move unclipped."""


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """`x * gain + offset` per observation element, in the observation's shape; `hi_lo` doubles the last axis."""

    gain: FloatArray
    offset: FloatArray
    hi_lo: bool = False

    def apply(self, observations: NDArray[Any]) -> FloatArray:
        """Scales observations [N, *shape] just as the model with this scaling does, in float32."""
        scaled: FloatArray = observations.astype(np.float32) * self.gain + self.offset
        if not self.hi_lo:
            return scaled
        rounded = scales.to_grid(scaled, np.float32(STEP))
        return np.concatenate([rounded, (scaled - rounded) * np.float32(LO_GAIN)], axis=-1)


def from_ranges(observations: NDArray[Any], *, hi_lo: bool = False) -> Affine:
    """Returns the scaling that brings every feature of the sample [N, *shape] to -1..127/128.

    Both ends are then levels of int8, so a feature that rests at one of them, such as a contact switch, has no rounding
    error. With -1..1 it had half a step, always of the same sign: on LunarLander that cost 7 % of the greedy actions.
    """
    return from_ends(observations.min(0), observations.max(0), hi_lo=hi_lo)


def from_ends(low: NDArray[Any], high: NDArray[Any], *, hi_lo: bool = False) -> Affine:
    """Returns the scaling of features that reach from `low` to `high`, both in the observation's shape."""
    low, high = low.astype(np.float64), high.astype(np.float64)
    middle = (high + low) / 2
    half = np.maximum((high - low) / 2, _HALF_RANGE_FLOOR * np.maximum(1.0, np.abs(middle)))
    gain = (ENDS[1] - ENDS[0]) / (2 * half)
    return Affine(gain.astype(np.float32), (ENDS[1] - (middle + half) * gain).astype(np.float32), hi_lo)


def compensate(policy: layers.PolicyLayers, affine: Affine) -> layers.PolicyLayers:
    """Returns the policy that takes scaled observations and answers as `policy` does for raw ones."""
    gain, offset = affine.gain.astype(np.float64), affine.offset.astype(np.float64)
    policy = layers.absorb(policy, 1 / gain, -offset / gain)
    if not affine.hi_lo:
        return policy
    at, first = next((i, layer) for i, layer in enumerate(policy) if isinstance(layer, layers.Dense))
    features = first.kernel.reshape(-1, *gain.shape)
    kernel = np.concatenate([features, features / np.float32(LO_GAIN)], axis=-1).reshape(first.bias.size, -1)
    return (*policy[:at], replace(first, kernel=kernel), *policy[at + 1 :])
