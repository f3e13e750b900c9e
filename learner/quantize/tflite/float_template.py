"""Templates of models whose activations are floats (float32, float16, dynamic): converted once, then overwritten.

As in `template`, a place is a numpy view into the converted model's bytes. There are no activation ranges to write:
only the weights, biases and input scaling of a policy are in such a file. With the same numbers it is the
converter's file, byte by byte.

Such a file is four or two times as large as in int8, so that a large one is not written twice: weights go from the
policy into the bytes that are sent, in one pass that also looks for what is not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from broker.contract.policies import room
from learner.networks import layers
from learner.quantize import bits, input_scaling, kernels, scales
from learner.quantize.tflite import convert, graph, requantize, template

_OTHERS = {schema.BuiltinOperator.TANH, schema.BuiltinOperator.RESHAPE, schema.BuiltinOperator.DEQUANTIZE}
"""Operators without numbers of the policy. DEQUANTIZE widens the weights of float16."""
_LARGEST = float(np.finfo(np.float16).max)
_TINY = 2.0**-12
"""Rows of float16 weights that reach this far have errors of 2^-11 of a weight, or 2^-13 of the row's largest one."""
_PIECES = 8
"""A large model goes out in at most so many: a connection takes 20 messages that were not acknowledged."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Views of one layer's numbers, with weights [outputs, inputs] in the file's dtype, biases [outputs].

    `weight_scale` is float32 for weights that are int8, [1] or for a convolution [outputs]; else empty. `start` is the
    offset of the weights.
    """

    weights: NDArray[Any]
    bias: NDArray[Any]
    weight_scale: NDArray[np.float32]
    start: int


_Written = tuple[_Place, NDArray[np.float32], NDArray[np.float64] | None]
"""A layer's place, its kernel [outputs, inputs], and in int8 the factors [outputs] of its rows."""


