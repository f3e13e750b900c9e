"""The squashed Gaussian of policies for continuous actions: normal before a tanh, so within -1..1 behind it.

Pure functions, shaped as in `losses`: B transitions, A elements of an action. `edge_actor/policies/policy.py` does the
same in numpy with what an int8 model puts out.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from broker.contract import specs

Tensor = Any  # TensorFlow ships no types
_LOW, _HIGH = specs.SQUASHED_LOG_STD


def split(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean [B, A] and the log of the standard deviation [B, A], of what a network puts out [B, 2 * A]."""
    mean, unbounded = tf.split(outputs, 2, axis=1)
    return mean, (_LOW + _HIGH) / 2 + (_HIGH - _LOW) / 2 * tf.tanh(unbounded)


def sample(
    mean: Tensor,  # [B, A]
    log_std: Tensor,  # [B, A]
    normal: Tensor,  # [B, A], standard normal
) -> tuple[Tensor, Tensor]:
    """Returns actions [B, A] in -1..1 and the logs of their densities [B]; gradients reach mean and deviation.

    The density is that of u before the tanh, divided by the slope there, 1 - tanh(u)^2 for each element (Haarnoja et
    al. 2018, https://arxiv.org/abs/1812.05905, appendix C). The log of that is 2 (log 2 - u - softplus(-2 u)), which
    stays exact where tanh(u) rounds to 1.
    """
    for name, tensor in (("mean", mean), ("log_std", log_std), ("normal", normal)):
        if tensor.shape.rank != 2:
            raise ValueError(f"{name} must have rank 2, not shape {tensor.shape}")
    u = mean + tf.exp(log_std) * normal
    log_slope = 2 * (math.log(2) - u - tf.nn.softplus(-2 * u))
    log_normal = -0.5 * tf.square(normal) - log_std - 0.5 * math.log(2 * math.pi)
    return tf.tanh(u), tf.reduce_sum(log_normal - log_slope, axis=1)
