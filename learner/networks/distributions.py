"""Distributions of actions by what a network puts out: log-probabilities, entropies and samples, as pure functions.

Shapes: B transitions, A choices, D elements of an action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from broker.contract import specs
from broker.contract.acting import factored

Tensor = Any  # TensorFlow ships no types
_LOW, _HIGH = specs.SQUASHED_LOG_STD
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def by_element(logits: Tensor, choices: Sequence[int]) -> Tensor:
    """Returns logits [B, n_1 + ... + n_D] of several choices by element [B, D, max n]; see `factored.spread`."""
    tf.debugging.assert_rank(logits, 2, "logits")
    if len(set(choices)) == 1:
        return tf.reshape(logits, (-1, len(choices), choices[0]))
    pads = [[[0, 0], [0, max(choices) - n]] for n in choices]
    parts = zip(tf.split(logits, choices, axis=1), pads, strict=True)
    return tf.stack([tf.pad(part, pad, constant_values=factored.NEVER) for part, pad in parts], axis=1)


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Returns the log-probabilities [B] of choices [B] int32 by logits [B, A]; of several, [B, D] by [B, D, A]."""
    tf.debugging.assert_rank(action, logits.shape.rank - 1, "action")
    # A one-hot product and not a gather: XLA fuses it on a CPU, and its gradient is no scatter.
    chosen = tf.nn.log_softmax(logits) * tf.one_hot(action, logits.shape[-1])
    return tf.reduce_sum(chosen, axis=list(range(1, logits.shape.rank)))


def categorical_entropy(logits: Tensor) -> Tensor:
    """Returns the entropy [B] in nats of the softmax of logits [B, A], or of D independent ones [B, D, A]."""
    log_p = tf.nn.log_softmax(logits)
    return -tf.reduce_sum(tf.exp(log_p) * log_p, axis=list(range(1, logits.shape.rank)))


def gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Returns the log-densities [B] of actions [B, D] by diagonal Gaussians; `log_std` is [B, D] or [D]."""
    for name, tensor in (("mean", mean), ("action", action)):
        tf.debugging.assert_rank(tensor, 2, name)
    z = (action - mean) * tf.exp(-log_std)
    return tf.reduce_sum(-0.5 * tf.square(z) - log_std - _HALF_LOG_2PI, axis=1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Returns the entropy in nats of diagonal Gaussians: over the last axis of `log_std`."""
    return tf.reduce_sum(log_std + 0.5 + _HALF_LOG_2PI, axis=-1)


def squashed_gaussian(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean [B, D] and the log of the standard deviation [B, D], of what a network puts out [B, 2 * D].

    It is a normal distribution before a tanh, so within -1..1 behind it. `edge_actor/policies/policy.py` does the same
    in numpy with what an int8 model puts out.
    """
    mean, unbounded = tf.split(outputs, 2, axis=1)
    return mean, (_LOW + _HIGH) / 2 + (_HIGH - _LOW) / 2 * tf.tanh(unbounded)


def squashed_gaussian_sample(
    mean: Tensor,  # [B, D]
    log_std: Tensor,  # [B, D]
    normal: Tensor,  # [B, D], standard normal
) -> tuple[Tensor, Tensor]:
    """Returns actions [B, D] in -1..1 and the logs of their densities [B]; gradients reach mean and deviation.

    The density is that of u before the tanh, divided by the slope there, 1 - tanh(u)^2 for each element (Haarnoja et
    al. 2018, https://arxiv.org/abs/1812.05905, appendix C). The log of that is 2 (log 2 - u - softplus(-2 u)), which
    stays exact where tanh(u) rounds to 1.
    """
    for name, tensor in (("mean", mean), ("log_std", log_std), ("normal", normal)):
        tf.debugging.assert_rank(tensor, 2, name)
    u = mean + tf.exp(log_std) * normal
    log_slope = 2 * (math.log(2) - u - tf.nn.softplus(-2 * u))
    log_normal = -0.5 * tf.square(normal) - log_std - _HALF_LOG_2PI
    return tf.tanh(u), tf.reduce_sum(log_normal - log_slope, axis=1)
