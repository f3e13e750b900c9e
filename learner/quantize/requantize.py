"""Writes a policy's numbers into a template, to the bit as TFLiteConverter would.

The converter's arithmetic, which is float32 throughout (tensorflow/compiler/mlir/quantization/common/quantization_lib,
`legacy_float_scale`), and rounds halves away from zero:

    weights      scale = 2 max|w| / 254, w8 = round(w * (1 / scale)); with one scale a tensor round(w * (127 / max|w|))
    bias         scale = input scale * weight scale, b32 = round(b * (1 / scale))
    activations  range widened to include 0; scale = (high - low) / 255, zero point = round(-128 - low / scale)

What touches every weight is in `kernels`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors
from learner.networks import layers
from learner.quantize import input_scaling, kernels, template

FloatArray = NDArray[np.float32]
Range = tuple[float, float]

SLACK, _HEADROOM = 1.25, 1.06
"""How much too wide a range may be that is held, and how much wider than needed at least one is made that is not."""
_GRAIN = 0.125
"""Of a level of the output: steady biases are multiples of that. Rounding the output costs eight times as much."""
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
        means: Mean input of each layer with weights, per weight of an output, before any factor: biases make up for the
            rounding of the weights there. None leaves biases alone, as TFLiteConverter does.
        steady: Whether a scale of the model that was written last stays while its weights fit. They are then up to a
            quarter coarser than they need be, and differences between successive models are small.
    """

    input: Range
    outputs: tuple[Range, ...]
    affine: input_scaling.Affine | None
    factors: tuple[FloatArray, ...] | None = None
    means: tuple[FloatArray, ...] | None = None
    steady: bool = False


OnWritten = Callable[[memoryview], object]
"""Takes the next bytes of a model, in their order, as soon as a piece of them is final."""
PIECE_BYTES = 2 << 20
"""The least that it is given at once, but for the last piece."""


def requantize(
    target: template.Template,
    policy: layers.PolicyLayers,
    ranges: Ranges,
    on_written: OnWritten = lambda piece: None,
) -> bytes:
    """Returns the template's model with the numbers of `policy`.

    Args:
        target: Of the policy's architecture; its bytes are overwritten.
        policy: Layers for raw observations.
        ranges: Of the same policy.
        on_written: Its pieces are views of `target`: good until that is written again.

    Raises:
        PolicyError: A weight or a range is NaN or infinite.
        Unmapped: A layer puts out nothing but zeros, or a bias overflows: the converter has ways of its own for these.
    """
    with np.errstate(all="ignore"):  # what is not finite is refused by name
        return _requantize(target, policy, ranges, on_written)


def _requantize(target: template.Template, policy: layers.PolicyLayers, ranges: Ranges, on_written: OnWritten) -> bytes:
    if ranges.affine is not None:
        assert target.gain is not None
        assert target.offset is not None
        policy = input_scaling.compensate(policy, ranges.affine)
        target.gain[:], target.offset[:] = ranges.affine.gain.reshape(-1), ranges.affine.offset.reshape(-1)
    scale = _write_affine(target.inputs, ranges.input)
    weighted = layers.weighted(policy)
    factors: tuple[FloatArray | None, ...] = (None, *(ranges.factors or (None,) * (len(weighted) - 1)), None)
    final = _Final(target.model, on_written)
    for i, (layer, place, output) in enumerate(zip(weighted, target.layers, ranges.outputs, strict=True)):
        kernel = _Kernel.of(layer.kernel, factors[i], factors[i + 1], ranges.means[i] if ranges.means else None)
        on_rows = functools.partial(final.rows_done, target.starts[i], kernel.weights.shape[1])
        excess = _write_weights(place, kernel, on_rows, per_channel=target.per_channel, steady=ranges.steady)
        place.bias_scale[:] = scale * place.weight_scale
        factor = factors[i + 1]
        bias = layer.bias if factor is None else layer.bias / factor
        if ranges.means:
            bias = bias - excess
        bias = bias * _inverse(place.bias_scale)
        if ranges.steady:
            bias = _grained(bias, activation_scale(*output)[0] / place.bias_scale)
        else:
            bias = _rounded(bias)
        check_finite(largest := float(np.abs(bias).max()), "weights")
        if largest >= 2.0**31:
            raise template.Unmapped("a bias is too large for 32 bits at its layer's scale")
        place.bias[:] = bias
        scale = _write_affine(place.outputs, output)
        if layer.activation == "tanh":
            scale = np.float32(1 / 128)
    final.up_to(len(target.model), least=1)
    return bytes(target.model)


