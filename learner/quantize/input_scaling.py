"""Float operations around an int8 model: per-feature scaling of its input, and the bounds of its actions behind it.

An int8 input tensor has a single scale: a feature that moves by 0.2 beside one that moves by 20 keeps three levels.
So each feature is brought to the same range in float before it is quantized, and the first layer's weights take the
scaling back. The model then still answers for raw observations, and the two extra float operations cost 0.1 us (both
are delegated).

A continuous action follows its observation closely, and 255 levels of a feature are then too few: a policy that turns
from one end of its action to the other within a twentieth of a feature's range jumps by 8 % with every level. With
`split` a feature arrives as two int8 numbers: rounded, and FINER times what rounding took away, in two columns of the
first kernel. That is twelve bits of observation through an int8 graph. A third fewer choices differ from fp32's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import flatbuffers  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from learner.networks import layers

FloatArray = NDArray[np.float32]

ENDS = (-1.0, 127 / 128)
"""Of a scaled feature: 255 steps, of which 128 make 1."""
STEP = 1 / 128
"""Between two levels of a scaled feature."""
FINER = 16
"""What rounding took away, at most half a step, then has 16 levels; so have the weights, which are a 16th as large."""
_HALF_RANGE_FLOOR = 1e-3
"""Of a feature that stood still during calibration, relative to its size: it may later move that far unclipped."""


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """`x * gain + offset` per observation element, in the observation's shape; `split` doubles the last axis."""

    gain: FloatArray
    offset: FloatArray
    split: bool = False

    def apply(self, observations: NDArray[Any]) -> FloatArray:
        """Scales [N, *shape] just as the folded model does, in float32."""
        scaled: FloatArray = observations.astype(np.float32) * self.gain + self.offset
        if not self.split:
            return scaled
        rounded = np.clip(np.rint(scaled / np.float32(STEP)), -128, 127) * np.float32(STEP)
        return np.concatenate([rounded, (scaled - rounded) * np.float32(FINER)], axis=-1)


def from_ranges(observations: NDArray[Any], *, split: bool = False) -> Affine:
    """The scaling that brings every feature of the sample [N, *shape] to -1..127/128.

    Both ends are then levels of int8, so a feature that rests at one of them, such as a contact switch, has no rounding
    error. With -1..1 it had half a step, always of the same sign: on LunarLander that cost 7 % of the greedy actions.
    """
    return from_ends(observations.min(0), observations.max(0), split=split)


def from_ends(low: NDArray[Any], high: NDArray[Any], *, split: bool = False) -> Affine:
    """The same for features that reach from `low` to `high`, both in the observation's shape."""
    low, high = low.astype(np.float64), high.astype(np.float64)
    middle = (high + low) / 2
    half = np.maximum((high - low) / 2, _HALF_RANGE_FLOOR * np.maximum(1.0, np.abs(middle)))
    gain = (ENDS[1] - ENDS[0]) / (2 * half)
    return Affine(gain.astype(np.float32), (ENDS[1] - (middle + half) * gain).astype(np.float32), split)


def compensate(policy: layers.PolicyLayers, affine: Affine) -> layers.PolicyLayers:
    """Returns the policy that takes scaled observations and answers as `policy` does for raw ones."""
    gain, offset = affine.gain.astype(np.float64), affine.offset.astype(np.float64)
    policy = layers.absorb(policy, 1 / gain, -offset / gain)
    if not affine.split:
        return policy
    at, first = next((i, layer) for i, layer in enumerate(policy) if isinstance(layer, layers.Dense))
    features = first.kernel.reshape(-1, *gain.shape)
    kernel = np.concatenate([features, features / np.float32(FINER)], axis=-1).reshape(first.bias.size, -1)
    return (*policy[:at], replace(first, kernel=kernel), *policy[at + 1 :])


def insert(model: bytes, affine: Affine) -> bytes:
    """Puts a float MUL and ADD in front of a .tflite model's only input, and what makes two numbers of each feature.

    Args:
        model: A model whose input is float32, quantized by its own first operation or not at all.
        affine: Constants of the operations.

    Returns:
        The model for raw observations, its input named `observation`.
    """
    root = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(model, 0))
    graph = root.subgraphs[0]
    (scaled,) = graph.inputs
    graph.tensors[scaled].name = b"scaled"
    shape = (1, *affine.gain.shape)
    raw, gained = _tensor(root, "observation", shape), _tensor(root, "gained", shape)
    if affine.split:
        scaled = _split(root, scaled, shape)
    _affine(root, raw, gained, scaled, "input", affine.gain, affine.offset, at=0)
    graph.inputs = [raw]
    for signature in root.signatureDefs or []:
        signature.inputs[0].tensorIndex = raw
    return _packed(root, len(model))


