"""Adam and gradient clipping as pure functions, so that many steps run in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Tensor = Any  # TensorFlow ships no types

_UNIT = 2.0**30
"""The unit of norms: exact, and large numbers may be squared. Below 1e-9 a gradient then counts as nothing."""
_B1, _B2, _EPS = 0.9, 0.999, 1e-8  # Kingma and Ba 2015


def clipped(gradients: Sequence[Tensor], norm_max: float) -> tuple[list[Tensor], Tensor]:
    """Scales gradients of a larger global norm down to `norm_max`; returns them and the norm that they had."""
    norm = _UNIT * tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g / _UNIT)) for g in gradients]))
    scale = norm_max / tf.maximum(norm, norm_max)
    return [g * scale for g in gradients], norm


def adam(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments1: Sequence[Tensor],
    moments2: Sequence[Tensor],
    updates: Tensor,
    learning_rate: float | Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Takes one step of Adam, https://arxiv.org/abs/1412.6980.

    Args:
        weights: Weights before the step.
        gradients: Gradients of the loss, one per weight.
        moments1: Running means of the gradients.
        moments2: Running means of their squares.
        updates: Number of steps, this one included: int32 scalar.
        learning_rate: Step size, one for all weights or one each.

    Returns:
        Weights, first and second moments after the step.
    """
    t = tf.cast(updates, tf.float32)
    rates = [learning_rate] * len(weights) if isinstance(learning_rate, float) else learning_rate
    warm = tf.sqrt(1 - tf.pow(_B2, t)) / (1 - tf.pow(_B1, t))
    moments1 = [m + (g - m) * (1 - _B1) for m, g in zip(moments1, gradients, strict=True)]
    moments2 = [v + (tf.square(g) - v) * (1 - _B2) for v, g in zip(moments2, gradients, strict=True)]
    weights = [
        w - rate * warm * m / (tf.sqrt(v) + _EPS)
        for w, m, v, rate in zip(weights, moments1, moments2, rates, strict=True)
    ]
    return weights, moments1, moments2


Pair = tuple[Sequence[Tensor], Sequence[Tensor]]


def adam_pair(
    weights: Pair, gradients: Pair, moments1: Pair, moments2: Pair, updates: Tensor, learning_rates: tuple[float, float]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Applies `adam` to an actor's weights and to a critic's, each at its own rate; returns both end to end."""
    parts = zip(weights, gradients, moments1, moments2, learning_rates, strict=True)
    of_actor, of_critic = (adam(w, g, m, v, updates, rate) for w, g, m, v, rate in parts)
    return of_actor[0] + of_critic[0], of_actor[1] + of_critic[1], of_actor[2] + of_critic[2]
