"""Ranges that the int8 activations of a policy must hold, from one batched fp32 pass over observations.

The same pass gives the exact outputs that the gate compares with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from learner.networks import layers
from learner.quantize import exact, input_scaling, requantize

FloatArray = NDArray[np.float32]
Method = Literal["minmax", "percentile", "mse"]

_PERCENTILES = (0.05, 99.95)
_ROWS_MIN, _ROWS_MAX, _HELD_BACK_MIN = 64, 1024, 32
_MULTIPLICATIONS = 1 << 25  # of a pass: about a millisecond, and with all that is measured on the way three
_SAMPLE = 1 << 14  # elements of a tensor that decide its least squared error
_SHRINKS = np.linspace(1.0, 0.3, 29)


def measure(
    policy: layers.PolicyLayers,
    observations: NDArray[Any],
    rows: int,
    *,
    method: Method = "minmax",
    per_feature: bool = True,
    split: bool = False,
) -> tuple[requantize.Ranges, FloatArray]:
    """Runs the policy once.

    Args:
        policy: Layers for raw observations.
        observations: Sample [N, *shape] in any dtype.
        rows: The first so many observations set the ranges.
        method: 'minmax' covers all that was seen, as TFLiteConverter does; 'percentile' and 'mse' clip outliers.
        per_feature: Whether each input feature gets a range of its own; never in front of a convolution.
        split: Whether each of them is two int8 numbers (`fold`), where it has a range of its own.

    Returns:
        The ranges, and the fp32 outputs [N, n].
    """
    choose = METHODS[method]
    scales = per_feature and scales_features(policy)
    affine = input_scaling.from_ranges(observations[:rows], split=split) if scales else None
    entry = minmax(affine.apply(observations[:rows]) if affine else observations[:rows].astype(np.float32))
    spans: list[requantize.Range] = []
    outputs = exact.outputs(policy, observations, lambda layer, x, linear, y: spans.append(choose(linear[:rows])))
    return requantize.Ranges(entry, tuple(spans), affine), outputs


def rows(policy: layers.PolicyLayers) -> int:
    """How many observations to draw for `split` without holding training up for long.

    A wide network has many units per row: 64 rows of 2048 units fix a layer's range as well as 1024 rows of 128.
    """
    weights = sum(a.size for a in layers.arrays(policy).values())
    calibration = min(_ROWS_MAX, max(_ROWS_MIN, _MULTIPLICATIONS // weights))
    return calibration + max(_HELD_BACK_MIN, calibration // 4)


def split(observations: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Most of the sample [N, *shape], to calibrate with; and the rest, evenly spread over it, to judge with."""
    total = len(observations)
    held_back = np.linspace(0, total - 1, max(total // 5, min(_HELD_BACK_MIN, total // 2), 1), dtype=np.int64)
    return np.delete(observations, held_back, axis=0), observations[held_back]


def scales_features(policy: layers.PolicyLayers) -> bool:
    """Whether each input feature can have a range of its own: not in front of a convolution, which shares weights."""
    return not isinstance(layers.weighted(policy)[0], layers.Conv2D)


def minmax(x: FloatArray) -> requantize.Range:
    """Lowest and highest value: nothing that was seen is clipped."""
    return float(x.min()), float(x.max())


def percentile(x: FloatArray) -> requantize.Range:
    """All but the outermost 0.05 % of the values at either end."""
    low, high = np.percentile(x, _PERCENTILES)
    return float(low), float(high)


def least_squares(x: FloatArray) -> requantize.Range:
    """The range, shrunk evenly, that leaves the least squared error after rounding to 256 levels and clipping."""
    low, high = minmax(x)
    flat = x.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLE)]

    def error(shrink: float) -> float:
        scale, zero_point = requantize.activation_scale(low * shrink, high * shrink)
        restored = (np.clip(np.rint(sample / scale) + zero_point, -128, 127) - zero_point) * scale
        return float(np.square(restored - sample).sum())

    best = min(_SHRINKS, key=error) if high > low else 1.0
    return low * float(best), high * float(best)


METHODS: dict[Method, Callable[[FloatArray], requantize.Range]] = {
    "minmax": minmax,
    "percentile": percentile,
    "mse": least_squares,
}
