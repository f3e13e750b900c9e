"""A float32 actor on TensorFlow: the policy as one tf.function, traced once with its weights as constants.

Compiled by XLA, which at batch 1 is never slower than the graph executor (the first call of it takes 0.1 s longer).
"""

from __future__ import annotations

import contextlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf

from broker.contract import messages
from tests.benchmarks.peers import mlp

_ACTIVATIONS = {"none": tf.identity, "relu": tf.nn.relu, "tanh": tf.tanh}


class Float32:
    """Stands in for `edge_actor.policies.interpreter.Interpreter`."""

    runtime = f"tensorflow {tf.__version__}"

    def __init__(
        self, model: bytes, batch: int, *, threads: int = 1, limit_bytes: int = messages.MAX_POLICY_BYTES
    ) -> None:
        with contextlib.suppress(RuntimeError):  # an earlier policy of this process has started TensorFlow
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        layers = mlp.folded(mlp.read(model, limit_bytes))
        self.delegate = "tf.function, XLA"
        self.input = np.zeros((batch, mlp.inputs(layers)), np.float32)
        self.output = np.zeros((batch, mlp.outputs(layers)), np.float32)

        @tf.function(input_signature=[tf.TensorSpec(self.input.shape, tf.float32)], jit_compile=True)
        def forward(x: tf.Tensor) -> tf.Tensor:
            for layer in layers:
                if isinstance(layer, mlp.Affine):
                    x = x * layer.gain + layer.offset
                else:
                    x = _ACTIVATIONS[layer.activation](tf.matmul(x, np.ascontiguousarray(layer.kernel.T)) + layer.bias)
            return x

        self._run = forward.get_concrete_function()
        self.invoke()

    def invoke(self) -> None:
        """Runs it."""
        self.output[...] = self._run(tf.constant(self.input)).numpy()
