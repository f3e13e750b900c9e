"""Writes a policy's numbers into a template, to the bit as TFLiteConverter would.

`scales` chooses the scales; halves are rounded away from zero, in float32:

    weights      w8 = round(w * (1 / scale)); with one scale a tensor round(w * (127 / max|w|))
    bias         b32 = round(b * (1 / scale))

The loops over all weights are in `kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.networks import layers
from learner.quantize import calibrate, input_scaling, kernels, scales
from learner.quantize.tflite import template

FloatArray = NDArray[np.float32]

OnWritten = Callable[[memoryview], object]
"""A hook: gets the next bytes of a model, in their order, as soon as a piece of them is final."""
PIECE_BYTES = 2 << 20
"""The least bytes of a piece, but for the last one."""


def requantize(
    target: template.Template,
    policy: layers.PolicyLayers,
    params: calibrate.QuantParams,
    on_written: OnWritten = lambda piece: None,
) -> bytes:
    """Returns the template's model with the numbers of `policy`.

    Args:
        target: Template of the policy's architecture; its bytes are overwritten.
        policy: Layers for raw observations.
        params: What the model is fitted to.
        on_written: Its pieces are views of `target`: good until that is written again.

    Raises:
        PolicyError: A weight or a range is NaN or infinite.
        Unmapped: A layer puts out nothing but zeros, or a bias overflows: the converter has ways of its own for these.
    """
    with np.errstate(all="ignore"):  # what is not finite is refused by name
        return _requantize(target, policy, params, on_written)


def _requantize(
    target: template.Template, policy: layers.PolicyLayers, params: calibrate.QuantParams, on_written: OnWritten
) -> bytes:
    if params.affine is not None:
        assert target.gain is not None
        assert target.offset is not None
        policy = input_scaling.compensate(policy, params.affine)
        target.gain[:], target.offset[:] = params.affine.gain.reshape(-1), params.affine.offset.reshape(-1)
    if target.rescale is not None:
        target.rescale.write(policy[-1])
    scale = _write_activation(target.inputs, params.input)
    weighted = layers.weighted(policy)
    factors: tuple[FloatArray | None, ...] = (None, *(params.factors or (None,) * (len(weighted) - 1)), None)
    final = Final(target.model, on_written)
    for i, (layer, place, output) in enumerate(zip(weighted, target.layers, params.outputs, strict=True)):
        kernel = _Kernel.of(layer.kernel, factors[i], factors[i + 1], params.means[i] if params.means else None)
        on_rows = functools.partial(final.rows_done, target.starts[i], kernel.weights.shape[1])
        excess = _write_weights(place, kernel, on_rows, per_channel=target.per_channel, hysteresis=params.hysteresis)
        place.bias_scale[:] = scale * place.weight_scale
        factor = factors[i + 1]
        bias = layer.bias if factor is None else layer.bias / factor
        if params.means:
            bias = bias - excess
        bias = bias * scales.inverse(place.bias_scale)
        if params.hysteresis:
            bias = scales.coarse_bias(bias, scales.activation_scale(*output)[0] / place.bias_scale)
        else:
            bias = kernels.half_away(bias)
        scales.check_finite(largest := float(np.abs(bias).max()), "weights")
        if largest >= 2.0**31:
            raise scales.Unmapped("a bias is too large for 32 bits at its layer's scale")
        place.bias[:] = bias
        scale = _write_activation(place.outputs, output)
        if layer.activation == "tanh":
            scale = np.float32(1 / 128)
    final.all_done()
    return bytes(target.model)


class Final:
    """Hands on a model's bytes as they become final.

    Args:
        model: Bytes that are written in their order.
        on_written: Gets the pieces.
        least: Bytes of a piece, but for the last one.
    """

    def __init__(self, model: bytearray | memoryview, on_written: OnWritten, least: int = PIECE_BYTES) -> None:
        self._bytes = memoryview(model)
        self._on_written = on_written
        self._least = least
        self._given = 0

    def rows_done(self, start: int | None, width: int, rows: int) -> None:
        """Notes that so many rows of a kernel that begins at `start` are final; of None nothing is known.

        What little is left behind the last of them is no piece of its own: each costs a signature and a packet.
        """
        if start is not None and len(self._bytes) - (end := start + width * rows) >= self._least // 4:
            self._up_to(end, self._least)

    def all_done(self) -> None:
        """Hands on what is left."""
        self._up_to(len(self._bytes), 1)

    def _up_to(self, end: int, least: int) -> None:
        if end - self._given >= least:
            self._on_written(self._bytes[self._given : end])
            self._given = end


def _write_activation(places: tuple[template.TensorScale, ...], span: scales.Range) -> np.float32:
    """Writes the scale and zero point of a range; returns the scale."""
    scale, zero_point = scales.activation_scale(*span)
    for place in places:
        place.scale[:], place.zero_point[:] = scale, zero_point
    return scale


@dataclass(frozen=True, slots=True, eq=False)
class _Kernel:
    """A kernel [outputs, inputs], the factors of its columns, the divisors of its rows, and its mean input."""

    weights: FloatArray
    columns: FloatArray
    divisors: FloatArray | None
    mean: FloatArray

    @classmethod
    def of(
        cls, kernel: FloatArray, columns: FloatArray | None, divisors: FloatArray | None, mean: FloatArray | None
    ) -> _Kernel:
        """Makes one of a layer's kernel. None changes nothing, and without a mean no bias is corrected."""
        weights = np.ascontiguousarray(kernel.reshape(len(kernel), -1), np.float32)
        inputs = weights.shape[1]
        # Behind a convolution each channel's factor applies at every place of the kernel
        tiled = np.ones(inputs, np.float32) if columns is None else np.tile(columns, inputs // columns.size)
        return cls(weights, tiled, divisors, np.zeros(0, np.float32) if mean is None else mean / tiled)

    def bands(self) -> list[slice]:
        """Returns slices of rows, a piece each."""
        height = max(1, PIECE_BYTES // self.weights.shape[1])
        return [slice(row, min(row + height, len(self.weights))) for row in range(0, len(self.weights), height)]

    def limit(self, band: slice) -> FloatArray:
        """Returns the largest size in each of these rows."""
        limit = np.empty(band.stop - band.start, np.float32)
        kernels.row_maxima(self.weights[band], self.columns, limit)
        if self.divisors is not None:
            limit /= self.divisors[band]
        return limit

    def write(
        self, weights: NDArray[np.int8], which: slice | NDArray[np.int64], inverse: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Writes these rows to `weights`, scaled by `inverse` and rounded.

        Returns:
            How much rounding raises their outputs, and their `limit`.
        """
        factors = inverse if self.divisors is None else inverse / self.divisors[which]
        raised, limit = np.empty((2, len(inverse)), np.float32)
        kernels.round_rows(self.weights[which], self.columns, factors, self.mean, weights, raised, limit)
        return raised / inverse, limit if self.divisors is None else limit / self.divisors[which]


def _write_weights(
    place: template.Place, kernel: _Kernel, on_rows: Callable[[int], object], *, per_channel: bool, hysteresis: bool
) -> FloatArray:
    """Writes int8 weights and their scale(s), and tells `on_rows` how many rows are done.

    Returns:
        How much rounding raises each output at the mean input; 0 without a mean.
    """
    bands = kernel.bands()
    if not per_channel:
        largest = np.concatenate([kernel.limit(band) for band in bands]).max(keepdims=True)
        largest = scales.write_weight_scales(place.weight_scale, largest, hysteresis=hysteresis)
        inverse = np.full(len(kernel.weights), np.float32(127) / largest[0])
    raised = []
    for band in bands:
        if per_channel:
            raised.append(_write_band(place, kernel, band, hysteresis=hysteresis))
        else:
            raised.append(kernel.write(place.weights[band], band, inverse[band])[0])
        on_rows(band.stop)
    scales.check_finite(float(place.weight_scale.max()), "weights")
    return np.concatenate(raised)


def _write_band(place: template.Place, kernel: _Kernel, band: slice, *, hysteresis: bool) -> FloatArray:
    """Does what `_write_weights` does for some rows; with hysteresis, tries the scale before: most of them stay."""
    scale, weights = place.weight_scale[band], place.weights[band]
    if not hysteresis:
        scales.write_weight_scales(scale, kernel.limit(band), hysteresis=False)
        return kernel.write(weights, band, scales.inverse(scale))[0]
    before = scale.copy()
    raised, limit = kernel.write(weights, band, scales.inverse(before))
    scales.write_weight_scales(scale, limit, hysteresis=True)
    changed = np.flatnonzero(scale != before)
    again = weights[changed]
    raised[changed], _ = kernel.write(again, band.start + changed, scales.inverse(scale[changed]))
    weights[changed] = again
    return raised
