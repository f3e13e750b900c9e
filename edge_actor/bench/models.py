"""Policies to measure: random ones of a given shape, in numpy and as .tflite in every precision.

The graphs are those that the learner ships: float32 observations, scaled per feature (MUL and ADD), then float32
layers; or QUANTIZE, int8 layers with a weight scale per output, DEQUANTIZE. float16 holds weights in half the space and
widens them when it is loaded. Time does not depend on what the weights are, as long as none is 0 throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_actor.bench import flatbuffer
from edge_actor.bench.flatbuffer import Scalar

FloatArray = NDArray[np.float32]
PRECISIONS = ("float32", "float16", "int8")
FEATURES, ACTIONS = 24, 6
_PIXELS = (84, 84, 4)
_NATURE_CNN = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # filters, size, stride; Mnih et al. 2015
CALIBRATION_ROWS = 64
"""The first of `observations`: what the ranges of int8 are made for."""
_CODES = {"ADD": (0, 1), "CONV_2D": (3, 3), "DEQUANTIZE": (6, 3), "FULLY_CONNECTED": (9, 4), "MUL": (18, 1)}
_CODES |= {"RESHAPE": (22, 1), "QUANTIZE": (114, 1)}
"""Builtin operators: number and version, https://github.com/tensorflow/tensorflow (tflite/schema/schema.fbs)."""
_OPTIONS = {"CONV_2D": 1, "FULLY_CONNECTED": 8, "ADD": 11, "RESHAPE": 17, "MUL": 21, "DEQUANTIZE": 38, "QUANTIZE": 89}
_TYPES = {"float32": 0, "float16": 1, "int32": 2, "int8": 9}


@dataclass(frozen=True, slots=True)
class Shape:
    """The layers of a policy. `width` and `layers` of a CNN are those behind its convolutions."""

    width: int
    layers: int
    cnn: bool = False

    @property
    def name(self) -> str:
        """The name in tables, as `256x2`."""
        return "cnn" if self.cnn else f"{self.width}x{self.layers}"

    @property
    def observation(self) -> tuple[int, ...]:
        """The shape of one observation."""
        return _PIXELS if self.cnn else (FEATURES,)

    @property
    def weights(self) -> int:
        """The number of weights, biases aside; the bytes of its int8 model, near enough."""
        dense = self.width * ((self.layers - 1) * self.width + ACTIONS)
        return dense + (
            3136 * self.width + 4 * 32 * 64 + 16 * 64 * 32 + 9 * 64 * 64 if self.cnn else FEATURES * self.width
        )


