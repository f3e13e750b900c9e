"""Adds float operations to a .tflite graph: the scaling of its input in front, the bounds of its actions behind."""

from __future__ import annotations

from typing import Any

import flatbuffers  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from learner.networks import layers
from learner.quantize import input_scaling

FloatArray = NDArray[np.float32]


def with_own_constants(model: bytes) -> bytes:
    """Returns the model with a buffer for each constant of its graph.

    The converter keeps equal ones once, and a template that is to hold other numbers needs a place for each: in int8
    the only weight of an output is 127 or -127, whatever it was.
    """
    root = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(model, 0))
    used: set[int] = set()
    is_shared = False
    for tensor in root.subgraphs[0].tensors:
        if (found := root.buffers[tensor.buffer]).data is not None and tensor.buffer in used:
            own = schema.BufferT()
            own.data = found.data
            tensor.buffer, is_shared = len(root.buffers), True
            root.buffers.append(own)
        used.add(tensor.buffer)
    return _packed(root, len(model)) if is_shared else model


def insert_scaling(model: bytes, affine: input_scaling.Affine) -> bytes:
    """Puts a float MUL and ADD in front of a .tflite model's only input, and behind them what makes hi and lo inputs.

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
    if affine.hi_lo:
        scaled = _hi_lo(root, scaled, shape)
    _affine(root, raw, gained, scaled, "input", affine.gain, affine.offset, at=0)
    graph.inputs = [raw]
    for signature in root.signatureDefs or []:
        signature.inputs[0].tensorIndex = raw
    return _packed(root, len(model))


def _hi_lo(root: Any, both: int, shape: tuple[int, ...]) -> int:
    """Adds the operations that make hi and lo inputs (`both`) in front of the graph; returns their input tensor."""
    scaled, rounded, restored, rest, finer = (
        _tensor(root, name, shape) for name in ("feature", "rounded", "restored", "rest", "finer")
    )
    tensor = root.subgraphs[0].tensors[rounded]
    tensor.type, tensor.quantization = schema.TensorType.INT8, schema.QuantizationParametersT()
    tensor.quantization.scale = np.array([input_scaling.STEP], np.float32)
    tensor.quantization.zeroPoint = np.array([0], np.int64)
    factor = _tensor(root, "finer_factor", (1,), np.array([input_scaling.LO_GAIN], np.float32))
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


def append_rescale(model: bytes, rescale: layers.Rescale) -> bytes:
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
    """Adds MUL and ADD from tensor x through `gained` to y, at place `at` in the order of operations."""
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
