"""Reads ONNX graphs that are a chain of known operators, as layers: what torch.onnx.export writes of MLPs and CNNs.

ONNX has the channels of images first. Actors have them last, and so has the policy that comes out: a [N, C, H, W] input
becomes [H, W, C], and what follows a flattening is put in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors
from learner.quantize import scales
from learner.quantize.distil import distillation
from learner.study.user_models.formats import arrays, chain

Array = NDArray[Any]
_DROPPED = ("Identity", "Dropout", "Cast")
_CHOOSING = ("Softmax", "LogSoftmax", "ArgMax")
"""Operators at the end of a policy of values, which change no choice."""
_ACTIVATIONS = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid"}


def read(path: Path, outputs: distillation.Outputs, low: Array | None, high: Array | None) -> chain.Policy:
    """Reads a graph.

    Args:
        path: The file. Tensors that it keeps outside must lie in its directory.
        outputs: What it puts out.
        low: Lower bounds of its actions [size].
        high: Upper bounds.

    Raises:
        PolicyError: It is damaged, too large, or has an operator that does not map; says which.
        RuntimeMissing: The package `onnx` is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise errors.RuntimeMissing(
            "ONNX files are read by the package onnx, which is not installed",
            where=str(path),
            todo="pip install 'actorq-fleet[onnx]'",
        ) from error
    try:
        if path.stat().st_size > arrays.BYTES_MAX:
            raise ValueError(f"it is larger than {arrays.BYTES_MAX / 1e6:,.0f} MB")
        model = onnx.load_model_from_string(path.read_bytes())
        return _Reader(model.graph, path).policy(outputs, low, high)
    except scales.Unmapped as why:
        raise errors.PolicyError(
            f"the graph is no chain that int8 is made of here: {why}",
            reason="not_convertible",
            where=str(path),
            todo="chains of Gemm, MatMul, Conv without padding, BatchNormalization, Relu, Tanh, Sigmoid, Clip, Flatten "
            "and arithmetic with constants are read; build others in Keras, which the converter takes",
        ) from why
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
        raise errors.PolicyError(
            f"the ONNX file cannot be read: {str(error).strip().partition(chr(10))[0] or type(error).__name__}",
            reason="model",
            where=str(path),
            todo="export it again with torch.onnx.export, batch first, in one file",
        ) from error
    except Exception as error:  # protobuf's own
        if type(error).__module__.startswith("google.protobuf"):
            raise errors.PolicyError(
                "the file is no ONNX model, or is cut off", reason="model", where=str(path), todo="export it again"
            ) from error
        raise