CNN = Shape(512, 1, cnn=True)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Dense: kernel [inputs, outputs]. Convolution (stride > 0): kernel [size, size, channels, filters]."""

    kernel: FloatArray
    bias: FloatArray
    stride: int
    relu: bool

    def __call__(self, x: FloatArray) -> FloatArray:
        """Returns outputs for a batch."""
        if self.stride:
            y: FloatArray = _convolve(x, self) + self.bias
        else:
            y = x.reshape(len(x), -1) @ self.kernel + self.bias
        return np.maximum(y, 0.0) if self.relu else y


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A policy in fp32. `gain` and `offset` are per feature, empty in front of convolutions."""

    shape: Shape
    gain: FloatArray
    offset: FloatArray
    layers: tuple[Layer, ...]

    def __call__(self, x: FloatArray) -> FloatArray:
        """Returns outputs [B, actions] for observations [B, ...], as one writes it in numpy."""
        x = self._scaled(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def steps(self, x: FloatArray) -> Iterator[tuple[Layer, FloatArray, FloatArray]]:
        """Yields each layer with what goes in and what comes out."""
        x = self._scaled(x)
        for layer in self.layers:
            y = layer(x)
            yield layer, x, y
            x = y

    def _scaled(self, x: FloatArray) -> FloatArray:
        return x * self.gain + self.offset if self.gain.size else x


def make(shape: Shape) -> Policy:
    """Makes the policy of a shape: always the same."""
    rng = np.random.default_rng(0)
    layers: list[Layer] = []

    def add(kernel_shape: tuple[int, ...], stride: int, relu: bool) -> None:
        kernel = rng.standard_normal(kernel_shape, np.float32)
        kernel *= np.float32(2.0 / np.prod(kernel_shape[:-1])) ** np.float32(0.5)
        layers.append(Layer(kernel, rng.standard_normal(kernel_shape[-1], np.float32) / np.float32(10), stride, relu))

    inputs = FEATURES
    if shape.cnn:
        side, channels = _PIXELS[0], _PIXELS[2]
        for filters, size, stride in _NATURE_CNN:
            add((size, size, channels, filters), stride, True)
            side, channels = (side - size) // stride + 1, filters
        inputs = side * side * channels
    for outputs in [shape.width] * shape.layers:
        add((inputs, outputs), 0, True)
        inputs = outputs
    add((inputs, ACTIONS), 0, False)
    scaled = 0 if shape.cnn else FEATURES
    gain, offset = rng.uniform(0.5, 2.0, scaled).astype(np.float32), rng.uniform(-0.1, 0.1, scaled).astype(np.float32)
    return Policy(shape, gain, offset, tuple(layers))


def observations(shape: Shape, rows: int, seed: int = 1) -> FloatArray:
    """Observations [rows, ...] of the size that the policies expect."""
    rng = np.random.default_rng(seed)
    drawn: FloatArray = rng.uniform(-1.0, 1.0, (rows, *shape.observation)).astype(np.float32)
    return np.abs(drawn) if shape.cnn else drawn


def tflite(policy: Policy, precision: str) -> bytes:
    """The .tflite file of a policy, for float32 observations [1, ...] and outputs [1, actions]."""
    graph = _Graph()
    x = observation = graph.tensor("observation", (1, *policy.shape.observation))
    if policy.gain.size:
        for name, values in (("MUL", policy.gain), ("ADD", policy.offset)):
            y = graph.tensor(name, (1, FEATURES))
            graph.operator(name, [x, graph.constant(values)], y, {0: Scalar("b", 0)})
            x = y
    quantized = precision == "int8"
    sample = observations(policy.shape, CALIBRATION_ROWS if quantized else 1)  # without calibration just for the shapes
    affine = (0.0, 0)
    for index, (layer, before, after) in enumerate(policy.steps(sample)):
        if quantized and index == 0:
            affine = _affine(before)
            x = _then(graph, "QUANTIZE", x, (1, *policy.shape.observation), "int8", affine)
        if not layer.stride and before.ndim > 2:
            y = graph.tensor("flat", (1, layer.kernel.shape[0]), "int8" if quantized else "float32", affine)
            to = np.array([-1, layer.kernel.shape[0]], np.int32)
            graph.operator("RESHAPE", [x, graph.constant(to)], y, {0: to})
            x = y
        kernel = layer.kernel.reshape(-1, layer.kernel.shape[-1]).T  # [outputs, inputs]
        shape = (len(kernel), *layer.kernel.shape[:-1])
        if quantized:
            scales = np.maximum(np.abs(kernel).max(1), 1e-8) / 127.0
            held = np.rint(kernel / scales[:, None]).astype(np.int8).reshape(shape)
            weights = graph.constant(held, (scales, 0))
            bias_scales = scales * np.float32(affine[0])
            bias = graph.constant(np.rint(layer.bias / bias_scales).astype(np.int32), (bias_scales, 0))
            affine = _affine(after)
        else:
            held_float = kernel.astype(precision).reshape(shape)
            weights = graph.constant(held_float)
            if precision == "float16":
                weights = _then(graph, "DEQUANTIZE", weights, shape, "float32", (0.0, 0))
            bias = graph.constant(layer.bias)
        y = graph.tensor(f"layer{index}", (1, *after.shape[1:]), "int8" if quantized else "float32", affine)
        relu = Scalar("b", int(layer.relu))
        if layer.stride:
            stride = Scalar("i", layer.stride)
            options: dict[int, Scalar | flatbuffer.Node] = {
                0: Scalar("b", 1),
                1: stride,
                2: stride,
                3: relu,
                4: Scalar("i", 1),
                5: Scalar("i", 1),
            }
            graph.operator("CONV_2D", [x, weights, bias], y, options)
        else:
            graph.operator("FULLY_CONNECTED", [x, weights, bias], y, {0: relu})
        x = y
    if quantized:
        x = _then(graph, "DEQUANTIZE", x, (1, ACTIONS), "float32", (0.0, 0))
    return graph.write(observation, x)


Affine = tuple[Any, int]
"""Scale, or scales per output, and zero point. Scale 0: not quantized."""


def _affine(values: FloatArray) -> Affine:
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    scale = max(high - low, 1e-6) / 255.0
    return scale, round(-128 - low / scale)


def _then(graph: _Graph, name: str, x: int, shape: tuple[int, ...], dtype: str, affine: Affine) -> int:
    y = graph.tensor(name, shape, dtype, affine)
    graph.operator(name, [x], y, {})
    return y


def _convolve(x: FloatArray, layer: Layer) -> FloatArray:
    size, step = layer.kernel.shape[0], layer.stride
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))
    return np.tensordot(windows[:, ::step, ::step], layer.kernel, axes=((4, 5, 3), (0, 1, 2)))


