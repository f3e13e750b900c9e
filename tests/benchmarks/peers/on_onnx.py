"""Actors on ONNX Runtime: float32, and dynamic int8 (weights per output, activations as they come).

Dynamic, not static: a static one would need observations to calibrate with, and a policy's file has none.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
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
        self._session = ort.InferenceSession(
            self._quantized(_graph(layers, batch)), options, providers=["CPUExecutionProvider"]
        )
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

    def _quantized(self, graph: Any) -> bytes:
        model: bytes = graph.SerializeToString()
        return model


class Int8(Float32):
    """The same, quantized."""

    delegate = "ONNX Runtime dynamic int8"

    def _prepared(self, layers: tuple[mlp.Layer, ...]) -> tuple[mlp.Layer, ...]:
        return layers  # its input is quantized as a whole, so that features must stay alike in size

    def _quantized(self, graph: Any) -> bytes:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        with tempfile.TemporaryDirectory(prefix="actorq-onnx-") as directory:
            source, target = Path(directory, "float32.onnx"), Path(directory, "int8.onnx")
            onnx.save(graph, str(source))
            quantize_dynamic(source, target, per_channel=True, weight_type=QuantType.QInt8)
            return target.read_bytes()


def _graph(layers: tuple[mlp.Layer, ...], batch: int) -> Any:
    nodes: list[Any] = []
    numbers: list[Any] = []
    at = "x"

    def add(operator: str, *constants: Any) -> None:
        nonlocal at
        names = [f"{operator}{len(nodes)}_{k}" for k in range(len(constants))]
        numbers.extend(
            numpy_helper.from_array(np.ascontiguousarray(c), n) for c, n in zip(constants, names, strict=True)
        )
        nodes.append(helper.make_node(operator, [at, *names], [at := f"t{len(nodes)}"]))

    for layer in layers:
        if isinstance(layer, mlp.Affine):
            add("Mul", layer.gain)
            add("Add", layer.offset)
            continue
        add("MatMul", layer.kernel.T)
        add("Add", layer.bias)
        if layer.activation != "none":
            add(_ACTIVATIONS[layer.activation])
    nodes[-1].output[0] = "y"
    x, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [batch, size])
        for name, size in (("x", mlp.inputs(layers)), ("y", mlp.outputs(layers)))
    )
    graph = helper.make_graph(nodes, "policy", [x], [y], numbers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})  # there is nothing to simplify
    return model
