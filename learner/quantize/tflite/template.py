"""Templates: one converted model per architecture, and the place of each number of a policy in its bytes.

The graph of a policy never changes while it trains, only its numbers do. So TFLiteConverter runs once, and `requantize`
writes scales, zero points, weights and biases over those of the template. Every place is a numpy view into one
bytearray: writing a number is an assignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from learner.networks import layers
from learner.quantize import scales
from learner.quantize.tflite import graph

_WEIGHTED = {schema.BuiltinOperator.FULLY_CONNECTED, schema.BuiltinOperator.CONV_2D}
_PASSED_ON = {schema.BuiltinOperator.RESHAPE}
"""Operators whose output has the scale of their input."""
_PLAIN = {
    schema.BuiltinOperator.DEQUANTIZE,
    schema.BuiltinOperator.SUB,
    schema.BuiltinOperator.MUL,
    schema.BuiltinOperator.CONCATENATION,
}
"""Operators that have no number of the policy: the numbers of hi and lo inputs are constants (`input_scaling`)."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorScale:
    """The scale, float32 [1], and the zero point, int64 [1], of one tensor."""

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The place of one layer with weights: views into the template.

    Attributes:
        weights: int8 [outputs, inputs]; a convolution's inputs are height, width and channels, flattened.
        weight_scale: float32 [outputs], or [1] with one scale for the whole tensor.
        bias: int32 [outputs].
        bias_scale: float32, as `weight_scale`.
        outputs: Every tensor that has the scale of the layer's output; before the activation, if that is tanh.
    """

    weights: NDArray[np.int8]
    weight_scale: NDArray[np.float32]
    bias: NDArray[np.int32]
    bias_scale: NDArray[np.float32]
    outputs: tuple[TensorScale, ...]


class Rescaled(NamedTuple):
    """The place of the numbers of a `layers.Rescale`: views [outputs] into the template."""

    gain: NDArray[np.float32]
    offset: NDArray[np.float32]

    def write(self, layer: layers.Layer) -> None:
        """Writes the numbers of that layer of a policy."""
        assert isinstance(layer, layers.Rescale)
        self.gain[:], self.offset[:] = layer.gain, layer.offset


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A model's bytes and the places of its numbers.

    Attributes:
        model: The bytes; writing to a place changes them.
        inputs: Every tensor that has the scale of the network's input.
        layers: One per layer with weights, in the order of the policy.
        per_channel: Whether each output of a layer has a weight scale of its own.
        gain: float32, the per-feature scaling of the input in observation order; None where the model has none.
        offset: As `gain`.
        rescale: float32, gain and offset of the last layer, where that is a `Rescale`.
        starts: Per layer with weights, the offset of its weights if all bytes before them are final once the layers
            before it were written; else None.
    """

    model: bytearray
    inputs: tuple[TensorScale, ...]
    layers: tuple[Place, ...]
    per_channel: bool
    gain: NDArray[np.float32] | None
    offset: NDArray[np.float32] | None
    rescale: Rescaled | None
    starts: tuple[int | None, ...]

    def numbers(self) -> dict[str, NDArray[Any]]:
        """Returns copies of all that a policy decides, by name."""
        found: dict[str, NDArray[Any]] = {}
        if self.gain is not None and self.offset is not None:
            found |= {"input/gain": self.gain.copy(), "input/offset": self.offset.copy()}
        if self.rescale is not None:
            found |= {"output/gain": self.rescale.gain.copy(), "output/offset": self.rescale.offset.copy()}
        activations = {"input": self.inputs} | {f"{i}/output": place.outputs for i, place in enumerate(self.layers)}
        for name, affines in activations.items():
            for j, affine in enumerate(affines):
                found[f"{name}/{j}/scale"] = affine.scale.copy()
                found[f"{name}/{j}/zero_point"] = affine.zero_point.copy()
        for i, place in enumerate(self.layers):
            for field in ("weights", "weight_scale", "bias", "bias_scale"):
                found[f"{i}/{field}"] = getattr(place, field).copy()
        return found


Architecture = tuple[Any, ...]


def architecture(policy: layers.PolicyLayers, shape: tuple[int, ...]) -> Architecture:
    """Returns all that decides the layout of a policy's model; hashable."""
    return shape, tuple(map(_layout, policy))