class Template:
    """A model of one architecture and precision, to be overwritten with one policy after another.

    Args:
        model: A converted model, whose bytes are overwritten.

    Attributes:
        is_faithful: Whether the newest model holds the very numbers of its policy, or those of float16 that are as near
            to them as this format ever comes. If not, what they answer may differ.

    Raises:
        Unmapped: The converted graph is not the chain of operators that this module knows.
    """

    def __init__(self, model: bytearray) -> None:
        self.is_faithful = False
        self._model = model
        self._gain, self._offset, self._rescale, self._places = _located(model)

    @classmethod
    def build(cls, policy: layers.PolicyLayers, shape: tuple[int, ...], precision: str) -> Template:
        """Converts a stand-in of the same architecture, and checks that writing its numbers changes nothing.

        Args:
            policy: A policy of the architecture; its numbers do not matter.
            shape: Shape of one observation.
            precision: 'float32', 'float16' or 'dynamic'.

        Raises:
            Unmapped: It does, or the converted graph is not the chain of operators that this module knows.
        """
        rng = np.random.default_rng(0)
        observations = rng.uniform(-1, 1, (2, *shape)).astype(np.float32)
        stand_in = template.stand_in(policy, rng)
        expected = convert.convert(stand_in, observations, precision)
        made = cls(bytearray(expected))
        affine = input_scaling.from_ranges(observations) if made._gain is not None else None
        if made.write(stand_in, affine) != expected:
            raise scales.Unmapped(f"the converted {precision} model is not what it should be")
        return made

    def write(
        self,
        policy: layers.PolicyLayers,
        affine: input_scaling.Affine | None,
        on_written: requantize.OnWritten = lambda piece: None,
        *,
        weight_bits: int = bits.BITS_MAX,
    ) -> bytes:
        """Returns the model of a policy of this architecture.

        Args:
            policy: Layers for raw observations.
            affine: Scaling of the input; None in front of a convolution.
            on_written: See `requantize`. Its pieces are views of what is returned.
            weight_bits: See `convert.convert`.

        Raises:
            PolicyError: A weight is NaN or infinite.
            Unmapped: A weight is beyond float16.
        """
        if affine is not None:
            assert self._gain is not None
            assert self._offset is not None
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by name
                policy = input_scaling.compensate(policy, affine)
            self._gain[:], self._offset[:] = affine.gain.reshape(-1), affine.offset.reshape(-1)
        if self._rescale is not None:
            self._rescale.write(policy[-1])
        policy = bits.rounded(policy, weight_bits)
        self.is_faithful = weight_bits == bits.BITS_MAX
        weighted = layers.weighted(policy)
        _check(float(np.abs(np.concatenate([layer.bias for layer in weighted])).max()), self._places[0].bias)
        written = []
        for layer, place in zip(weighted, self._places, strict=True):
            place.bias[:] = layer.bias
            kernel = np.ascontiguousarray(layer.kernel.reshape(len(layer.kernel), -1))
            written.append((place, kernel, _write_scale(place, kernel)))
        if len(self._model) > requantize.PIECE_BYTES:
            return self._copied(written, on_written)
        for place, kernel, factors in written:
            self.is_faithful &= _write_rows(place.weights, kernel, factors)
        made = bytes(self._model)  # a copy is the least of it
        on_written(memoryview(made))
        return made

    def _copied(self, written: list[_Written], on_written: requantize.OnWritten) -> bytes:
        """Returns the template's bytes with these kernels in it; all other numbers are in their places already."""
        made, into = room.of(len(self._model))
        before, at = np.frombuffer(self._model, np.uint8), 0
        final = requantize.Final(memoryview(made), on_written, max(requantize.PIECE_BYTES, len(made) // _PIECES))
        for place, kernel, factors in sorted(written, key=lambda one: one[0].start):
            end = place.start + place.weights.nbytes
            into[at : place.start], at = before[at : place.start], end
            rows = into[place.start : end].view(place.weights.dtype).reshape(kernel.shape)
            width = kernel.shape[1] * rows.itemsize
            height = max(1, requantize.PIECE_BYTES // width)
            for row in range(0, len(kernel), height):
                band = slice(row, min(row + height, len(kernel)))
                self.is_faithful &= _write_rows(rows[band], kernel[band], factors if factors is None else factors[band])
                final.rows_done(place.start, width, band.stop)
        into[at:] = before[at:]
        final.all_done()
        return made


def _check(largest: float, numbers: NDArray[Any]) -> None:
    """Refuses what is not finite, or more than the dtype of `numbers` holds."""
    scales.check_finite(largest, "weights")
    if largest > _LARGEST and numbers.dtype == np.float16:
        raise scales.Unmapped("a weight is beyond what float16 holds")


def _write_rows(rows: NDArray[Any], kernel: NDArray[np.float32], factors: NDArray[np.float64] | None) -> bool:
    """Writes some rows of weights; returns whether they say what the kernel says."""
    if factors is not None:
        kernels.round_rows_finely(kernel, factors, rows)
        return False
    largest, is_faithful = np.empty(len(kernel), np.float32), True
    if rows.dtype == np.float16:
        kernels.half_rows(kernel, rows.view(np.uint16), largest)
        is_faithful = bool(((largest >= _TINY) | (largest == 0)).all())
    else:
        kernels.copy_rows(kernel, rows, largest)
    _check(float(largest.max()), rows)
    return is_faithful


def _write_scale(place: _Place, kernel: NDArray[np.float32]) -> NDArray[np.float64] | None:
    """Writes the scale(s) of weights that are int8; returns the factor of each row."""
    if place.weights.dtype != np.int8:
        return None
    largest = np.empty(len(kernel), np.float32)
    kernels.row_maxima(kernel, np.ones(kernel.shape[1], np.float32), largest)
    scales.check_finite(float(largest.max()), "weights")
    if len(place.weight_scale) == 1:
        largest[:] = largest.max()
    if not largest.all():
        raise scales.Unmapped("a layer's weights are nothing but zeros")
    place.weight_scale[:] = largest[: len(place.weight_scale)] / np.float32(127)
    return 127.0 / largest.astype(np.float64)


def _located(
    model: bytearray,
) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, template.Rescaled | None, tuple[_Place, ...]]:
    """Finds gain and offset of the input and of the output, if there are any, and the places of the layers in order."""
    operators = schema.BuiltinOperator
    gain = offset = None
    places: list[_Place] = []
    last: list[NDArray[Any]] = []
    read, begin = graph.Graph(model), graph.address(np.frombuffer(model, np.uint8))
    widened = {op.Outputs(0): op.Inputs(0) for code, op in read.operators() if code == operators.DEQUANTIZE}

    def constant(tensor: int) -> NDArray[Any]:
        return read.constant(widened.get(tensor, tensor))

    for code, operator in read.operators():
        if code in (operators.MUL, operators.ADD):
            if places:
                last.append(constant(operator.Inputs(1)))
                continue
            numbers = constant(operator.Inputs(1))
            gain, offset = (numbers, offset) if code == operators.MUL else (gain, numbers)
        elif code in (operators.FULLY_CONNECTED, operators.CONV_2D):
            weights, bias = read.weights_and_bias(operator)
            biases = constant(bias)
            numbers = constant(weights).reshape(len(biases), -1)
            places.append(_Place(numbers, biases, read.scale(weights), graph.address(numbers) - begin))
        elif code not in _OTHERS:
            raise scales.Unmapped(f"the converted graph has an operator that is not known here: {code}")
    return gain, offset, template.Rescaled(*last) if last else None, tuple(places)
