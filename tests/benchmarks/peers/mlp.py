"""Reads a float32 policy from its .tflite file: the weights from which each peer builds a model of its own."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from broker.contract import errors, messages
from edge_actor.policies import model_file

FloatArray = NDArray[np.float32]
_OPERATORS = {
    value: name for name, value in vars(schema.BuiltinOperator).items() if not name.startswith("_")
}  # number to name
_FUSED = {0: "none", 1: "relu", 4: "tanh"}
_SEPARATE = {"RELU": "relu", "TANH": "tanh"}


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """`x * gain + offset`, each [n] or [1]."""

    gain: FloatArray
    offset: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """`activation(x @ kernel.T + bias)`: kernel [out, in], bias [out], activation none, relu or tanh."""

    kernel: FloatArray
    bias: FloatArray
    activation: str


Layer = Affine | Dense


def read(model: bytes, limit_bytes: int = messages.MAX_POLICY_BYTES) -> tuple[Layer, ...]:
    """Returns the layers of a policy, in order.

    Raises:
        PolicyError: The file is damaged or too large, or is no float32 MLP.
    """
    if len(model) > limit_bytes or model[4:8] != b"TFL3":
        raise errors.PolicyError("not a TFLite model of a size that is taken", reason="model")
    model_file.check(model)
    try:
        return _layers(schema.Model.GetRootAs(model, 0))
    except (struct.error, IndexError, ValueError, TypeError) as error:
        raise errors.PolicyError(f"the model cannot be read: {error}", reason="model") from error


def outputs(layers: tuple[Layer, ...]) -> int:
    """Returns how many outputs the policy has."""
    return len(_dense(layers)[-1].bias)


def inputs(layers: tuple[Layer, ...]) -> int:
    """Returns how many inputs the policy has."""
    return int(_dense(layers)[0].kernel.shape[1])


def folded(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Returns the policy with the scaling of its input inside its first layer, which float32 loses nothing by."""
    scaling, first = layers[:2]
    if not isinstance(scaling, Affine) or not isinstance(first, Dense):
        return layers
    kernel = first.kernel.astype(np.float64)
    bias = first.bias + kernel @ np.broadcast_to(scaling.offset, kernel.shape[1])
    inside = Dense((kernel * scaling.gain).astype(np.float32), bias.astype(np.float32), first.activation)
    return (inside, *layers[2:])


def run(layers: tuple[Layer, ...], x: FloatArray) -> FloatArray:
    """Returns outputs [B, n] for observations [B, features], in numpy: what every peer must come near."""
    for layer in layers:
        if isinstance(layer, Affine):
            x = x * layer.gain + layer.offset
            continue
        x = x @ layer.kernel.T + layer.bias
        x = np.maximum(x, 0.0) if layer.activation == "relu" else np.tanh(x) if layer.activation == "tanh" else x
    return x


def _dense(layers: tuple[Layer, ...]) -> list[Dense]:
    return [layer for layer in layers if isinstance(layer, Dense)]


def _layers(root: Any) -> tuple[Layer, ...]:
    graph = root.Subgraphs(0)
    found: list[Layer] = []
    for index in range(graph.OperatorsLength()):
        operator = graph.Operators(index)
        code = root.OperatorCodes(operator.OpcodeIndex())
        name = _OPERATORS.get(max(code.BuiltinCode(), code.DeprecatedBuiltinCode()), "an operator of its own")
        if operator.Inputs(0) != (graph.Operators(index - 1).Outputs(0) if index else graph.Inputs(0)):
            raise _unfit(f"its {name} does not follow the operator before it")
        if name == "FULLY_CONNECTED":
            options = _options(operator, schema.FullyConnectedOptions)
            kernel = _constant(root, graph, operator.Inputs(1))
            has_bias = operator.InputsLength() == 3 and operator.Inputs(2) >= 0
            bias = _constant(root, graph, operator.Inputs(2)) if has_bias else np.zeros(len(kernel), np.float32)
            found.append(Dense(kernel, bias, _fused(options)))
        elif name in ("MUL", "ADD"):
            options = _options(operator, schema.MulOptions if name == "MUL" else schema.AddOptions)
            if _fused(options) != "none":
                raise _unfit(f"its {name} has an activation")
            number = _constant(root, graph, operator.Inputs(1)).reshape(-1)
            if name == "ADD" and found and isinstance(last := found[-1], Affine):
                found[-1] = replace(last, offset=last.offset + number)
            elif name == "ADD":
                found.append(Affine(np.ones_like(number), number))
            else:
                found.append(Affine(number, np.zeros_like(number)))
        elif name in _SEPARATE and found and isinstance(last := found[-1], Dense) and last.activation == "none":
            found[-1] = replace(last, activation=_SEPARATE[name])
        else:
            raise _unfit(f"it has {name}")
    if not _dense(tuple(found)) or operator.Outputs(0) != graph.Outputs(0):
        raise _unfit("it has no dense layer")
    return tuple(found)


def _unfit(why: str) -> errors.PolicyError:
    return errors.PolicyError(
        f"peers take float32 MLPs, and this model is none: {why}",
        reason="model",
        todo="publish with --precision float32",
    )


def _options(operator: Any, kind: Any) -> Any:
    table, options = operator.BuiltinOptions(), kind()
    if table is None:
        raise _unfit("an operator has no options")
    options.Init(table.Bytes, table.Pos)
    return options


def _fused(options: Any) -> str:
    number = options.FusedActivationFunction()
    if number not in _FUSED:
        raise _unfit(f"it has the fused activation {number}")
    return _FUSED[number]


def _constant(root: Any, graph: Any, index: int) -> FloatArray:
    """Returns a constant in its shape; a scalar as [1]."""
    tensor = graph.Tensors(index)
    buffer = root.Buffers(tensor.Buffer())
    if tensor.Type() != schema.TensorType.FLOAT32 or not buffer.DataLength():
        raise _unfit("it has weights that are not float32")
    numbers: FloatArray = buffer.DataAsNumpy().view(np.float32).copy()
    return numbers.reshape([tensor.Shape(k) for k in range(tensor.ShapeLength())] or [1])