def _split(root: Any, both: int, shape: tuple[int, ...]) -> int:
    """Adds the operations that make `both` of each feature in front of the graph; returns the tensor that they take."""
    scaled, rounded, restored, rest, finer = (
        _tensor(root, name, shape) for name in ("feature", "rounded", "restored", "rest", "finer")
    )
    tensor = root.subgraphs[0].tensors[rounded]
    tensor.type, tensor.quantization = schema.TensorType.INT8, schema.QuantizationParametersT()
    tensor.quantization.scale = np.array([STEP], np.float32)
    tensor.quantization.zeroPoint = np.array([0], np.int64)
    factor = _tensor(root, "finer_factor", (1,), np.array([FINER], np.float32))
    joined = schema.ConcatenationOptionsT()
    joined.axis = len(shape) - 1
    operators, options = schema.BuiltinOperator, schema.BuiltinOptions
    root.subgraphs[0].operators[:0] = [
        _operator(root, operators.QUANTIZE, [scaled], rounded, options.QuantizeOptions, schema.QuantizeOptionsT()),
        _operator(
            root, operators.DEQUANTIZE, [rounded], restored, options.DequantizeOptions, schema.DequantizeOptionsT()
        ),
        _operator(root, operators.SUB, [scaled, restored], rest, options.SubOptions, schema.SubOptionsT()),
        _operator(root, operators.MUL, [rest, factor], finer, options.MulOptions, schema.MulOptionsT()),
        _operator(root, operators.CONCATENATION, [restored, finer], both, options.ConcatenationOptions, joined),
    ]
    return scaled


def append(model: bytes, rescale: layers.Rescale) -> bytes:
    """Puts a float MUL and ADD behind a .tflite model's only output, which is float32.

    Returns:
        The model whose output, named `action`, is in the environment's units.
    """
    root = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(model, 0))
    graph = root.subgraphs[0]
    (bounded,) = graph.outputs
    gained, action = (_tensor(root, name, graph.tensors[bounded].shape) for name in ("gained_action", "action"))
    _affine(root, bounded, gained, action, "action", rescale.gain, rescale.offset, at=len(graph.operators))
    graph.outputs = [action]
    for signature in root.signatureDefs or []:
        signature.outputs[0].tensorIndex = action
    return _packed(root, len(model))


def _affine(
    root: Any, x: int, gained: int, y: int, name: str, gain: FloatArray, offset: FloatArray, *, at: int
) -> None:
    """Adds the two operations from tensor x by `gained` to y, at that place in the order of operations."""
    numbers = [_tensor(root, f"{name}_{kind}", a.shape, a) for kind, a in (("gain", gain), ("offset", offset))]
    operators, options = schema.BuiltinOperator, schema.BuiltinOptions
    root.subgraphs[0].operators[at:at] = [
        _operator(root, operators.MUL, [x, numbers[0]], gained, options.MulOptions, schema.MulOptionsT()),
        _operator(root, operators.ADD, [gained, numbers[1]], y, options.AddOptions, schema.AddOptionsT()),
    ]


def _packed(root: Any, size: int) -> bytes:
    builder = flatbuffers.Builder(size + 4096)
    builder.Finish(root.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _tensor(root: Any, name: str, shape: Any, values: FloatArray | None = None) -> int:
    """Adds a float32 tensor; returns its index. Without values it is an activation: buffer 0, empty by convention."""
    tensor = schema.TensorT()
    tensor.name, tensor.type, tensor.buffer = name.encode(), schema.TensorType.FLOAT32, 0
    tensor.shape = np.asarray(shape, np.int32)
    if values is not None:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(values.astype("<f4").tobytes(), np.uint8)
        root.buffers.append(buffer)
        tensor.buffer = len(root.buffers) - 1
    root.subgraphs[0].tensors.append(tensor)
    return len(root.subgraphs[0].tensors) - 1


def _operator(root: Any, builtin: int, inputs: list[int], output: int, options_type: int, options: Any) -> Any:
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = builtin
    code.version = 1
    root.operatorCodes.append(code)
    operator = schema.OperatorT()
    operator.opcodeIndex = len(root.operatorCodes) - 1
    operator.inputs, operator.outputs = inputs, [output]
    operator.builtinOptionsType, operator.builtinOptions = options_type, options
    return operator
