"""ONNX graphs: chains answer as they do, random ones too or are refused by operator; nothing leaves the directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import errors
from learner.quantize import fp32
from learner.study.user_models.formats import onnx_file

onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
Array = NDArray[Any]


class Graph:
    """A chain that grows, beside what it answers by numpy."""

    def __init__(self, x: Array) -> None:
        self.x, self.shape = x.astype(np.float64), x.shape[1:]
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.name = "observation"

    def add(self, kind: str, *constants: Array, first: bool = True, **attributes: Any) -> None:
        names = []
        for constant in constants:
            name = f"c{len(self.constants)}"
            self.constants.append(numpy_helper.from_array(constant, name))
            names.append(name)
        output = f"t{len(self.nodes)}"
        inputs = [self.name, *names] if first else [*names, self.name]
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"{kind}_{len(self.nodes)}", **attributes))
        self.name = output

    def save(self, path: Path) -> Path:
        entry = helper.make_tensor_value_info("observation", onnx.TensorProto.FLOAT, ["batch", *self.shape])
        end = helper.make_tensor_value_info(self.name, onnx.TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "g", [entry], [end], self.constants)
        path.write_bytes(helper.make_model(graph).SerializeToString())
        return path


def dense(graph: Graph, rng: np.random.Generator, out: int) -> None:
    width = graph.x.shape[1]
    kernel = (rng.normal(size=(out, width)) / np.sqrt(width)).astype(np.float32)
    bias = rng.normal(size=out).astype(np.float32)
    if rng.random() < 0.5:
        graph.add("Gemm", kernel, bias, transB=1)
    else:
        graph.add("MatMul", np.ascontiguousarray(kernel.T))
        graph.add("Add", bias, first=bool(rng.random() < 0.5))
    graph.x = graph.x @ kernel.T + bias


def activation(graph: Graph, rng: np.random.Generator) -> None:
    kind = rng.choice(["Relu", "Tanh", "Sigmoid", "Clip"])
    if kind == "Clip":
        low, high = np.float32(-0.5), np.float32(1.0)
        graph.add("Clip", np.array(low), np.array(high))
        graph.x = np.clip(graph.x, low, high)
        return
    graph.add(str(kind))
    functions: dict[str, Any] = {
        "Relu": lambda x: np.maximum(x, 0),
        "Tanh": np.tanh,
        "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    }
    graph.x = functions[str(kind)](graph.x)


def norm(graph: Graph, rng: np.random.Generator) -> None:
    channels = graph.x.shape[1]
    gamma, beta, mean, variance = (a.astype(np.float32) for a in rng.uniform(0.5, 1.5, (4, channels)))
    graph.add("BatchNormalization", gamma, beta, mean, variance)
    over = (slice(None), *[None] * (graph.x.ndim - 2))
    graph.x = (graph.x - mean[over]) / np.sqrt(variance[over] + 1e-5) * gamma[over] + beta[over]


def conv(graph: Graph, rng: np.random.Generator) -> None:
    channels, out, side, stride = (
        graph.x.shape[1],
        int(rng.integers(1, 5)),
        int(rng.integers(1, 4)),
        int(rng.integers(1, 3)),
    )
    kernel = (rng.normal(size=(out, channels, side, side)) / side).astype(np.float32)
    bias = rng.normal(size=out).astype(np.float32)
    graph.add("Conv", kernel, bias, strides=[stride, stride])
    patches = np.lib.stride_tricks.sliding_window_view(graph.x, (side, side), axis=(2, 3))[:, :, ::stride, ::stride]
    graph.x = np.einsum("nchwij,ocij->nohw", patches, kernel) + bias[:, None, None]


def arithmetic(graph: Graph, rng: np.random.Generator) -> None:
    kind = str(rng.choice(["Add", "Sub", "Mul", "Div"]))
    number = rng.uniform(0.5, 2, (graph.x.shape[1], *[1] * (graph.x.ndim - 2))).astype(np.float32)
    graph.add(kind, number)
    graph.x = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}[kind](graph.x, number)


REFUSED = ("Elu", "Softplus", "GlobalMaxPool", "LeakyRelu")
POOLING = ("MaxPool", "AveragePool")


def random_graph(seed: int) -> tuple[Graph, Array, str]:
    """A graph, its observations [16, ...], and the operator for which it is to be refused; empty for chains."""
    rng = np.random.default_rng(seed)
    is_image = rng.random() < 0.5
    shape = (2, int(rng.integers(6, 12)), int(rng.integers(6, 12))) if is_image else (int(rng.integers(1, 9)),)
    graph, refused = Graph(rng.normal(size=(16, *shape)).astype(np.float32)), ""
    x = graph.x.astype(np.float32)
    if is_image:
        for _ in range(int(rng.integers(1, 3))):
            conv(graph, rng)
            for step in (norm, arithmetic, activation):
                if rng.random() < 0.5:
                    step(graph, rng)
        if rng.random() < 0.2:
            refused = str(rng.choice(POOLING))
            graph.add(refused, kernel_shape=[2, 2])
        graph.x = graph.x.reshape(16, -1)
        if rng.random() < 0.5:
            graph.add("Flatten")
        else:
            graph.add("Reshape", np.array([-1, graph.x.shape[1]], np.int64))
        if rng.random() < 0.5:
            activation(graph, rng)
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.3:
            arithmetic(graph, rng)
        before, width = graph.name, graph.x.shape[1]
        is_residual = not refused and rng.random() < 0.1
        dense(graph, rng, width if is_residual else int(rng.integers(2, 9)))
        for step in (norm, activation):
            if rng.random() < 0.5:
                step(graph, rng)
        if is_residual:
            refused, output = "Add", f"sum{len(graph.nodes)}"
            graph.nodes.append(helper.make_node("Add", [before, graph.name], [output]))
            graph.name = output
    if not refused and rng.random() < 0.2:
        refused = str(rng.choice(REFUSED))
        graph.add(refused)
    return graph, x, refused


@pytest.mark.parametrize("seed", range(100))
def test_random_chains_answer_alike_or_are_refused_by_name(tmp_path: Path, seed: int) -> None:
    graph, x, refused = random_graph(seed)
    path = graph.save(tmp_path / "g.onnx")
    if refused:
        with pytest.raises(errors.PolicyError, match=refused):
            onnx_file.read(path, "values", None, None)
        return
    policy = onnx_file.read(path, "values", None, None)
    answer = fp32.outputs(policy.layers, np.moveaxis(x, 1, 3) if x.ndim == 4 else x)
    np.testing.assert_allclose(answer, graph.x, rtol=1e-3, atol=1e-3)


def test_actions_are_clipped_to_bounds_that_are_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    graph = Graph(rng.normal(size=(16, 5)))
    dense(graph, rng, 2)
    low, high = np.array([-1.0, 0.0]), np.array([1.0, 4.0])
    policy = onnx_file.read(graph.save(tmp_path / "g.onnx"), "actions", low, high)
    assert policy.clips
    np.testing.assert_allclose(fp32.outputs(policy.layers, rng.normal(size=(3, 5))).shape, (3, 2))


def external(tmp_path: Path, location: str) -> Path:
    tensor = numpy_helper.from_array(np.ones((2, 3), np.float32), "k")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    graph = Graph(np.zeros((1, 3)))
    graph.constants.append(tensor)
    graph.nodes.append(helper.make_node("Gemm", ["observation", "k"], ["y"], transB=1))
    graph.name = "y"
    return graph.save(tmp_path / "g.onnx")


def test_weights_outside_of_the_file_are_read_from_its_directory_alone(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    for directory in (inside, tmp_path):
        (directory / "weights.bin").write_bytes(np.ones(6, "<f4").tobytes())
    (inside / "link.bin").symlink_to(tmp_path / "weights.bin")
    policy = onnx_file.read(external(inside, "weights.bin"), "values", None, None)
    np.testing.assert_array_equal(fp32.outputs(policy.layers, np.ones((1, 3))), [[3, 3]])
    for location in ("../weights.bin", str(tmp_path / "weights.bin"), "link.bin", "", "/etc/passwd"):
        with pytest.raises(errors.PolicyError, match="leaves the file's directory"):
            onnx_file.read(external(inside, location), "values", None, None)
    with pytest.raises(errors.PolicyError, match="missing or too large"):
        onnx_file.read(external(inside, "absent.bin"), "values", None, None)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    graph = Graph(rng.normal(size=(16, 5)))
    dense(graph, rng, 2)
    path = graph.save(tmp_path / "g.onnx")
    whole = path.read_bytes()
    for content in (b"", b"junk", whole[: len(whole) // 2], whole[:-3]):
        path.write_bytes(content)
        with pytest.raises(errors.PolicyError) as caught:
            onnx_file.read(path, "values", None, None)
        assert caught.value.todo


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    graph = Graph(np.zeros((1, 3)))
    graph.add("Gemm", np.full((2, 3), np.nan, np.float32), transB=1)
    with pytest.raises(errors.PolicyError, match="NaN or infinite"):
        onnx_file.read(graph.save(tmp_path / "g.onnx"), "values", None, None)
