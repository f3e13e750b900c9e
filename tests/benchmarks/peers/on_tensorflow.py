"""A float32 actor on TensorFlow: the policy as a tf.function, compiled by XLA.

It is traced once for an architecture and takes the weights as arguments, so that a new policy compiles nothing.
"""

from __future__ import annotations

import contextlib
import functools
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
        self._numbers = [tf.constant(array) for layer in layers for array in _numbers(layer)]
        kinds = tuple(layer.activation if isinstance(layer, mlp.Dense) else None for layer in layers)
        self._run = _compiled(self.input.shape, kinds, tuple(tuple(number.shape) for number in self._numbers))

    def invoke(self) -> None:
        """Runs it."""
        self.output[...] = self._run(tf.constant(self.input), *self._numbers).numpy()


def _numbers(layer: mlp.Layer) -> tuple[Any, Any]:
    if isinstance(layer, mlp.Affine):
        return layer.gain, layer.offset
    return np.ascontiguousarray(layer.kernel.T), layer.bias


@functools.cache
def _compiled(shape: tuple[int, ...], kinds: tuple[str | None, ...], shapes: tuple[tuple[int, ...], ...]) -> Any:
    """Returns the function of an architecture: a scaling where `kinds` has None, else a dense layer's activation."""

    @tf.function(input_signature=[tf.TensorSpec(one, tf.float32) for one in (shape, *shapes)], jit_compile=True)
    def forward(x: tf.Tensor, *numbers: tf.Tensor) -> tf.Tensor:
        for kind, factor, term in zip(kinds, numbers[::2], numbers[1::2], strict=True):
            x = x * factor + term if kind is None else _ACTIVATIONS[kind](tf.matmul(x, factor) + term)
        return x

    return forward.get_concrete_function()
