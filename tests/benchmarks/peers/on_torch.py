"""Actors on PyTorch: float32, and dynamic int8 as ActorQ's actors have it (quantize_dynamic on all Linear layers)."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from broker.contract import messages
from tests.benchmarks.peers import mlp

_ACTIVATIONS = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}


class _Affine(torch.nn.Module):
    """The scaling of an input or an output."""

    def __init__(self, layer: mlp.Affine) -> None:
        super().__init__()
        self.register_buffer("gain", torch.from_numpy(layer.gain))
        self.register_buffer("offset", torch.from_numpy(layer.offset))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.offset, x, self.gain)


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
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that these ways are about to go
            # Traced and frozen: without modules' Python in between it takes a third less
            traced = torch.jit.trace(self._quantized(_sequence(layers)).eval(), self._x)
            self._run = torch.jit.freeze(traced)
            for _ in range(3):
                self.invoke()  # the first ones optimise it

    def invoke(self) -> None:
        """Runs it."""
        with torch.inference_mode():
            self._y.copy_(self._run(self._x))

    def _prepared(self, layers: tuple[mlp.Layer, ...]) -> tuple[mlp.Layer, ...]:
        return mlp.folded(layers)

    def _quantized(self, module: torch.nn.Module) -> torch.nn.Module:
        return module


class Int8(Float32):
    """The same with weights of int8, and activations that are quantized as they come."""

    delegate = f"PyTorch dynamic int8, {torch.backends.quantized.engine}"

    def _prepared(self, layers: tuple[mlp.Layer, ...]) -> tuple[mlp.Layer, ...]:
        return layers  # its input is quantized as a whole, so that features must stay alike in size

    def _quantized(self, module: torch.nn.Module) -> torch.nn.Module:
        quantized: torch.nn.Module = torch.ao.quantization.quantize_dynamic(
            module, {torch.nn.Linear}, dtype=torch.qint8
        )
        return quantized


def _sequence(layers: tuple[mlp.Layer, ...]) -> torch.nn.Module:
    modules: list[torch.nn.Module] = []
    for layer in layers:
        if isinstance(layer, mlp.Affine):
            modules.append(_Affine(layer))
            continue
        linear = torch.nn.Linear(layer.kernel.shape[1], layer.kernel.shape[0])
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(layer.kernel))
            linear.bias.copy_(torch.from_numpy(layer.bias))
        modules.append(linear)
        if layer.activation != "none":
            modules.append(_ACTIVATIONS[layer.activation]())
    return torch.nn.Sequential(*modules)
