"""Templates of models whose activations are floats (float32, float16, dynamic): converted once, then overwritten.

As in `template`, a place is a numpy view into the converted model's bytes. There are no activation ranges to write:
only the weights, biases and input scaling of a policy are in such a file. With the same numbers it is the
converter's file, byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from learner.networks import layers
from learner.quantize import bits, input_scaling, kernels, scales
from learner.quantize.tflite import convert, graph, requantize, template

_OTHERS = {schema.BuiltinOperator.TANH, schema.BuiltinOperator.RESHAPE, schema.BuiltinOperator.DEQUANTIZE}
"""Operators without numbers of the policy. DEQUANTIZE widens the weights of float16."""
_LARGEST = float(np.finfo(np.float16).max)
_BAND = 1 << 15
"""Weights that are rounded at once: in float64 they stay in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Views of one layer's numbers, with weights [outputs, inputs] in the file's dtype, biases [outputs].

    `weight_scale` is float32 for weights that are int8, [1] or for a convolution [outputs]; else empty.
    """

    weights: NDArray[Any]
    bias: NDArray[Any]
    weight_scale: NDArray[np.float32]


class Template:
    """A model of one architecture and precision, to be overwritten with one policy after another.

    Args:
        policy: A policy of the architecture; its numbers do not matter.
        shape: Shape of one observation.
        precision: 'float32', 'float16' or 'dynamic'.

    Raises:
        Unmapped: The converted graph is not the chain of operators that this module knows.
    """

    def __init__(self, policy: layers.PolicyLayers, shape: tuple[int, ...], precision: str) -> None:
        rng = np.random.default_rng(0)
        observations = rng.uniform(-1, 1, (2, *shape)).astype(np.float32)
        stand_in = template.stand_in(policy, rng)
        self._model = bytearray(convert.convert(stand_in, observations, precision))
        self._gain, self._offset, self._places = _located(self._model)
        expected = bytes(self._model)
        if (
            self.write(stand_in, input_scaling.from_ranges(observations) if self._gain is not None else None)
            != expected
        ):
            raise scales.Unmapped(f"the converted {precision} model is not what it should be")

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
            on_written: See `requantize`.
            weight_bits: See `convert.convert`.

        Raises:
            PolicyError: A weight is NaN or infinite.
            Unmapped: A weight is beyond float16.
        """
        if affine is not None:
            assert self._gain is not None
            assert self._offset is not None
            policy = input_scaling.compensate(policy, affine)
            self._gain[:], self._offset[:] = affine.gain.reshape(-1), affine.offset.reshape(-1)
        policy = bits.rounded(policy, weight_bits)
        for layer, place in zip(layers.weighted(policy), self._places, strict=True):
            kernel = np.ascontiguousarray(layer.kernel.reshape(len(layer.kernel), -1))
            largest = max(float(np.abs(kernel).max()), float(np.abs(layer.bias).max()))
            scales.check_finite(largest, "weights")
            if largest > _LARGEST and np.float16 in (place.weights.dtype, place.bias.dtype):
                raise scales.Unmapped("a weight is beyond what float16 holds")
            if place.weights.dtype == np.int8:
                _write_int8(place, kernel)
            else:
                place.weights[:] = kernel
            place.bias[:] = layer.bias
        whole = memoryview(self._model)
        for start in range(0, len(whole), requantize.PIECE_BYTES):
            on_written(whole[start : start + requantize.PIECE_BYTES])
        return bytes(self._model)


def _write_int8(place: _Place, kernel: NDArray[np.float32]) -> None:
    """Rounds weights of dynamic range as the converter does: in float64, halves away from zero."""
    per_channel = len(place.weight_scale) > 1
    largest = np.abs(kernel).max(axis=1 if per_channel else None, keepdims=True)
    if not largest.all():
        raise scales.Unmapped("a layer's weights are nothing but zeros")
    place.weight_scale[:] = (largest / np.float32(127)).reshape(-1)
    factor = 127.0 / largest.astype(np.float64)
    height = max(1, _BAND // kernel.shape[1])
    for row in range(0, len(kernel), height):
        band = slice(row, row + height)
        scaled = kernel[band] * (factor[band] if per_channel else factor)
        place.weights[band] = kernels.half_away(scaled)


def _located(model: bytearray) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, tuple[_Place, ...]]:
    """Finds gain and offset of the input, where there are any, and the places of the layers in their order."""
    operators = schema.BuiltinOperator
    gain = offset = None
    places: list[_Place] = []
    read = graph.Graph(model)
    widened = {op.Outputs(0): op.Inputs(0) for code, op in read.operators() if code == operators.DEQUANTIZE}

    def constant(tensor: int) -> NDArray[Any]:
        return read.constant(widened.get(tensor, tensor))

    for code, operator in read.operators():
        if code in (operators.MUL, operators.ADD):
            if places:
                continue  # the bounds of actions
            numbers = constant(operator.Inputs(1))
            gain, offset = (numbers, offset) if code == operators.MUL else (gain, numbers)
        elif code in (operators.FULLY_CONNECTED, operators.CONV_2D):
            weights, bias = read.weights_and_bias(operator)
            biases = constant(bias)
            places.append(_Place(constant(weights).reshape(len(biases), -1), biases, read.scale(weights)))
        elif code not in _OTHERS:
            raise scales.Unmapped(f"the converted graph has an operator that is not known here: {code}")
    return gain, offset, tuple(places)