class _Final:
    """Hands on a model's bytes as they become final.

    Args:
        model: Written in the order of its bytes.
        on_written: Takes them.
    """

    def __init__(self, model: bytearray, on_written: OnWritten) -> None:
        self._bytes = memoryview(model)
        self._on_written = on_written
        self._given = 0

    def rows_done(self, start: int | None, width: int, rows: int) -> None:
        """So many rows of a kernel of int8 that begins at `start` are final; None where it is unknown what else is.

        What little is left behind the last of them is no piece of its own: each costs a signature and a packet.
        """
        if start is not None and len(self._bytes) - (end := start + width * rows) >= PIECE_BYTES // 4:
            self.up_to(end, least=PIECE_BYTES)

    def up_to(self, end: int, *, least: int) -> None:
        """All before `end` is; waits until that is `least` more than was given."""
        if end - self._given >= least:
            self._on_written(self._bytes[self._given : end])
            self._given = end


def activation_scale(low: float, high: float) -> tuple[np.float32, int]:
    """Scale and zero point of an int8 activation.

    Raises:
        PolicyError: The range is NaN or infinite.
        Unmapped: The range is nothing but 0.
    """
    low32, high32 = np.float32(min(low, 0.0)), np.float32(max(high, 0.0))
    scale = (high32 - low32) / np.float32(255)
    check_finite(float(scale), "activations")
    if scale == 0:
        raise template.Unmapped("a layer puts out nothing but zeros")
    zero_point = float(np.float32(-128 - float(low32) / float(scale)))
    return scale, min(127, max(-128, int(math.copysign(math.floor(abs(zero_point) + 0.5), zero_point))))


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


def _write_affine(places: tuple[template.Affine, ...], span: Range) -> np.float32:
    """Returns the scale that it wrote."""
    scale, zero_point = activation_scale(*span)
    for place in places:
        place.scale[:], place.zero_point[:] = scale, zero_point
    return scale


