"""Actors on ONNX Runtime: float32, and dynamic int8 (weights per output, activations as they come).

Dynamic, not static: a static one would need observations to calibrate with, and a policy's file has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from broker.contract import messages
from tests.benchmarks.peers import mlp

_OPSET, _IR_VERSION = 17, 8
_ACTIVATIONS = {"relu": "Relu", "tanh": "Tanh"}


class Float32:
    """Stands in for `edge_actor.policies.interpreter.Interpreter`."""

    runtime = f"onnxruntime {ort.__version__}"
    delegate = "ONNX Runtime float32"

    def __init__(
        self, model: bytes, batch: int, *, threads: int = 1, limit_bytes: int = messages.MAX_POLICY_BYTES
    ) -> None:
        layers = self._prepared(mlp.read(model, limit_bytes))
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        graph = _Graph()
        for layer in layers:
            self._add(graph, layer)
        exported = graph.model(batch, mlp.inputs(layers), mlp.outputs(layers))
        self._session = ort.InferenceSession(exported, options, providers=["CPUExecutionProvider"])
        self.input = np.zeros((batch, mlp.inputs(layers)), np.float32)
        self.output = np.zeros((batch, mlp.outputs(layers)), np.float32)
        self._binding = self._session.io_binding()  # to these very arrays, without copies
        self._binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(self.input))
        self._binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(self.output))

    def invoke(self) -> None:
        """Runs it."""
        self._session.run_with_iobinding(self._binding)

    def _prepared(self, layers: tuple[mlp.Layer, ...]) -> tuple[mlp.Layer, ...]:
        return mlp.folded(layers)

    def _add(self, graph: _Graph, layer: mlp.Layer) -> None:
        if isinstance(layer, mlp.Affine):
            graph.add("Mul", [graph.at, graph.constant(layer.gain)])
            graph.add("Add", [graph.at, graph.constant(layer.offset)])
            return
        self._add_product(graph, layer.kernel)
        graph.add("Add", [graph.at, graph.constant(layer.bias)])
        if layer.activation != "none":
            graph.add(_ACTIVATIONS[layer.activation], [graph.at])

    def _add_product(self, graph: _Graph, kernel: mlp.FloatArray) -> None:
        graph.add("MatMul", [graph.at, graph.constant(kernel.T)])


class Int8(Float32):
    """The same, quantized."""

    delegate = "ONNX Runtime dynamic int8"

    def _prepared(self, layers: tuple[mlp.Layer, ...]) -> tuple[mlp.Layer, ...]:
        return layers  # its input is quantized as a whole, so that features must stay alike in size

    def _add_product(self, graph: _Graph, kernel: mlp.FloatArray) -> None:
        """Adds what onnxruntime.quantization.quantize_dynamic would, whose files take 0.4 s for 2048x3."""
        scale = np.maximum(np.abs(kernel).max(1), 1e-12) / np.float32(127.0)
        rounded = np.rint(kernel * (1.0 / scale)[:, None]).astype(np.int8)
        x, x_scale, x_zero = graph.add("DynamicQuantizeLinear", [graph.at], outputs=3)
        weights, weight_zero = graph.constant(rounded.T), graph.constant(np.zeros(len(scale), np.int8))
        (product,) = graph.add("MatMulInteger", [x, weights, x_zero, weight_zero])
        (product,) = graph.add("Cast", [product], to=onnx.TensorProto.FLOAT)
        (scales,) = graph.add("Mul", [x_scale, graph.constant(scale)])
        graph.add("Mul", [product, scales])


class _Graph:
    """A graph that is being made.

    Attributes:
        at: The newest value.
    """

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.at = "x"

    def constant(self, array: Any) -> str:
        """Adds a constant; returns its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(self, operator: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
        """Adds an operator; returns the names of what it puts out, of which the first is the newest value."""
        names = [f"t{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        self.at = names[0]
        return names

    def model(self, batch: int, inputs: int, outputs: int) -> bytes:
        """Returns the bytes of the model."""
        self.nodes[-1].output[0] = "y"
        x, y = (
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [batch, size])
            for name, size in (("x", inputs), ("y", outputs))
        )
        graph = helper.make_graph(self.nodes, "policy", [x], [y], self.constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
        model: bytes = made.SerializeToString()
        return model
