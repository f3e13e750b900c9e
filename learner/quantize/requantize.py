"""Writes a policy's numbers into a template, to the bit as TFLiteConverter would.

The converter's arithmetic, which is float32 throughout (tensorflow/compiler/mlir/quantization/common/quantization_lib,
`legacy_float_scale`), and rounds halves away from zero:

    weights      scale = 2 max|w| / 254, w8 = round(w * (1 / scale)); with one scale a tensor round(w * (127 / max|w|))
    bias         scale = input scale * weight scale, b32 = round(b * (1 / scale))
    activations  range widened to include 0; scale = (high - low) / 255, zero point = round(-128 - low / scale)

Weights are taken in blocks of rows that fit the cache: each block is scaled, rounded, narrowed and transposed (TFLite
wants [outputs, inputs]) while it is there.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from broker import errors
from learner import layers
from learner.quantize import fold, template

FloatArray = NDArray[np.float32]
Range = tuple[float, float]

_BAND_ROWS = 64
"""At least so many rows at a time: they become one cache line of the transposed weights."""
_BAND = 1 << 15
"""Weights at a time in narrow kernels: with what is made of them they fit the second-level cache."""
_THREADED_WEIGHTS = 1 << 20
_THREADS = min(4, os.cpu_count() or 1)
SLACK, HEADROOM = 1.25, 1.06
"""How much too wide a range may be that is held, and how much wider than needed one is made that is not."""
_BELOW_HALF = np.uint32(0x3EFFFFFF)  # the float32 before 0.5: 0.5 itself would round 0.49999997 up to 1
_SIGN = np.uint32(0x80000000)
_NEAR_ZERO = 1e-6
"""Weight ranges up to this are widened to it by the converter."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """What a policy's int8 model is fitted to.

    Attributes:
        input: Lowest and highest input of the network, scaled as `affine` says.
        outputs: The same per layer with weights: behind ReLU, in front of tanh.
        affine: Per-feature scaling of the input; None where it has one range for all.
        factors: Per layer with weights but the last, what its output channels [c] are divided by, and the kernel behind
            multiplied: powers of two, so that the policy stays the same to the bit. `outputs` are meant divided. None
            divides nothing.
        means: Mean input of each layer with weights, per row of its kernel, before any factor: biases make up for the
            rounding of the weights there. None leaves biases alone, as TFLiteConverter does.
        steady: Whether a scale of the model that was written last stays while its weights fit. They are then up to a
            quarter coarser than they need be, and differences between successive models are small.
    """

    input: Range
    outputs: tuple[Range, ...]
    affine: fold.Affine | None
    factors: tuple[FloatArray, ...] | None = None
    means: tuple[FloatArray, ...] | None = None
    steady: bool = False


def requantize(target: template.Template, policy: layers.PolicyLayers, ranges: Ranges) -> bytes:
    """Returns the template's model with the numbers of `policy`.

    Args:
        target: Of the policy's architecture; its bytes are overwritten.
        policy: Layers for raw observations.
        ranges: Of the same policy.

    Raises:
        PolicyError: A weight or a range is NaN or infinite.
        Unmapped: A layer puts out nothing but zeros, or a bias overflows: the converter has ways of its own for these.
    """
    with np.errstate(all="ignore"):  # what is not finite is refused by name
        return _requantize(target, policy, ranges)


def _requantize(target: template.Template, policy: layers.PolicyLayers, ranges: Ranges) -> bytes:
    if ranges.affine is not None:
        assert target.gain is not None
        assert target.offset is not None
        policy = fold.compensate(policy, ranges.affine)
        target.gain[:], target.offset[:] = ranges.affine.gain.reshape(-1), ranges.affine.offset.reshape(-1)
    scale = _write_affine(target.inputs, ranges.input)
    weighted = layers.weighted(policy)
    factors: tuple[FloatArray | None, ...] = (None, *(ranges.factors or (None,) * (len(weighted) - 1)), None)
    for i, (layer, place, output) in enumerate(zip(weighted, target.layers, ranges.outputs, strict=True)):
        kernel = layer.kernel.reshape(-1, layer.kernel.shape[-1])
        mean = ranges.means[i] if ranges.means else None
        source = _Kernel(kernel, _tiled(factors[i], len(kernel)), factors[i + 1], mean)
        excess = _write_weights(place, source, per_channel=target.per_channel, steady=ranges.steady)
        place.bias_scale[:] = scale * place.weight_scale
        factor = factors[i + 1]
        bias = layer.bias if factor is None else layer.bias / factor
        if ranges.means:
            bias = bias - excess
        bias = _rounded(bias * _inverse(place.bias_scale), np.empty(bias.shape, np.uint32))
        _check_finite(largest := float(np.abs(bias).max()), "weights")
        if largest >= 2.0**31:
            raise template.Unmapped("a bias is too large for 32 bits at its layer's scale")
        place.bias[:] = bias
        scale = _write_affine(place.outputs, output)
        if layer.activation == "tanh":
            scale = np.float32(1 / 128)
    return bytes(target.model)


def activation_scale(low: float, high: float) -> tuple[np.float32, int]:
    """Scale and zero point of an int8 activation.

    Raises:
        PolicyError: The range is NaN or infinite.
        Unmapped: The range is nothing but 0.
    """
    low32, high32 = np.float32(min(low, 0.0)), np.float32(max(high, 0.0))
    scale = (high32 - low32) / np.float32(255)
    _check_finite(float(scale), "activations")
    if scale == 0:
        raise template.Unmapped("a layer puts out nothing but zeros")
    zero_point = float(np.float32(-128 - float(low32) / float(scale)))
    return scale, min(127, max(-128, int(math.copysign(math.floor(abs(zero_point) + 0.5), zero_point))))


def _check_finite(largest: float, what: str) -> None:
    """`largest` is NaN if any of the numbers is: numpy's maxima pass it on."""
    if not math.isfinite(largest):
        raise errors.PolicyError(
            f"{what} of the policy are NaN or infinite",
            reason="not_finite",
            todo="training has diverged: lower learning_rate or max_grad_norm and start from an older checkpoint",
        )


