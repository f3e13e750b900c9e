"""Makes the models of the actor's tests and benchmarks: MLPs of two layers that keep CartPole up.

    python -m tests.edge_actor.policies.models.make WIDTH int8|float32 FILE

The hidden layers are random; the last one is fitted by least squares to push where the pole falls. So the models are
like trained ones, in that their episodes are long, and take no training. Needs TensorFlow; its output is committed:
cartpole-int8.tflite and cartpole-float32.tflite have width 16.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from learner.networks import layers
from learner.quantize.tflite import convert


def balancing(width: int, precision: str) -> bytes:
    """A .tflite that maps CartPole's observation [1, 4] to two values [1, 2]."""
    rng = np.random.default_rng(0)
    scale = np.array([0.8, 1.0, 0.1, 1.0], np.float32)  # of position, speed, angle, its speed
    observations = rng.normal(size=(2048, 4)).astype(np.float32) * scale
    hidden, policy = observations, []
    for inputs in (4, width):
        kernel = rng.normal(0.0, inputs**-0.5, (inputs, width)).astype(np.float32)
        if inputs == 4:
            kernel /= scale[:, None]
        bias = rng.normal(0.0, 0.3, width).astype(np.float32)
        policy.append(layers.Dense(kernel.T, bias, "relu"))
        hidden = np.maximum(hidden @ kernel + bias, 0.0)
    push = np.clip(observations @ np.array([0.1, 0.3, 4.0, 1.0], np.float32), -1.0, 1.0)
    fitted = np.linalg.lstsq(np.c_[hidden, np.ones(len(hidden))], push, rcond=1e-3)[0].astype(np.float32)
    last = np.stack([-fitted, fitted], axis=1)
    return convert.convert((*policy, layers.Dense(last[:-1].T, last[-1], "none")), observations, precision)


if __name__ == "__main__":
    Path(sys.argv[3]).write_bytes(balancing(int(sys.argv[1]), sys.argv[2]))