class _Reader:
    """Walks a graph from its input to its output."""

    def __init__(self, graph: Any, path: Path) -> None:
        self._graph, self._directory = graph, path.parent
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._arrays: dict[str, Array] = {}
        self._order: Array | None = None  # of the columns behind a flattening
        self._is_image = False
        self._grown = chain.Chain(())

    def policy(self, outputs: distillation.Outputs, low: Array | None, high: Array | None) -> chain.Policy:
        entries = [entry for entry in self._graph.input if entry.name not in self._constants]
        if len(entries) != 1 or len(self._graph.output) != 1:
            raise scales.Unmapped(
                f"it has {len(entries)} inputs and {len(self._graph.output)} outputs, not one of each"
            )
        dims = [dim.dim_value for dim in entries[0].type.tensor_type.shape.dim]
        if len(dims) not in (2, 4) or min(dims[1:], default=0) < 1:
            raise scales.Unmapped(
                f"its input has the shape {dims}, not [batch, features] or [batch, channels, height, width]"
            )
        nodes = list(self._graph.node)
        shape = tuple(dims[1:])
        self._is_image = len(shape) == 3
        name = entries[0].name
        first = next((node for node in nodes if name in node.input), None)
        if self._is_image and first is not None and first.op_type == "Transpose":
            if list(_attribute(first, "perm", [])) != [0, 3, 1, 2]:
                raise scales.Unmapped("Transpose other than to channels first")
            nodes.remove(first)
            name = first.output[0]
        elif self._is_image:
            shape = (*shape[1:], shape[0])
        self._grown = chain.Chain(shape)
        for node in nodes:
            if node.op_type == "Constant":
                self._keep(node)
                continue
            if name not in node.input or sum(entry == name for entry in node.input) > 1:
                raise scales.Unmapped(f"{node.op_type} ({node.name or node.output[0]}) is not in line")
            self._add(node, name, outputs)
            (name,) = [output for output in node.output if output][:1]
        if name != self._graph.output[0].name or len(self._grown.shape) != 1:
            raise scales.Unmapped("its output is not the end of the chain, or no vector")
        if outputs == "values":
            return chain.Policy(self._grown.value(), shape, "values", None, None, False, "ONNX")
        bounded, clips = self._grown.bounded(low, high)
        return chain.Policy(bounded, shape, "actions", low, high, clips, "ONNX")

    def _add(self, node: Any, name: str, outputs: distillation.Outputs) -> None:
        kind = node.op_type
        if kind in _DROPPED or (kind in _CHOOSING and outputs == "values"):
            return
        adders: dict[str, Callable[[Any, str], None]] = {
            "Gemm": self._gemm, "MatMul": self._matmul, "Conv": self._conv, "BatchNormalization": self._batch_norm,
            "Clip": self._clip, "Flatten": self._flatten, "Reshape": self._flatten,
            "Add": self._arithmetic, "Sub": self._arithmetic, "Mul": self._arithmetic, "Div": self._arithmetic,
        }  # fmt: skip
        if kind in _ACTIVATIONS:
            self._grown.activate(_ACTIVATIONS[kind])
        elif kind in adders:
            adders[kind](node, name)
        else:
            raise scales.Unmapped(f"the operator {kind} ({node.name or node.output[0]})")

    def _gemm(self, node: Any, name: str) -> None:
        if node.input[0] != name or _attribute(node, "transA", 0):
            raise scales.Unmapped(f"Gemm ({node.name}) of a transposed input")
        kernel = self._array(node.input[1]) * _attribute(node, "alpha", 1.0)
        bias = self._array(node.input[2]) * _attribute(node, "beta", 1.0) if len(node.input) > 2 else None
        kernel = kernel if _attribute(node, "transB", 0) else kernel.T
        self._dense(kernel, None if bias is None else np.broadcast_to(bias.reshape(-1), (len(kernel),)))

    def _matmul(self, node: Any, name: str) -> None:
        if node.input[0] != name:
            raise scales.Unmapped(f"MatMul ({node.name}) from the left")
        self._dense(self._array(node.input[1]).T, None)

    def _dense(self, kernel: Array, bias: Array | None) -> None:
        if self._order is not None:
            kernel, self._order = kernel[:, self._order], None
        self._grown.dense(kernel, bias)

    def _conv(self, node: Any, name: str) -> None:
        strides, pads = list(_attribute(node, "strides", [1, 1])), list(_attribute(node, "pads", [0, 0, 0, 0]))
        is_plain = len(set(strides)) == 1 and not any(pads) and _attribute(node, "group", 1) == 1
        padded = _attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")
        if not is_plain or padded or set(_attribute(node, "dilations", [1])) != {1}:
            raise scales.Unmapped(f"Conv ({node.name}) with padding, groups, dilation or unequal strides")
        kernel = self._array(node.input[1])
        if kernel.ndim != 4:
            raise scales.Unmapped(f"Conv ({node.name}) of {kernel.ndim - 2} dimensions")
        bias = self._array(node.input[2]) if len(node.input) > 2 else None
        self._grown.convolve(kernel.transpose(0, 2, 3, 1), bias, int(strides[0]))

    def _batch_norm(self, node: Any, name: str) -> None:
        if _attribute(node, "training_mode", 0):
            raise scales.Unmapped(f"BatchNormalization ({node.name}) in training")
        gamma, beta, mean, variance = (self._array(one).astype(np.float64) for one in node.input[1:5])
        gain = gamma / np.sqrt(variance + _attribute(node, "epsilon", 1e-5))
        self._grown.affine(*(self._placed(a) for a in (gain, beta - mean * gain)))

    def _clip(self, node: Any, name: str) -> None:
        ends = [_attribute(node, "min", -math.inf), _attribute(node, "max", math.inf)]
        for k, entry in enumerate(node.input[1:3]):
            if entry:
                ends[k] = float(self._array(entry).reshape(-1)[0])
        low, high = ends
        if low == 0:
            self._grown.activate("relu")
        if math.isfinite(low) and math.isfinite(high):
            self._grown.clip(low, high)
        elif low != 0 or math.isfinite(high):
            raise scales.Unmapped(f"Clip ({node.name}) to {low} and {high}")

    def _flatten(self, node: Any, name: str) -> None:
        shape = self._grown.shape
        if node.op_type == "Flatten":
            is_flat = _attribute(node, "axis", 1) == 1
        else:
            target = [int(size) for size in self._array(node.input[1])]
            is_flat = len(target) == 2 and target[1] in (-1, math.prod(shape))
        if not is_flat:
            raise scales.Unmapped(f"{node.op_type} ({node.name}) to something else than a vector")
        if len(shape) == 3:
            height, width, channels = shape
            self._order = np.arange(math.prod(shape)).reshape(channels, height, width).transpose(1, 2, 0).reshape(-1)
        self._grown.flatten()

    def _arithmetic(self, node: Any, name: str) -> None:
        other = node.input[1] if node.input[0] == name else node.input[0]
        if other not in self._constants:
            raise scales.Unmapped(
                f"{node.op_type} ({node.name or node.output[0]}) of two tensors that are no constants"
            )
        is_first, number = node.input[0] == name, self._placed(self._array(other).astype(np.float64))
        if node.op_type == "Add":
            self._grown.affine(1.0, number)
        elif node.op_type == "Sub":
            self._grown.affine(*((1.0, -number) if is_first else (-1.0, number)))
        elif node.op_type == "Mul":
            self._grown.affine(number, 0.0)
        elif is_first:
            self._grown.affine(1.0 / number, 0.0)
        else:
            raise scales.Unmapped(f"Div ({node.name}) by what was observed")

    def _placed(self, number: Array) -> Array:
        """Returns a constant that broadcasts to what ONNX has there in the order that is used here."""
        shape = self._grown.shape
        if number.size == 1:
            return number.reshape(())
        if len(shape) == 3:
            if number.ndim == 1:  # of BatchNormalization: per channel
                return number
            full = np.broadcast_to(number.reshape(number.shape[-3:]), (shape[2], *shape[:2]))
            is_by_channel = number.shape[-2:] == (1, 1)
            return full[:, 0, 0] if is_by_channel else full.transpose(1, 2, 0)
        flat = np.broadcast_to(number.reshape(-1), shape)
        return flat if self._order is None else flat[self._order]

    def _keep(self, node: Any) -> None:
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        if value is None:
            raise scales.Unmapped(f"Constant ({node.output[0]}) that is no tensor")
        self._constants[node.output[0]] = value

    def _array(self, name: str) -> Array:
        """Returns a constant tensor."""
        from onnx import TensorProto, numpy_helper

        if name not in self._constants:
            raise scales.Unmapped(f"{name or 'an input'} is no constant")
        if name not in self._arrays:
            tensor = self._constants[name]
            if tensor.data_location == TensorProto.EXTERNAL:
                tensor = self._inside(tensor)
            array = numpy_helper.to_array(tensor)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"{name} is NaN or infinite: training diverged")
            self._arrays[name] = array
        return self._arrays[name]

    def _inside(self, tensor: Any) -> Any:
        """Returns a tensor that is kept outside of the file with its bytes in it."""
        from onnx import TensorProto

        where = {entry.key: entry.value for entry in tensor.external_data}
        directory, location = self._directory.resolve(), where.get("location", "")
        file = (directory / location).resolve()
        if not location or Path(location).is_absolute() or not file.is_relative_to(directory):
            raise ValueError(f"{tensor.name} is kept in {location!r}, which leaves the file's directory")
        offset, length = int(where.get("offset", 0)), int(where.get("length", -1))
        if offset < 0 or not file.is_file() or file.stat().st_size > arrays.BYTES_MAX:
            raise ValueError(f"{tensor.name} is kept in {location!r}, which is missing or too large")
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(length)
        held = TensorProto()
        held.CopyFrom(tensor)
        held.ClearField("external_data")
        held.data_location = TensorProto.DEFAULT
        held.raw_data = data
        return held


def _attribute(node: Any, name: str, default: Any) -> Any:
    from onnx import helper

    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)