def stand_in(policy: layers.PolicyLayers, rng: np.random.Generator) -> layers.PolicyLayers:
    """Returns a policy of the same architecture with random numbers, none of them 0 throughout.

    Layers of one unit get positive ones: behind a negative weight, ReLU puts out nothing but zeros.
    """
    weights = [rng.uniform(-1, 1, a.shape) / np.sqrt(a[0].size) for a in layers.arrays(policy).values()]
    weights = [np.abs(a) if len(a) == 1 else a for a in weights]
    return layers.with_arrays(policy, [(a + 0.1 * (a.ndim == 1)).astype(np.float32) for a in weights])


def _layout(layer: layers.Layer) -> Any:
    match layer:
        case layers.Flatten():
            return "flatten"
        case layers.Rescale():
            return "rescale", layer.gain.size
        case _:
            return layer.kernel.shape, layer.activation, getattr(layer, "stride", 0)


def locate(model: bytes, layer_count: int, *, per_channel: bool = True) -> Template:
    """Finds the numbers of a policy in its converted model, along the chain of operators from input to output.

    Args:
        model: An int8 model of `convert.convert`. No bias may be 0 throughout: the converter drops those.
        layer_count: Layers with weights in the policy.
        per_channel: As it was converted.

    Raises:
        Unmapped: The converted graph is not the chain of operators that this module knows.
    """
    found = bytearray(model)
    operators = schema.BuiltinOperator
    read, gain, offset = graph.Graph(found), None, None
    inputs: list[TensorScale] = []
    outputs: list[TensorScale] = inputs
    weighted: list[tuple[Any, list[TensorScale]]] = []
    last: list[NDArray[Any]] = []
    for code, operator in read.operators():
        output = operator.Outputs(0)
        if code in (operators.MUL, operators.ADD) and weighted:
            last.append(read.constant(operator.Inputs(1)))
            continue
        if code == operators.MUL and gain is None:
            gain = read.constant(operator.Inputs(1))
        elif code == operators.ADD and offset is None:
            offset = read.constant(operator.Inputs(1))
        elif code == operators.QUANTIZE or code in _PASSED_ON:
            outputs.append(_tensor_scale(read, output))
        elif code in _WEIGHTED:
            outputs = [_tensor_scale(read, output)]
            weighted.append((operator, outputs))
        elif code == operators.TANH:
            outputs = []  # fixed: 1/128 and 0
        elif code not in _PLAIN:
            raise scales.Unmapped(f"the converted graph has an operator that is not known here: {code}")
    if len(weighted) != layer_count:
        raise scales.Unmapped(f"{layer_count} layers became {len(weighted)} operators")
    places = tuple(_place(read, operator, outputs) for operator, outputs in weighted)
    rescale = Rescaled(*last) if last else None
    return Template(found, tuple(inputs), places, per_channel, gain, offset, rescale, tuple(_starts(found, places)))


def _place(read: graph.Graph, operator: Any, outputs: list[TensorScale]) -> Place:
    weights, bias = read.weights_and_bias(operator)
    biases = read.constant(bias)
    return Place(
        weights=read.constant(weights).reshape(len(biases), -1),
        weight_scale=read.scale(weights),
        bias=biases,
        bias_scale=read.scale(bias),
        outputs=tuple(outputs),
    )


def _tensor_scale(read: graph.Graph, tensor: int) -> TensorScale:
    scale, zero_point = read.scale(tensor), read.zero_point(tensor)
    if scale.size != 1 or zero_point.size != 1:
        raise scales.Unmapped("an activation of the converted graph has no single scale")
    return TensorScale(scale, zero_point)


def _starts(model: bytearray, places: Sequence[Place]) -> Iterator[int | None]:
    """Yields where the weights of each layer begin; None if numbers of it or of later layers come before them."""
    start = graph.address(np.frombuffer(model, np.uint8))
    firsts = []
    for place in places:
        numbers: list[NDArray[Any]] = [place.weights, place.weight_scale, place.bias, place.bias_scale]
        numbers += [number for affine in place.outputs for number in (affine.scale, affine.zero_point)]
        firsts.append(min(graph.address(number) for number in numbers) - start)
    for i, place in enumerate(places):
        begin = graph.address(place.weights) - start
        yield begin if begin == min(firsts[i:]) else None
