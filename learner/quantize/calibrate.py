"""Calibration: the ranges that the int8 activations of a policy must hold, from one fp32 pass over observations.

The same pass gives the fp32 outputs that the gate compares with. `ptq` does more than that with a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.networks import layers
from learner.quantize import fp32, input_scaling, scales

FloatArray = NDArray[np.float32]
Method = Literal["minmax", "percentile", "mse"]

BYTES = (0.0, 255.0)
"""Scale 1 and zero point -128."""
_PERCENTILES = (0.05, 99.95)
_ROWS_MIN, _ROWS_MAX, _HELD_BACK_MIN = 64, 1024, 32
_MULTIPLICATIONS = 1 << 25  # in one pass: about a millisecond, three with all that is measured on the way
_AHEAD = 4
"""Behind convolutions, whose updates take long themselves, ranges that nobody waits for see so many times as much:
MinAtar's Space Invaders, whose best two actions are mostly near, needs it (docs/policy/quantization.md)."""
_SAMPLE = 1 << 14  # elements of a tensor that decide its least squared error
_SHRINKS = np.linspace(1.0, 0.3, 29)


@dataclass(frozen=True, slots=True)
class QuantParams:
    """The quantization parameters that a policy's int8 model is fitted to.

    Attributes:
        input: Lowest and highest input of the network, scaled as `affine` says.
        outputs: The same per layer with weights: behind ReLU, in front of tanh.
        affine: Per-feature scaling of the input; None where it has one range for all.
        factors: Per layer with weights but the last, what its output channels [c] are divided by, and the kernel behind
            multiplied: powers of two, so that the policy stays the same to the bit. `outputs` are meant divided. None
            divides nothing.
        means: Mean input of each layer with weights, per weight of an output, before any factor: biases make up for the
            rounding of the weights there. None leaves biases alone, as TFLiteConverter does.
        hysteresis: Whether a weight scale of the model that was written last stays while its weights fit. Scales are
            then up to a quarter coarser than they need be, and differences between successive models are small.
    """

    input: scales.Range
    outputs: tuple[scales.Range, ...]
    affine: input_scaling.Affine | None
    factors: tuple[FloatArray, ...] | None = None
    means: tuple[FloatArray, ...] | None = None
    hysteresis: bool = False


def measure(
    policy: layers.PolicyLayers,
    observations: NDArray[Any],
    count: int,
    *,
    method: Method = "minmax",
    per_feature: bool = True,
    hi_lo: bool = False,
) -> tuple[QuantParams, FloatArray]:
    """Measures ranges, and answers, in one fp32 pass.

    Args:
        policy: Layers for raw observations.
        observations: Sample [N, *shape] in any dtype.
        count: The first so many observations set the ranges.
        method: 'minmax' covers all that was seen, as TFLiteConverter does; 'percentile' and 'mse' clip outliers.
        per_feature: Whether each input feature gets a range of its own; never in front of a convolution.
        hi_lo: Whether each of them is two int8 numbers (`input_scaling`), where it has a range of its own.

    Returns:
        The parameters, which are but ranges, and the fp32 outputs [N, n].
    """
    choose = METHODS[method]
    per_feature = per_feature and has_features(policy)
    affine = input_scaling.from_ranges(observations[:count], hi_lo=hi_lo) if per_feature else None
    entry = minmax(affine.apply(observations[:count])) if affine else unscaled_range(observations[:count])
    spans: list[scales.Range] = []
    outputs = fp32.outputs(policy, observations, lambda layer, x, linear, y: spans.append(choose(linear[:count])))
    return QuantParams(entry, tuple(spans), affine), outputs


class Sample(NamedTuple):
    """How many observations a policy is calibrated with, and how many others it is judged with."""

    calibration: int
    held_back: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.calibration + self.held_back

    def split(self, observations: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Divides a sample [N, *shape] of as many, or fewer; those to judge with are evenly spread in it."""
        n = len(observations)
        judging = max(n * self.held_back // self.total, min(_HELD_BACK_MIN, n // 2), 1)
        held_back = np.linspace(0, n - 1, judging, dtype=np.int64)
        return np.delete(observations, held_back, axis=0), observations[held_back]


def sample(policy: layers.PolicyLayers, *, ahead: bool) -> Sample:
    """Returns how many observations serve without holding training up for long.

    A wide network has many units per row: 64 rows of 2048 units fix a layer's range as well as 1024 rows of 128.

    Args:
        policy: The policy.
        ahead: Whether its ranges are made for the next one, while nobody waits.
    """
    rows = _MULTIPLICATIONS // sum(a.size for a in layers.arrays(policy).values())
    more = rows * _AHEAD if ahead and not has_features(policy) else rows
    calibration, waited_for = (min(_ROWS_MAX, max(_ROWS_MIN, n)) for n in (more, rows))
    return Sample(calibration, max(_HELD_BACK_MIN, waited_for // 4))


def has_features(policy: layers.PolicyLayers) -> bool:
    """True if each input feature can have a range of its own: not in front of a convolution, which shares weights."""
    return not isinstance(layers.weighted(policy)[0], layers.Conv2D)


def minmax(x: FloatArray) -> scales.Range:
    """Returns the lowest and the highest value: nothing that was seen is clipped."""
    return float(x.min()), float(x.max())


def unscaled_range(observations: NDArray[Any]) -> scales.Range:
    """Returns the range of an input that is not scaled: of bytes all that there are, so that int8 is the byte - 128."""
    return BYTES if observations.dtype == np.uint8 else minmax(observations.astype(np.float32))


def percentile(x: FloatArray) -> scales.Range:
    """Returns a range that leaves out the outermost 0.05 % of the values at either end."""
    low, high = np.percentile(x, _PERCENTILES)
    return float(low), float(high)


def least_squares(x: FloatArray) -> scales.Range:
    """Returns the range, shrunk evenly, of the least squared error after rounding to 256 levels and clipping."""
    low, high = minmax(x)
    flat = x.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLE)]

    def error(shrink: float) -> float:
        scale, zero_point = scales.activation_scale(low * shrink, high * shrink)
        restored = scales.to_grid(sample, scale, zero_point)
        return float(np.square(restored - sample).sum())

    best = min(_SHRINKS, key=error) if high > low else 1.0
    return low * float(best), high * float(best)


METHODS: dict[Method, Callable[[FloatArray], scales.Range]] = {
    "minmax": minmax,
    "percentile": percentile,
    "mse": least_squares,
}
