"""Actors on PyTorch: float32, and dynamic int8 as ActorQ's actors have it (quantize_dynamic on all Linear layers).

The operations are called one after the other, without modules around them: as fast as a traced graph at every width,
and a new policy is ready without tracing anything.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import numpy as np
import torch

from broker.contract import messages
from tests.benchmarks.peers import mlp

_ACTIVATIONS = {"relu": torch.relu_, "tanh": torch.tanh_}
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
        self._operations = [operation for layer in layers for operation in self._operations_of(layer)]

    def invoke(self) -> None:
        """Runs it."""
        x = self._x
        for operation in self._operations:
            x = operation(x)
        self._y.copy_(x)

    def _prepared(self, layers: tuple[mlp.Layer, ...]) -> tuple[mlp.Layer, ...]:
        return mlp.folded(layers)

    def _operations_of(self, layer: mlp.Layer) -> list[_Operation]:
        if isinstance(layer, mlp.Affine):
            gain, offset = torch.from_numpy(layer.gain), torch.from_numpy(layer.offset)
            return [lambda x: torch.addcmul(offset, x, gain)]
        return self._dense(layer)

    def _dense(self, layer: mlp.Dense) -> list[_Operation]:
        linear = functools.partial(
            torch.nn.functional.linear, weight=torch.from_numpy(layer.kernel), bias=torch.from_numpy(layer.bias)
        )
        return [linear, *_activation(layer)]


class Int8(Float32):
    """The same with weights of int8, and activations that are quantized as they come."""

    delegate = f"PyTorch dynamic int8, {torch.backends.quantized.engine}"

    def _prepared(self, layers: tuple[mlp.Layer, ...]) -> tuple[mlp.Layer, ...]:
        return layers  # its input is quantized as a whole, so that features must stay alike in size

    def _dense(self, layer: mlp.Dense) -> list[_Operation]:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this way is about to go
            linear = torch.nn.utils.skip_init(torch.nn.Linear, layer.kernel.shape[1], layer.kernel.shape[0])
            linear.weight, linear.bias = (
                torch.nn.Parameter(torch.from_numpy(array), requires_grad=False) for array in (layer.kernel, layer.bias)
            )
            (quantized,) = torch.ao.quantization.quantize_dynamic(
                torch.nn.Sequential(linear), {torch.nn.Linear}, dtype=torch.qint8, inplace=True
            )
        packed, relu = quantized._packed_params._packed_params, layer.activation == "relu"
        call = torch.ops.quantized.linear_relu_dynamic if relu else torch.ops.quantized.linear_dynamic
        # What the module itself calls, and with ReLU inside
        return [lambda x: call(x, packed, True), *([] if relu else _activation(layer))]


def _activation(layer: mlp.Dense) -> list[_Operation]:
    return [_ACTIVATIONS[layer.activation]] if layer.activation != "none" else []
