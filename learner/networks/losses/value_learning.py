"""Losses of values: TD errors, and of distributions of returns.

The time index is in the name: `q_tm1` belongs to the state that was acted in, `q_t` to the one that came n steps later.
Shapes: B transitions, A actions.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

Tensor = Any  # TensorFlow ships no types


def q_learning(
    q_tm1: Tensor,  # [B, A]
    a_tm1: Tensor,  # [B] int32
    r_t: Tensor,  # [B], discounted sum of n rewards
    discount_t: Tensor,  # [B], of the bootstrap value; 0 where the episode terminated
    q_t_value: Tensor,  # [B, A]
    q_t_selector: Tensor,  # [B, A]
) -> Tensor:
    """Returns the TD errors [B] of n-step Q-learning: target minus `q_tm1[a_tm1]`, without gradient through the target.

    The action valued by `q_t_value` is the best one of `q_t_selector`: the same tensor gives Q-learning, the online
    network's gives double Q-learning (van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461).
    """
    for name, tensor, rank in (
        ("q_tm1", q_tm1, 2), ("a_tm1", a_tm1, 1), ("r_t", r_t, 1), ("discount_t", discount_t, 1),
        ("q_t_value", q_t_value, 2), ("q_t_selector", q_t_selector, 2),
    ):  # fmt: skip
        tf.debugging.assert_rank(tensor, rank, name)
    actions = q_tm1.shape[1]
    # One-hot products and not gathers: XLA fuses them on a CPU, and their gradient is no scatter.
    best = tf.one_hot(tf.argmax(q_t_selector, axis=1, output_type=tf.int32), actions)
    target = r_t + discount_t * tf.reduce_sum(q_t_value * best, axis=1)
    taken = tf.reduce_sum(q_tm1 * tf.one_hot(a_tm1, actions), axis=1)
    return tf.stop_gradient(target) - taken


def value_error(
    q_tm1: Tensor,  # [B]
    r_t: Tensor,  # [B], discounted sum of n rewards
    discount_t: Tensor,  # [B], of the bootstrap value; 0 where the episode terminated
    q_t: Tensor,  # [B], value of the target policy's action
) -> Tensor:
    """Returns the TD errors [B] of n-step policy evaluation, without gradient through the target."""
    for name, tensor in (("q_tm1", q_tm1), ("r_t", r_t), ("discount_t", discount_t), ("q_t", q_t)):
        tf.debugging.assert_rank(tensor, 1, name)
    return tf.stop_gradient(r_t + discount_t * q_t) - q_tm1


def categorical_projection(
    z_p: Tensor,  # [B, M], the returns that have probability
    p: Tensor,  # [B, M], their probabilities
    z_q: Tensor,  # [N], evenly spaced, ascending
) -> Tensor:
    """Returns probabilities [B, N] on the atoms `z_q`: the two nearest atoms share each of `p` by closeness.

    In closed form: atom i gets the share max(0, 1 - |z - z_i| / spacing) of z's probability, once z is clipped to the
    support. Bellemare et al. 2017, https://arxiv.org/abs/1707.06887, equation 7.
    """
    tf.debugging.assert_rank(z_p, 2, "z_p")
    tf.debugging.assert_rank(p, 2, "p")
    z = tf.clip_by_value(z_p, z_q[0], z_q[-1])
    spacing = (z_q[-1] - z_q[0]) / (len(z_q) - 1)
    share = tf.maximum(1 - tf.abs(z[:, :, None] - z_q) / spacing, 0)  # [B, M, N]
    return tf.stop_gradient(tf.reduce_sum(p[:, :, None] * share, axis=1))


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """Returns the cross entropy [B] of a predicted distribution beside the target's probabilities [B, N]."""
    for name, tensor in (("target", target), ("logits", logits)):
        tf.debugging.assert_rank(tensor, 2, name)
    return -tf.reduce_sum(target * tf.nn.log_softmax(logits), axis=1)


def huber(error: Tensor, delta: float) -> Tensor:
    """Returns half the square up to `delta`, then linear growth with slope `delta`; in the shape of `error`."""
    size = tf.abs(error)
    quadratic = tf.minimum(size, delta)
    return 0.5 * tf.square(quadratic) + delta * (size - quadratic)
