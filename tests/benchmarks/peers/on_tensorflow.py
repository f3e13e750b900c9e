"""A float32 actor on TensorFlow: the policy as a tf.function, compiled by XLA.

Its weights are variables, which a later policy of the same architecture takes over once nobody holds this one: of any
number of policies only the first two or three compile anything. Weights as arguments would make each call 1.7 times as
long, the graph executor 1.2 times.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf

from broker.contract import messages
from tests.benchmarks.peers import mlp

_ACTIVATIONS = {"none": tf.identity, "relu": tf.nn.relu, "tanh": tf.tanh}


class Float32:
    """Stands in for `edge_actor.policies.interpreter.Interpreter`."""

    runtime = f"tensorflow {tf.__version__}"
    delegate = "tf.function, XLA"

    def __init__(
        self, model: bytes, batch: int, *, threads: int = 1, limit_bytes: int = messages.MAX_POLICY_BYTES
    ) -> None:
        with contextlib.suppress(RuntimeError):  # an earlier policy of this process has started TensorFlow
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        layers = mlp.folded(mlp.read(model, limit_bytes))
        self.input = np.zeros((batch, mlp.inputs(layers)), np.float32)
        self.output = np.zeros((batch, mlp.outputs(layers)), np.float32)
        self._key = (self.input.shape, *(kind for layer in layers for kind in _kind(layer)))
        try:
            self._graph = _free.setdefault(self._key, []).pop()
        except IndexError:
            self._graph = _Graph(self.input.shape, layers)
        self._graph.load(layers)

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            _free[self._key].append(self._graph)

    def invoke(self) -> None:
        """Runs it."""
        self.output[...] = self._graph.run(tf.constant(self.input)).numpy()


class _Graph:
    """A compiled function with variables of its own."""

    def __init__(self, shape: tuple[int, ...], layers: tuple[mlp.Layer, ...]) -> None:
        self._variables = [tf.Variable(array) for layer in layers for array in _numbers(layer)]
        kinds = [layer.activation if isinstance(layer, mlp.Dense) else None for layer in layers]

        @tf.function(input_signature=[tf.TensorSpec(shape, tf.float32)], jit_compile=True)
        def forward(x: tf.Tensor) -> tf.Tensor:
            for kind, factor, term in zip(kinds, self._variables[::2], self._variables[1::2], strict=True):
                x = x * factor + term if kind is None else _ACTIVATIONS[kind](tf.matmul(x, factor) + term)
            return x

        self.run = forward.get_concrete_function()
        self.run(tf.zeros(shape))

    def load(self, layers: tuple[mlp.Layer, ...]) -> None:
        """Takes the numbers of a policy."""
        arrays = (array for layer in layers for array in _numbers(layer))
        for variable, array in zip(self._variables, arrays, strict=True):
            variable.assign(array)


_free: dict[tuple[Any, ...], list[_Graph]] = {}
"""Graphs that no policy uses, by architecture."""


def _kind(layer: mlp.Layer) -> tuple[Any, ...]:
    if isinstance(layer, mlp.Affine):
        return (None, layer.gain.shape, layer.offset.shape)
    return (layer.activation, layer.kernel.shape)


def _numbers(layer: mlp.Layer) -> tuple[Any, Any]:
    if isinstance(layer, mlp.Affine):
        return layer.gain, layer.offset
    return np.ascontiguousarray(layer.kernel.T), layer.bias
