"""Advantages and losses of algorithms that learn from their own policy's actions.

The time index is in the name: `v_tm1` belongs to the state that was acted in, `v_t` to the one that came next.
Shapes: N steps, of several sequences laid end to end (the last step of each has `is_last`); B steps of a minibatch;
A choices, D elements of an action. mu is the policy that acted, pi the one that learns.

Advantages are computed once a phase, in float64; losses once a gradient step, in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

Tensor = Any  # TensorFlow ships no types
_LOG_RATIO_MAX = 20.0
"""The largest logarithm of a ratio: beyond it float32 would overflow, and every ratio is clipped long before."""


class Estimates(NamedTuple):
    """What a phase learns from, [N] float32 each: advantages of the actions, and targets of the values."""

    advantage: Tensor
    target: Tensor


def generalized_advantages(
    r_t: Tensor,  # [N]
    discount_t: Tensor,  # [N], of v_t; 0 where the episode terminated
    v_tm1: Tensor,  # [N]
    v_t: Tensor,  # [N]
    is_last: Tensor,  # [N] bool, the last steps of sequences: what follows belongs to another one
    lambda_: float,
) -> Estimates:
    """Returns generalized advantages and the lambda-returns that belong to them.

    delta_t = r_t + discount_t v_t - v_tm1;  A_t = delta_t + discount_t lambda A_(t+1), within a sequence. Schulman et
    al. 2016, https://arxiv.org/abs/1506.02438, equation 16. The target is A_t + v_tm1, as in PPO's references.
    """
    reward, discount, value, next_value = _float64(r_t, discount_t, v_tm1, v_t)
    delta = reward + discount * next_value - value
    advantage = _accumulated(delta, _within(is_last, discount * lambda_))
    return Estimates(tf.cast(advantage, tf.float32), tf.cast(advantage + value, tf.float32))


def vtrace(
    r_t: Tensor,  # [N]
    discount_t: Tensor,  # [N], of v_t; 0 where the episode terminated
    v_tm1: Tensor,  # [N]
    v_t: Tensor,  # [N]
    is_last: Tensor,  # [N] bool, as above
    log_rho_tm1: Tensor,  # [N], log pi - log mu of the action that was taken
    lambda_: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Estimates:
    """Returns V-trace's targets, and advantages for the policy gradient that are weighted by min(rho_bar, rho).

    delta_t = min(rho_bar, rho) (r_t + discount_t v_t - v_tm1), and errors add up over a sequence by discount_t times
    min(c_bar, rho) lambda. Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, section 4.1 and remark 2; the
    advantage is rho (r_t + discount_t target_t - v_tm1), where target_t is a mixture with v_t by lambda, as in rlax's
    `vtrace_td_error_and_advantage`. With pi = mu and lambda 1 this is the return of n steps, and A2C's update.
    """
    reward, discount, value, next_value, log_rho = _float64(r_t, discount_t, v_tm1, v_t, log_rho_tm1)
    rho = tf.exp(tf.minimum(log_rho, _LOG_RATIO_MAX))
    weight, trace = tf.minimum(rho, rho_bar), tf.minimum(rho, c_bar) * lambda_
    delta = weight * (reward + discount * next_value - value)
    target = value + _accumulated(delta, _within(is_last, discount * trace))
    bootstrap = tf.where(is_last, next_value, lambda_ * _ahead(target, 1) + (1.0 - lambda_) * next_value)
    advantage = weight * (reward + discount * bootstrap - value)
    return Estimates(tf.cast(advantage, tf.float32), tf.cast(target, tf.float32))


def _float64(*arrays: Tensor) -> list[Tensor]:
    return [tf.cast(array, tf.float64) for array in arrays]


def _within(is_last: Tensor, decay: Tensor) -> Tensor:
    """Returns decay [N] with nothing across the end of a sequence."""
    return tf.where(is_last, tf.zeros_like(decay), decay)


def _accumulated(delta: Tensor, decay: Tensor) -> Tensor:
    """Returns x [N] with x[i] = delta[i] + decay[i] x[i + 1], in log2(N) passes.

    After a pass of span s, delta[i] has the errors of 2 s steps and decay[i] the product of as many decays.
    """
    span = 1
    while span < delta.shape[0]:
        delta, decay = delta + decay * _ahead(delta, span), decay * _ahead(decay, span)
        span *= 2
    return delta


def _ahead(x: Tensor, span: int) -> Tensor:
    """Returns x[i + span] in the place of x[i], and 0 where there is none."""
    return tf.pad(x[span:], [[0, span]])


def normalized(advantage: Tensor, floor: Tensor | float) -> Tensor:
    """Returns advantages [N] of mean 0 and deviation 1, or less where their deviation is below the floor.

    The floor keeps what is but the error of values, as long as no reward was found, from being all that is learned.
    """
    centred = advantage - tf.reduce_mean(advantage)
    deviation = tf.sqrt(tf.reduce_mean(tf.square(centred)))
    return centred / tf.maximum(tf.maximum(deviation, floor), 1e-8)


def ratio(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """Returns pi / mu [B] of the actions that were taken."""
    return tf.exp(tf.minimum(log_pi - log_mu, _LOG_RATIO_MAX))


def divergence(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """Returns an estimate [B] of KL(mu || pi) from the actions that were taken; its mean is meant.

    Schulman's, http://joschu.net/blog/kl-approx.html: never negative, of little variance.
    """
    return ratio(log_pi, log_mu) - 1 - (log_pi - log_mu)


def clipped_surrogate(
    ratio_t: Tensor,  # [B]
    adv_t: Tensor,  # [B]
    epsilon: float,
) -> Tensor:
    """Returns what is to be climbed [B]: the less of ratio times advantage, and the same with the ratio clipped.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7.
    """
    for name, tensor in (("ratio_t", ratio_t), ("adv_t", adv_t)):
        tf.debugging.assert_rank(tensor, 1, name)
    clipped = tf.clip_by_value(ratio_t, 1 - epsilon, 1 + epsilon)
    return tf.minimum(ratio_t * adv_t, clipped * adv_t)


def clipped_value_loss(
    v: Tensor,  # [B]
    v_old: Tensor,  # [B], at the phase's start
    target: Tensor,  # [B]
    epsilon: float,  # 0: nothing is clipped
) -> Tensor:
    """Returns half the squared error [B], the larger of that of the value and of the value clipped around `v_old`.

    As in PPO's first implementation (https://github.com/openai/baselines, ppo2); the paper does not have it.
    """
    for name, tensor in (("v", v), ("v_old", v_old), ("target", target)):
        tf.debugging.assert_rank(tensor, 1, name)
    error = tf.square(v - target)
    if epsilon:
        clipped = v_old + tf.clip_by_value(v - v_old, -epsilon, epsilon)
        error = tf.maximum(error, tf.square(clipped - target))
    return 0.5 * error
