"""Builds policy layers step by step, folding what is linear into what has weights.

Whatever a reader finds (normalisers, frame scaling, batch normalisation, dueling heads, two dense layers in a row) ends
as the layers that the learner publishes: dense, convolution, ReLU, tanh. Folding is done in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import layers
from learner.quantize import scales

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A policy that was read from a file.

    Attributes:
        layers: For raw observations.
        shape: Of one observation.
        kind: `values`: the largest output is the choice. `actions`: the outputs are the action.
        low, high: Bounds of the action [size], where the file has them; None for choices.
        clips: Whether what the last layer puts out is clipped to the bounds, so that -1 and 1 are its ends: it is
            linear, and a `Rescale` is behind it.
        source: What kind of file and algorithm it is, for people.
    """

    layers: layers.PolicyLayers
    shape: tuple[int, ...]
    kind: Literal["values", "actions"]
    low: Array | None
    high: Array | None
    clips: bool
    source: str

    @property
    def head(self) -> specs.Head:
        """The head by which actors read its outputs."""
        return "q_values" if self.kind == "values" else "deterministic"

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return layers.weighted(self.layers)[-1].bias.size


class Chain:
    """Grows a policy from its input on.

    Args:
        shape: Of one observation; images are [height, width, channels].

    Raises of all methods:
        Unmapped: The policy is no chain of dense layers and convolutions.
        ValueError: Sizes do not fit.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self._layers: list[layers.Layer] = []
        self._gain: Array | None = None  # pending: what comes next gets x * gain + offset
        self._offset: Array | None = None
        self._is_open = False  # the last layer has no activation yet

    def dense(self, kernel: Array, bias: Array | None = None) -> None:
        """Adds a dense layer, kernel [out, in]."""
        kernel = np.asarray(kernel, np.float64)
        bias = np.zeros(len(kernel)) if bias is None else np.asarray(bias, np.float64).reshape(-1)
        if kernel.ndim != 2 or len(self.shape) != 1 or kernel.shape[1] != self.shape[0] or len(bias) != len(kernel):
            raise ValueError(f"a dense layer of shape {kernel.shape} behind {self.shape}")
        if self._gain is not None and self._offset is not None:
            bias = bias + kernel @ np.broadcast_to(self._offset, self.shape)
            kernel = kernel * self._gain
            self._gain = self._offset = None
        last = self._layers[-1] if self._layers else None
        if self._is_open and isinstance(last, layers.Dense):
            bias = bias + kernel @ last.bias.astype(np.float64)
            kernel = kernel @ last.kernel.astype(np.float64)
            self._layers.pop()
        self._push(layers.Dense(kernel.astype(np.float32), bias.astype(np.float32), "none"), (len(kernel),))

    def convolve(self, kernel: Array, bias: Array | None, stride: int) -> None:
        """Adds a convolution without padding, kernel [out, height, width, in]."""
        kernel = np.asarray(kernel, np.float64)
        if len(self.shape) != 3 or kernel.ndim != 4 or kernel.shape[3] != self.shape[2]:
            raise ValueError(f"a convolution of shape {kernel.shape} behind {self.shape}")
        bias = np.zeros(len(kernel)) if bias is None else np.asarray(bias, np.float64)
        if self._gain is not None and self._offset is not None:
            if not all(np.ndim(a) == 0 or np.shape(a) == (self.shape[2],) for a in (self._gain, self._offset)):
                raise scales.Unmapped("a convolution shares its weights among pixels, which are scaled one by one here")
            bias = bias + (kernel * self._offset).sum((1, 2, 3))
            kernel = kernel * self._gain
            self._gain = self._offset = None
        height, width = ((size - k) // stride + 1 for size, k in zip(self.shape[:2], kernel.shape[1:3], strict=True))
        if min(height, width) < 1:
            raise ValueError(f"a convolution of {kernel.shape[1:3]} over {self.shape[:2]}")
        layer = layers.Conv2D(kernel.astype(np.float32), bias.astype(np.float32), stride, "none")
        self._push(layer, (height, width, len(kernel)))

    def affine(self, gain: Array | float, offset: Array | float) -> None:
        """Applies `x * gain + offset`, per element of the last axis (of the observation: per element, or one)."""
        gain, offset = np.asarray(gain, np.float64), np.asarray(offset, np.float64)
        for number in (gain, offset):
            if number.shape != np.broadcast_shapes(number.shape, ()) or (
                number.ndim and np.broadcast_shapes(number.shape, self.shape) != self.shape
            ):
                raise ValueError(f"{number.shape} numbers for {self.shape}")
        last = self._layers[-1] if self._layers else None
        if self._is_open and isinstance(last, layers.Weighted):
            rows = (np.broadcast_to(a, self.shape[-1:]) for a in (gain, offset))
            gain, offset = rows
            kernel = last.kernel * gain.reshape(-1, *[1] * (last.kernel.ndim - 1))
            bias = last.bias * gain + offset
            self._layers[-1] = dataclasses.replace(last, kernel=kernel.astype(np.float32), bias=bias.astype(np.float32))
        elif self._gain is None or self._offset is None:
            self._gain, self._offset = gain, offset
        else:
            self._gain, self._offset = self._gain * gain, self._offset * gain + offset

    def activate(self, name: str) -> None:
        """Applies an activation: `none`, `relu`, `tanh`, `sigmoid`."""
        if name == "none":
            return
        if name == "sigmoid":  # that is (tanh(x / 2) + 1) / 2
            self._open()
            self.affine(0.5, 0.0)
            self.activate("tanh")
            self.affine(0.5, 0.5)
            return
        if name not in ("relu", "tanh"):
            raise scales.Unmapped(f"the activation {name}")
        last = self._layers[-1] if self._layers else None
        repeats = isinstance(last, layers.Weighted) and last.activation == "relu" and name == "relu"
        if repeats and self._gain is None:
            return
        self._open()
        last = self._layers[-1]
        assert isinstance(last, layers.Weighted)
        self._layers[-1] = dataclasses.replace(last, activation=name)  # type: ignore[arg-type]
        self._is_open = False

    def clip(self, low: float, high: float) -> None:
        """Clips to a range, by two ReLUs: low + relu(high - low - relu(high - x))."""
        self.affine(-1.0, high)
        self.activate("relu")
        self.affine(-1.0, high - low)
        self.activate("relu")
        self.affine(1.0, low)

    def flatten(self) -> None:
        """Makes a vector, last axis fastest."""
        if len(self.shape) > 1:
            if self._gain is not None and self._offset is not None:
                full = (np.broadcast_to(a, self.shape).reshape(-1) for a in (self._gain, self._offset))
                self._gain, self._offset = full
            self._push(layers.Flatten(), (math.prod(self.shape),))
            self._is_open = False

    def value(self) -> layers.PolicyLayers:
        """Returns the layers of a policy of values; a factor or an offset that is left is made a layer of its own."""
        self._open()
        return tuple(self._layers)

    def bounded(self, low: Array | None, high: Array | None) -> tuple[layers.PolicyLayers, bool]:
        """Returns the layers of a policy of actions, and whether its outputs are clipped to -1 and 1 (`Policy.clips`).

        Behind a tanh its factor and offset stay in float (`layers.Rescale`). A linear output is made relative to the
        bounds, where there are any: its eight bits then lie within them.
        """
        last = self._layers[-1] if self._layers else None
        size = self.shape[0]
        if isinstance(last, layers.Dense) and last.activation == "tanh":
            if self._gain is None or self._offset is None:
                return tuple(self._layers), False
            numbers = [np.broadcast_to(a, (size,)).astype(np.float32) for a in (self._gain, self._offset)]
            return (*self._layers, layers.Rescale(*numbers)), False
        self._open()
        if low is None or high is None:
            return tuple(self._layers), False
        half, middle = (high - low) / 2, (high + low) / 2
        self.affine(1 / half, -middle / half)
        return (*self._layers, layers.Rescale(half.astype(np.float32), middle.astype(np.float32))), True

    def _open(self) -> None:
        """Ends the chain in a layer with weights and no activation: an identity where there is none."""
        if self._is_open and self._gain is None:
            return
        if len(self.shape) == 1:
            self.dense(np.eye(self.shape[0]))
        elif len(self.shape) == 3:
            self.convolve(np.eye(self.shape[2])[:, None, None], None, 1)
        else:
            raise scales.Unmapped(f"an activation of {self.shape} without weights before it")

    def _push(self, layer: layers.Layer, shape: tuple[int, ...]) -> None:
        self._layers.append(layer)
        self.shape = shape
        self._is_open = isinstance(layer, layers.Weighted)
