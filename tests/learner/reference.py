"""A policy's fp32 outputs by the TensorFlow pass: what numpy's pass and models are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from learner.networks import forward, layers


def outputs(policy: layers.PolicyLayers, observations: NDArray[Any]) -> NDArray[np.float32]:
    """Returns what a frozen policy answers to raw observations [N, *shape], in fp32: [N, outputs]."""
    weights = [tf.constant(array) for array in layers.arrays(policy).values()]
    answer: NDArray[np.float32] = forward.run(policy, weights, tf.constant(observations.astype(np.float32))).numpy()
    return answer
