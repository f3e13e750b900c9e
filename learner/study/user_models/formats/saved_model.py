"""TensorFlow SavedModel directories: read without running what they hold, and as layers where their graph is a chain.

TensorFlow's loader restores variables, and runs nothing else of a directory that has neither assets nor resources with
initializers nor savers of its own; those are refused before it. Graphs have operations that write files or call Python;
so every operation left once weights are constants is compared with the list of those that networks are made of.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from broker.contract import errors
from learner.quantize import scales
from learner.quantize.distil import distillation
from learner.study.user_models.formats import arrays, chain

Array = NDArray[Any]
FILE = "saved_model.pb"
_DEFAULT = "serving_default"
_HARMLESS = {"user_object", "function", "bare_concrete_function", "variable", "constant", "captured_tensor"}
"""Kinds of objects that loading makes without running a function of the directory's."""
_CONSTANT = "tf.TrackableConstant"
_PASSING = {"Identity", "StopGradient", "Cast", "EnsureShape", "PreventGradient"}
_ACTIVATIONS = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid"}
_CHOOSING = {"Softmax", "LogSoftmax"}
_PURE = {
    *_PASSING, *_ACTIVATIONS, *_CHOOSING, "Abs", "Add", "AddN", "AddV2", "All", "Any", "ArgMax", "ArgMin", "AvgPool",
    "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "BatchToSpaceND", "BiasAdd", "BroadcastArgs", "BroadcastTo",
    "Ceil",
    "ClipByValue", "ConcatV2", "Const", "Conv2D", "Conv2DBackpropInput", "Cos", "Cumsum", "DepthToSpace",
    "DepthwiseConv2dNative", "Div", "DivNoNan", "Einsum", "Elu", "Equal", "Erf", "Erfc", "Exp", "ExpandDims", "Fill",
    "Floor", "FloorDiv", "FloorMod", "FusedBatchNorm", "FusedBatchNormV3", "GatherNd", "GatherV2", "Greater",
    "GreaterEqual", "L2Loss", "LeakyRelu", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr",
    "MatMul", "Max", "MaxPool", "Maximum", "Mean", "Min", "Minimum", "MirrorPad", "Mul", "Neg", "NoOp", "NotEqual",
    "OneHot", "Pack", "Pad", "PadV2", "Placeholder", "Pow", "Prod", "Range", "Rank", "RealDiv", "Reciprocal", "Relu6",
    "Reshape", "ResizeBilinear", "ResizeNearestNeighbor", "Reverse", "ReverseV2", "Round", "Rsqrt", "Select",
    "SelectV2",
    "Selu", "Shape", "Sign", "Sin", "Size", "Slice", "Softplus", "Softsign", "SpaceToBatchND", "SpaceToDepth", "Split",
    "SplitV", "Sqrt", "Square", "SquaredDifference", "Squeeze", "StridedSlice", "Sub", "Sum", "Tile", "TopKV2",
    "Transpose", "Unpack", "Where", "ZerosLike", "OnesLike", "Xlogy", "Xdivy",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A policy of a SavedModel, its weights constants.

    Attributes:
        function: Concrete function of one float32 tensor [N, *shape] to one [N, size].
        shape: Of one observation.
        size: Number of outputs.
        batch: Rows that it takes at once; None for any number.
    """

    function: Any
    shape: tuple[int, ...]
    size: int
    batch: int | None

    def __call__(self, observations: Any) -> Any:
        """Returns outputs [N, size] for a tensor [N, *shape]."""
        (answer,) = tf.nest.flatten(self.function(observations))
        return answer


def load(path: Path) -> Graph:
    """Loads the signature `serving_default`, or the only one.

    Raises:
        PolicyError: The directory is damaged or too large, or would run something; it has no signature, several without
            that name, or one that is no policy. Says what.
    """
    _check(path)
    absl = logging.getLogger("absl")
    absl.addFilter(_nothing)  # what Keras's directories lack for further training
    try:
        loaded = tf.saved_model.load(str(path))
        function = _signature(path, dict(loaded.signatures))
        frozen = convert_variables_to_constants_v2(function, lower_control_flow=False)
    except (errors.PolicyError, KeyboardInterrupt):
        raise
    except Exception as error:  # TensorFlow raises whatever it stumbles over
        raise _refused(
            path,
            f"TensorFlow cannot load it: {str(error).strip().partition(chr(10))[0] or type(error).__name__}",
            "copy the whole directory, variables/ included, or save it again with model.export(DIR)",
        ) from error
    finally:
        absl.removeFilter(_nothing)
    if strange := sorted({op.type for op in frozen.graph.get_operations()} - _PURE):
        raise _refused(
            path,
            f"the graph has operations that are not run here: {', '.join(strange)}",
            "build it of dense layers, convolutions, normalisation, pooling and activations, with loops unrolled, and "
            "nothing random, no files, no Python",
            reason="not_convertible",
        )
    weights = [op for op in frozen.graph.get_operations() if op.type == "Const"]
    for op in weights:
        number = tf.make_ndarray(op.get_attr("value"))
        if number.dtype.kind == "f" and np.isnan(number).any():
            raise _refused(
                path,
                f"the model has weights that are NaN ({op.name})",
                "training has diverged: save an earlier state",
                reason="not_finite",
            )
    return _policy(path, frozen)


def _policy(path: Path, frozen: Any) -> Graph:
    """Returns the graph of a frozen function that maps one float32 tensor to one vector."""
    entries, ends = frozen.inputs, tf.nest.flatten(frozen.structured_outputs)
    if len(entries) != 1 or len(ends) != 1:
        raise _refused(
            path,
            f"the signature has {len(entries)} inputs and {len(ends)} outputs, and a policy has one of each",
            "export a function of one tensor that returns one",
        )
    (entry,), (end,) = entries, frozen.outputs
    if entry.dtype != tf.float32 or end.dtype != tf.float32:
        raise _refused(
            path,
            f"the signature maps {entry.dtype.name} to {end.dtype.name}, not float32 to float32",
            "cast inside of it",
        )
    sizes, outs = entry.shape, end.shape
    if not sizes.rank or None in sizes[1:] or outs.rank != 2 or outs[1] is None or sizes[0] not in (None, 1):
        raise _refused(
            path,
            f"the signature maps {sizes} to {outs}, not [N, ...] of fixed size to [N, outputs]",
            "fix every dimension but the batch, and end in a flat output",
        )
    return Graph(frozen.prune(entry, end), tuple(map(int, sizes[1:])), int(outs[1]), sizes[0])


def read(graph: Graph, outputs: distillation.Outputs, low: Array | None, high: Array | None) -> chain.Policy:
    """Returns a graph as layers.

    Args:
        graph: Result of `load`.
        outputs: What it puts out.
        low: Lower bounds of its actions [size].
        high: Upper bounds.

    Raises:
        Unmapped: It is no chain of known operations; says which one.
    """
    reader = _Reader(graph)
    try:
        grown = reader.grown(outputs)
    except ValueError as error:
        raise scales.Unmapped(str(error)) from error
    if len(grown.shape) != 1:
        raise scales.Unmapped("its output is no vector")
    if outputs == "values":
        return chain.Policy(grown.value(), graph.shape, "values", None, None, False, "SavedModel")
    bounded, clips = grown.bounded(low, high)
    return chain.Policy(bounded, graph.shape, "actions", low, high, clips, "SavedModel")


class _Reader:
    """Walks a frozen graph back from its output, then forth."""

    def __init__(self, graph: Graph) -> None:
        self._function, self._grown = graph.function, chain.Chain(graph.shape)
        self._depending: set[str] = set()
        for op in graph.function.graph.get_operations():  # in topological order
            if op.type == "Placeholder" or any(entry.op.name in self._depending for entry in op.inputs):
                self._depending.add(op.name)

    def grown(self, outputs: distillation.Outputs) -> chain.Chain:
        tensor, line = self._function.outputs[0], []
        while tensor.op.type != "Placeholder":
            taken = [entry for entry in tensor.op.inputs if entry.op.name in self._depending]
            if tensor.op.type == "Reshape":  # the other input is a shape, of the batch as it comes
                taken = taken[:1]
            if len(taken) != 1:
                raise scales.Unmapped(f"{tensor.op.type} ({tensor.op.name}) is not in line")
            line.append((tensor.op, taken[0]))
            (tensor,) = taken
        line = [(op, entry) for op, entry in line if not _is_idle(op)]
        if line and outputs == "values" and line[0][0].type in _CHOOSING:  # at the end, where it changes no choice
            line = line[1:]
        for op, entry in reversed(line):
            self._add(op, entry)
        return self._grown

    def _add(self, op: Any, entry: Any) -> None:
        adders: dict[str, Callable[[Any, Any], None]] = {
            "MatMul": self._matmul,
            "Conv2D": self._conv,
            "FusedBatchNormV3": self._batch_norm,
            "Reshape": self._reshape,
            **dict.fromkeys(("BiasAdd", "Add", "AddV2", "Sub", "Mul", "RealDiv"), self._arithmetic),
        }
        if op.type in _ACTIVATIONS:
            self._grown.activate(_ACTIVATIONS[op.type])
        elif op.type == "Relu6":
            self._grown.activate("relu")
            self._grown.clip(0.0, 6.0)
        elif op.type in adders:
            adders[op.type](op, entry)
        else:
            raise scales.Unmapped(f"the operation {op.type} ({op.name})")

    def _matmul(self, op: Any, entry: Any) -> None:
        if op.inputs[0] is not entry or op.get_attr("transpose_a"):
            raise scales.Unmapped(f"MatMul ({op.name}) from the left")
        kernel = self._constant(op.inputs[1])
        self._grown.dense(kernel if op.get_attr("transpose_b") else kernel.T)

    def _conv(self, op: Any, entry: Any) -> None:
        strides = op.get_attr("strides")
        is_plain = op.get_attr("padding") == b"VALID" and op.get_attr("data_format") == b"NHWC"
        kernel = self._constant(op.inputs[1])
        has_groups = kernel.shape[2] != self._grown.shape[-1]
        if not is_plain or strides[1] != strides[2] or set(op.get_attr("dilations")) != {1} or has_groups:
            raise scales.Unmapped(f"Conv2D ({op.name}) with padding, groups, dilation or unequal strides")
        self._grown.convolve(kernel.transpose(3, 0, 1, 2), None, int(strides[1]))

    def _batch_norm(self, op: Any, entry: Any) -> None:
        if op.get_attr("is_training") or op.get_attr("data_format") != b"NHWC" or op.inputs[0] is not entry:
            raise scales.Unmapped(f"{op.type} ({op.name}) in training or with channels first")
        gamma, beta, mean, variance = (self._constant(one).astype(np.float64) for one in op.inputs[1:5])
        gain = gamma / np.sqrt(variance + op.get_attr("epsilon"))
        self._grown.affine(gain, beta - mean * gain)

    def _reshape(self, op: Any, entry: Any) -> None:
        sizes = op.outputs[0].shape
        if sizes.rank != 2 or sizes[1] != math.prod(self._grown.shape):
            raise scales.Unmapped(f"Reshape ({op.name}) to something else than a vector")
        self._grown.flatten()

    def _arithmetic(self, op: Any, entry: Any) -> None:
        is_first = op.inputs[0] is entry
        number = self._constant(op.inputs[1 if is_first else 0]).astype(np.float64)
        while number.ndim > 1 and number.shape[0] == 1:
            number = number[0]
        number = number.reshape(()) if number.size == 1 else number
        if op.type in ("BiasAdd", "Add", "AddV2"):
            self._grown.affine(1.0, number)
        elif op.type == "Sub":
            self._grown.affine(*((1.0, -number) if is_first else (-1.0, number)))
        elif op.type == "Mul":
            self._grown.affine(number, 0.0)
        elif is_first:
            self._grown.affine(1.0 / number, 0.0)
        else:
            raise scales.Unmapped(f"RealDiv ({op.name}) by what was observed")

    def _constant(self, tensor: Any) -> Array:
        """Returns a tensor that does not depend on the observation."""
        if tensor.op.name in self._depending:
            raise scales.Unmapped(f"{tensor.op.type} ({tensor.op.name}) is no constant")
        number: Array = self._function.prune([], [tensor])()[0].numpy()
        return number


def _is_idle(op: Any) -> bool:
    return op.type in _PASSING and all(entry.dtype == op.outputs[0].dtype for entry in op.inputs)


def _check(path: Path) -> None:
    """Raises PolicyError for a directory that is none, is too large, or has more than variables to set up."""
    file = path / FILE
    if not file.is_file():
        raise _refused(path, f"the directory has no {FILE}", "name the directory that model.export(DIR) wrote")
    if link := next((one for one in path.rglob("*") if one.is_symlink()), None):
        raise _refused(path, f"{link.name} is a link, and may lead out of the directory", "copy the files themselves")
    size_bytes = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    if size_bytes > arrays.BYTES_MAX:
        raise _refused(
            path,
            f"the model has {size_bytes / 1e6:,.0f} MB, and {arrays.BYTES_MAX / 1e6:,.0f} MB are the limit",
            "actors could not run it either: make the network smaller",
        )
    described = saved_model_pb2.SavedModel()
    try:
        described.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's own, of which each implementation has another
        raise _refused(path, f"{FILE} is no SavedModel, or is cut off", "save it again") from error
    if len(described.meta_graphs) != 1 or not described.meta_graphs[0].HasField("object_graph_def"):
        raise _refused(
            path,
            f"it has {len(described.meta_graphs)} graphs, or is of TensorFlow 1: loading that runs its initializers",
            "load and save it with tf.saved_model.save of TensorFlow 2",
        )
    (meta,) = described.meta_graphs
    for one in meta.object_graph_def.nodes:
        kind = one.WhichOneof("kind")
        if kind not in _HARMLESS or one.registered_saver or one.saveable_objects:
            raise _refused(
                path,
                f"it holds an object ({kind}) that runs its own operations when it is loaded",
                "export the network alone, without lookup tables, assets or savers",
            )
        # TensorFlow looks a class up by this name whatever the kind, and sets children as attributes of what it makes
        is_plain = not one.registered_name or (one.registered_name == _CONSTANT and kind == "constant")
        hooks = [child.local_name for child in (*one.children, *one.dependencies) if _is_hook(child.local_name)]
        if not is_plain or hooks or one.slot_variables:
            raise _refused(
                path,
                f"an object of it ({one.registered_name or ', '.join(hooks) or 'slots'}) takes part in its loading",
                "export the network alone, as model.export(DIR) does",
            )
    bodies = [meta.graph_def.node, *(one.node_def for one in meta.graph_def.library.function)]
    claimed = sum(
        math.prod(max(0, dim.size) for dim in node.attr["value"].tensor.tensor_shape.dim)
        for body in bodies
        for node in body
        if node.op == "Const"
    )
    if 4 * claimed > arrays.BYTES_MAX:  # one number may stand for all
        raise _refused(path, f"its constants have {claimed:,} elements", "make the network smaller")


def _is_hook(name: str) -> bool:
    """Returns whether TensorFlow may call an attribute of this name while it loads."""
    return name != "__call__" and hasattr(tf.__internal__.tracking.Trackable, name)


def _signature(path: Path, signatures: dict[str, Any]) -> Any:
    names = sorted(signatures)
    if _DEFAULT in signatures:
        return signatures[_DEFAULT]
    if len(names) == 1:
        return signatures[names[0]]
    found = f"{len(names)} signatures ({', '.join(names)}), none of them {_DEFAULT}" if names else "no signature"
    raise _refused(
        path, f"it has {found}", "save the policy's function: tf.saved_model.save(module, DIR, signatures=function)"
    )


def _refused(path: Path, what: str, todo: str, *, reason: str = "model") -> errors.PolicyError:
    return errors.PolicyError(what, reason=reason, where=str(path), todo=todo)


def _nothing(record: logging.LogRecord) -> bool:
    return False
