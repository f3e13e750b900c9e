"""Actors on PyTorch: float32, and dynamic int8 as ActorQ's actors have it (quantize_dynamic on all Linear layers).

Float32 calls its operations one after the other, without modules around them: that is faster than a traced graph.
Neither traces or compiles anything for a new policy of a known architecture.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from broker.contract import messages
from tests.benchmarks.peers import mlp

_ACTIVATIONS = {"relu": torch.relu_, "tanh": torch.tanh_}
_MODULES = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}
_Operation = Callable[[torch.Tensor], torch.Tensor]


class Float32:
    """Stands in for `edge_actor.policies.interpreter.Interpreter`."""

    runtime = f"torch {torch.__version__}"
    delegate = "PyTorch float32"

    def __init__(
        self, model: bytes, batch: int, *, threads: int = 1, limit_bytes: int = messages.MAX_POLICY_BYTES
    ) -> None:
        torch.set_num_threads(threads)
        layers = self._prepared(mlp.read(model, limit_bytes))
        self.input = np.zeros((batch, mlp.inputs(layers)), np.float32)
        self.output = np.zeros((batch, mlp.outputs(layers)), np.float32)
        self._x, self._y = torch.from_numpy(self.input), torch.from_numpy(self.output)
        self._operations = self._operations_of(layers)

    def invoke(self) -> None:
        """Runs it."""
        x = self._x
        for operation in self._operations:
            x = operation(x)
        self._y.copy_(x)

    def _prepared(self, layers: tuple[mlp.Layer, ...]) -> tuple[mlp.Layer, ...]:
        return mlp.folded(layers)

    def _operations_of(self, layers: tuple[mlp.Layer, ...]) -> list[_Operation]:
        found: list[_Operation] = []
        for layer in layers:
            if isinstance(layer, mlp.Affine):
                gain, offset = torch.from_numpy(layer.gain), torch.from_numpy(layer.offset)
                found.append(_scaling(gain, offset))
                continue
            kernel, bias = torch.from_numpy(layer.kernel), torch.from_numpy(layer.bias)
            found.append(functools.partial(torch.nn.functional.linear, weight=kernel, bias=bias))
            if layer.activation != "none":
                found.append(_ACTIVATIONS[layer.activation])
        return found


class Int8(Float32):
    """The same with weights of int8, and activations that are quantized as they come."""

    delegate = f"PyTorch dynamic int8, {torch.backends.quantized.engine}"

    def _prepared(self, layers: tuple[mlp.Layer, ...]) -> tuple[mlp.Layer, ...]:
        return layers  # its input is quantized as a whole, so that features must stay alike in size

    def _operations_of(self, layers: tuple[mlp.Layer, ...]) -> list[_Operation]:
        """Compiles the quantized modules: called from Python, their operations take several times as long."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that these ways are about to go
            quantized = torch.ao.quantization.quantize_dynamic(
                _sequence(layers), {torch.nn.Linear}, dtype=torch.qint8, inplace=True
            ).eval()
            key = tuple(type(one).__name__ for one in quantized)
            if key not in _compiled:
                _compiled[key] = torch.jit.script(quantized)
            # A graph of the same modules is there: only its numbers are another's
            fresh = copy.deepcopy(_compiled[key])
            for mine, other in zip(quantized.children(), fresh.children(), strict=True):
                if isinstance(mine, _Affine):
                    other.gain, other.offset = mine.gain, mine.offset
                elif hasattr(mine, "_packed_params"):
                    other._packed_params._packed_params = mine._packed_params._packed_params
            frozen: _Operation = torch.jit.freeze(fresh)
            for _ in range(3):
                frozen(self._x)  # the first ones optimise it
        return [frozen]


def _scaling(gain: torch.Tensor, offset: torch.Tensor) -> _Operation:
    return lambda x: torch.addcmul(offset, x, gain)


_compiled: dict[tuple[Any, ...], Any] = {}
"""Scripted modules by the kinds of their layers."""


class _Affine(torch.nn.Module):
    """The scaling of an input or an output."""

    def __init__(self, layer: mlp.Affine) -> None:
        super().__init__()
        self.register_buffer("gain", torch.from_numpy(layer.gain))
        self.register_buffer("offset", torch.from_numpy(layer.offset))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.offset, x, self.gain)


def _sequence(layers: tuple[mlp.Layer, ...]) -> torch.nn.Sequential:
    modules: list[torch.nn.Module] = []
    for layer in layers:
        if isinstance(layer, mlp.Affine):
            modules.append(_Affine(layer))
            continue
        linear = torch.nn.utils.skip_init(torch.nn.Linear, layer.kernel.shape[1], layer.kernel.shape[0])
        linear.weight, linear.bias = (
            torch.nn.Parameter(torch.from_numpy(array), requires_grad=False) for array in (layer.kernel, layer.bias)
        )
        modules.append(linear)
        if layer.activation != "none":
            modules.append(_MODULES[layer.activation]())
    return torch.nn.Sequential(*modules)