@dataclass(frozen=True, slots=True, eq=False)
class _Kernel:
    """A kernel [outputs, inputs], by what its columns are multiplied and its rows divided, and its mean input."""

    weights: FloatArray
    columns: FloatArray
    divisors: FloatArray | None
    mean: FloatArray

    @classmethod
    def of(
        cls, kernel: FloatArray, columns: FloatArray | None, divisors: FloatArray | None, mean: FloatArray | None
    ) -> _Kernel:
        """None changes nothing, and a mean that is None makes up for no rounding."""
        weights = np.ascontiguousarray(kernel.reshape(len(kernel), -1), np.float32)
        inputs = weights.shape[1]
        # Behind a convolution each channel's factor applies at every place of the kernel
        tiled = np.ones(inputs, np.float32) if columns is None else np.tile(columns, inputs // columns.size)
        return cls(weights, tiled, divisors, np.zeros(0, np.float32) if mean is None else mean / tiled)

    def bands(self) -> list[slice]:
        """Rows of a piece each."""
        height = max(1, PIECE_BYTES // self.weights.shape[1])
        return [slice(row, min(row + height, len(self.weights))) for row in range(0, len(self.weights), height)]

    def limit(self, band: slice) -> FloatArray:
        """Largest size in each of these rows."""
        limit = np.empty(band.stop - band.start, np.float32)
        kernels.measure(self.weights[band], self.columns, limit)
        return limit if self.divisors is None else limit / self.divisors[band]

    def write(
        self, weights: NDArray[np.int8], which: slice | NDArray[np.int64], inverse: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Writes these rows to `weights`, scaled by `inverse` and rounded.

        Returns:
            By how much that raises their outputs, and their `limit`.
        """
        factors = inverse if self.divisors is None else inverse / self.divisors[which]
        raised, limit = np.empty((2, len(inverse)), np.float32)
        kernels.write(self.weights[which], self.columns, factors, self.mean, weights, raised, limit)
        return raised / inverse, limit if self.divisors is None else limit / self.divisors[which]


def _write_weights(
    place: template.Place, kernel: _Kernel, on_rows: Callable[[int], object], *, per_channel: bool, steady: bool
) -> FloatArray:
    """Writes int8 weights and their scale(s). `on_rows` is told how many rows are done.

    Returns:
        By how much rounding raises each output at the mean input; 0 where no mean is given.
    """
    bands = kernel.bands()
    if not per_channel:
        largest = np.concatenate([kernel.limit(band) for band in bands]).max(keepdims=True)
        largest = _write_scale(place.weight_scale, largest, steady=steady)
        inverse = np.full(len(kernel.weights), np.float32(127) / largest[0])
    raised = []
    for band in bands:
        if per_channel:
            raised.append(_write_band(place, kernel, band, steady=steady))
        else:
            raised.append(kernel.write(place.weights[band], band, inverse[band])[0])
        on_rows(band.stop)
    check_finite(float(place.weight_scale.max()), "weights")
    return np.concatenate(raised)


def _write_band(place: template.Place, kernel: _Kernel, band: slice, *, steady: bool) -> FloatArray:
    """As `_write_weights`, of some rows. Most steady scales stay, so they are tried before anything is measured."""
    scale, weights = place.weight_scale[band], place.weights[band]
    if not steady:
        _write_scale(scale, kernel.limit(band), steady=False)
        return kernel.write(weights, band, _inverse(scale))[0]
    before = scale.copy()
    raised, limit = kernel.write(weights, band, _inverse(before))
    _write_scale(scale, limit, steady=True)
    changed = np.flatnonzero(scale != before)
    again = weights[changed]
    raised[changed], _ = kernel.write(again, band.start + changed, _inverse(scale[changed]))
    weights[changed] = again
    return raised


def _write_scale(place: NDArray[np.float32], limit: FloatArray, *, steady: bool) -> FloatArray:
    """Writes scale(s) for weights of up to `limit`; returns up to what they reach."""
    if 2 * limit.min() <= _NEAR_ZERO:
        limit = np.where(2 * limit <= _NEAR_ZERO, np.maximum(limit, np.float32(_NEAR_ZERO / 2)), limit)
    if not steady:
        place[:] = (limit + limit) / np.float32(254)
        return limit
    held = place * np.float32(127)
    stays = (limit <= held) & (held <= SLACK * limit)
    if not stays.all():
        place[:] = np.where(stays, place, roomy(limit / np.float32(127)))
    return place * np.float32(127)


def roomy(scale: FloatArray) -> FloatArray:
    """Scales that will do for what grows a little, with four significant bits.

    So is, in eight bits, the product of two of them, which is a bias's scale: of the four bytes of each, no more than
    two ever differ from one policy to the next.
    """
    significand, exponent = np.frexp(scale * np.float32(_HEADROOM))
    coarse: FloatArray = np.ldexp(np.ceil(significand * 16) / 16, exponent)
    return coarse


def _grained(bias: FloatArray, level: FloatArray) -> FloatArray:
    """Rounds biases to powers of two well below a `level` of the output: what is less is noise, and is sent too."""
    grain: FloatArray = np.maximum(np.exp2(np.floor(np.log2(level * np.float32(_GRAIN)))), 1)
    grained: FloatArray = np.rint(bias / grain) * grain
    return grained


def _inverse(scale: FloatArray) -> FloatArray:
    """1 / scale, divided in float64 and then rounded, as the converter does."""
    return (1.0 / scale.astype(np.float64)).astype(np.float32)


def _rounded(x: FloatArray) -> FloatArray:
    """Halves away from zero, as `kernels.write`."""
    rounded: FloatArray = np.trunc(x + np.copysign(kernels.BELOW_HALF, x))
    return rounded