def _write_affine(places: tuple[template.Affine, ...], span: Range) -> np.float32:
    """Returns the scale that it wrote."""
    scale, zero_point = activation_scale(*span)
    for place in places:
        place.scale[:], place.zero_point[:] = scale, zero_point
    return scale


@dataclass(frozen=True, slots=True, eq=False)
class _Kernel:
    """A kernel [rows, columns] with what its rows are multiplied and its columns divided by, and its mean input."""

    weights: FloatArray
    rows: FloatArray | None
    columns: FloatArray | None
    mean: FloatArray | None

    def limit(self) -> FloatArray:
        """Largest size in each column."""
        limit: FloatArray = functools.reduce(np.maximum, _in_bands(self._limit, self.weights))
        if self.columns is not None:
            limit /= self.columns
        return limit

    def _limit(self, start: int, stop: int) -> FloatArray:
        """Of some rows."""
        if self.rows is None:
            weights = self.weights[start:stop]
            return cast(FloatArray, np.maximum(weights.max(0), -weights.min(0)))
        limit = np.zeros(self.weights.shape[1], np.float32)
        scratch = np.empty((_BAND_ROWS, len(limit)), np.float32)
        for row in range(start, stop, _BAND_ROWS):
            down = slice(row, min(row + _BAND_ROWS, stop))
            x = np.multiply(self.weights[down], self.rows[down, None], out=scratch[: down.stop - row])
            np.maximum(limit, np.abs(x, out=x).max(0), out=limit)
        return limit

    def write(self, weights: NDArray[np.int8], inverse: FloatArray) -> FloatArray:
        """Writes weights [columns, rows] scaled by `inverse`, rounded; returns by how much that raises the outputs."""
        factor = inverse if self.columns is None else inverse / self.columns
        excess: FloatArray = sum(_in_bands(functools.partial(self._write, weights, factor), self.weights))
        return excess / inverse

    def _write(self, weights: NDArray[np.int8], factor: FloatArray, start: int, stop: int) -> FloatArray | float:
        """Some rows."""
        height = min(stop - start, max(_BAND_ROWS, _BAND // len(factor)))
        scaled = np.empty((height, len(factor)), np.float32)
        signs, narrow = np.empty(scaled.shape, np.uint32), np.empty(scaled.shape, np.int8)
        excess: FloatArray | float = 0.0
        for row in range(start, stop, height):
            down = slice(row, min(row + height, stop))
            here = slice(down.stop - row)
            x = np.multiply(self.weights[down], factor, out=scaled[here])
            if self.rows is not None:
                x *= self.rows[down, None]
            if self.mean is None:
                narrow[here] = _rounded(x, signs[here])
            else:
                mean = self.mean[down] if self.rows is None else self.mean[down] / self.rows[down]
                exact = mean @ x
                narrow[here] = np.trunc(_rounded(x, signs[here]), out=x)
                excess = excess + (mean @ x - exact)
            weights[:, down] = narrow[here].T
        return excess


def _in_bands(work: Callable[[int, int], Any], kernel: FloatArray) -> list[Any]:
    """`work` on all rows; of a large kernel on as many parts as there are threads, at once.

    numpy lets go of Python's lock while it computes, and at this size comes back for it seldom enough.
    """
    rows = len(kernel)
    if kernel.size < _THREADED_WEIGHTS:
        return [work(0, rows)]
    step = -(-rows // _THREADS // _BAND_ROWS) * _BAND_ROWS
    return list(_pool().map(lambda start: work(start, min(start + step, rows)), range(0, rows, step)))


@functools.cache
def _pool() -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(_THREADS, "requantize")


def _write_weights(place: template.Place, kernel: _Kernel, *, per_channel: bool, steady: bool) -> FloatArray:
    """Writes int8 weights and their scale(s).

    Returns:
        By how much rounding raises each output at the mean input; 0 where no mean is given.
    """
    limit = kernel.limit()
    if not per_channel:
        limit = limit.max(keepdims=True)
    if 2 * limit.min() <= _NEAR_ZERO:
        limit = np.where(2 * limit <= _NEAR_ZERO, np.maximum(limit, np.float32(_NEAR_ZERO / 2)), limit)
    _check_finite(float(limit.max()), "weights")
    if steady:
        held = place.weight_scale * np.float32(127)
        limit = np.where((limit <= held) & (held <= SLACK * limit), held, HEADROOM * limit)
    scale = (limit + limit) / np.float32(254)
    # Where it is held, the product above may have lost the last bit
    place.weight_scale[:] = np.where(limit == held, place.weight_scale, scale) if steady else scale
    inverse = _inverse(place.weight_scale)
    if not per_channel:
        inverse = np.full(kernel.weights.shape[1], np.float32(127) / limit[0])
    return kernel.write(place.weights, inverse)


def _tiled(factor: FloatArray | None, rows: int) -> FloatArray | None:
    """Behind a convolution each channel's factor applies at every place of the kernel."""
    return None if factor is None else np.tile(factor, rows // factor.size)


def _inverse(scale: FloatArray) -> FloatArray:
    """1 / scale, divided in float64 and then rounded, as the converter does."""
    return (1.0 / scale.astype(np.float64)).astype(np.float32)


def _rounded(x: FloatArray, signs: NDArray[np.uint32]) -> FloatArray:
    """Makes truncation round halves away from zero: adds the float before 0.5 with the sign of x.

    Overwrites x, and `signs` of the same shape.
    """
    np.bitwise_and(x.view(np.uint32), _SIGN, out=signs)
    np.bitwise_or(signs, _BELOW_HALF, out=signs)
    return np.add(x, signs.view(np.float32), out=x)