class _Graph:
    """Tensors and operators as they come; fields are numbered as in TFLite's schema.fbs."""

    def __init__(self) -> None:
        self._buffers: list[flatbuffer.Node] = [{}]  # the empty one, of all tensors that are computed
        self._tensors: list[flatbuffer.Node] = []
        self._operators: list[flatbuffer.Node] = []
        self._codes: list[str] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: str = "float32", affine: Affine = (0.0, 0), buffer: int = 0
    ) -> int:
        fields: dict[int, Scalar | flatbuffer.Node] = {
            0: np.array(shape, np.int32),
            1: Scalar("b", _TYPES[dtype]),
            2: Scalar("I", buffer),
            3: f"{name}_{len(self._tensors)}",
        }
        scales = np.atleast_1d(np.asarray(affine[0], np.float32))
        if scales.any():
            fields[4] = {2: scales, 3: np.full(len(scales), affine[1], np.int64), 6: Scalar("i", 0)}
        self._tensors.append(fields)
        return len(self._tensors) - 1

    def constant(self, values: NDArray[Any], affine: Affine = (0.0, 0)) -> int:
        self._buffers.append({0: np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)})
        return self.tensor("constant", values.shape, str(values.dtype), affine, len(self._buffers) - 1)

    def operator(self, name: str, inputs: list[int], output: int, options: dict[int, Scalar | flatbuffer.Node]) -> None:
        if name not in self._codes:
            self._codes.append(name)
        self._operators.append(
            {
                0: Scalar("I", self._codes.index(name)),
                1: np.array(inputs, np.int32),
                2: np.array([output], np.int32),
                3: Scalar("B", _OPTIONS[name]),
                4: options,
            }
        )

    def write(self, observation: int, output: int) -> bytes:
        codes: list[flatbuffer.Node] = [
            {0: Scalar("b", _CODES[name][0]), 2: Scalar("i", _CODES[name][1]), 3: Scalar("i", _CODES[name][0])}
            for name in self._codes
        ]
        subgraph: dict[int, Scalar | flatbuffer.Node] = {
            0: self._tensors,
            1: np.array([observation], np.int32),
            2: np.array([output], np.int32),
            3: self._operators,
            4: "main",
        }
        model: dict[int, Scalar | flatbuffer.Node] = {
            0: Scalar("I", 3),
            1: codes,
            2: [subgraph],
            3: "actorq-fleet benchmark",
            4: self._buffers,
        }
        return flatbuffer.write(model, b"TFL3")
