"""Advantages and policy-gradient losses as pure functions, named and shaped as in rlax.

The time index is in the name: `v_tm1` belongs to the state that was acted in, `v_t` to the one that came next.
Shapes: N steps, of several sequences laid end to end (the last step of each has `is_last`); B steps of a minibatch;
A choices, D elements of an action. mu is the policy that acted, pi the one that learns.

Advantages are computed once a phase, in numpy and float64; losses once a gradient step, in TensorFlow.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

Tensor = Any  # TensorFlow ships no types
FloatArray = NDArray[np.floating[Any]]
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOG_RATIO_MAX = 20.0
"""The largest logarithm of a ratio: beyond it float32 would overflow, and every ratio is clipped long before."""


class Estimates(NamedTuple):
    """What a phase learns from, [N] float32 each: advantages of the actions, and targets of the values."""

    advantage: NDArray[np.float32]
    target: NDArray[np.float32]


def generalized_advantages(
    r_t: FloatArray,  # [N]
    discount_t: FloatArray,  # [N], of v_t; 0 where the episode terminated
    v_tm1: FloatArray,  # [N]
    v_t: FloatArray,  # [N]
    is_last: NDArray[np.bool_],  # [N], the last steps of sequences: what follows belongs to another one
    lambda_: float,
) -> Estimates:
    """Returns generalized advantages and the lambda-returns that belong to them.

    delta_t = r_t + discount_t v_t - v_tm1;  A_t = delta_t + discount_t lambda A_(t+1), within a sequence. Schulman et
    al. 2016, https://arxiv.org/abs/1506.02438, equation 16. The target is A_t + v_tm1, as in PPO's references.
    """
    discount, value = discount_t.astype(np.float64), v_tm1.astype(np.float64)
    delta = r_t + discount * v_t - value
    advantage = _accumulated(delta, np.where(is_last, 0.0, discount * lambda_))
    return Estimates(advantage.astype(np.float32), (advantage + value).astype(np.float32))


def vtrace(
    r_t: FloatArray,  # [N]
    discount_t: FloatArray,  # [N], of v_t; 0 where the episode terminated
    v_tm1: FloatArray,  # [N]
    v_t: FloatArray,  # [N]
    is_last: NDArray[np.bool_],  # [N], as above
    log_rho_tm1: FloatArray,  # [N], log pi - log mu of the action that was taken
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
    rho = np.exp(np.minimum(log_rho_tm1.astype(np.float64), _LOG_RATIO_MAX))
    weight, trace = np.minimum(rho_bar, rho), np.minimum(c_bar, rho) * lambda_
    discount, value, next_value = discount_t.astype(np.float64), v_tm1.astype(np.float64), v_t.astype(np.float64)
    delta = weight * (r_t + discount * next_value - value)
    target = value + _accumulated(delta, np.where(is_last, 0.0, discount * trace))
    following = np.append(target[1:], 0.0)
    bootstrap = np.where(is_last, next_value, lambda_ * following + (1.0 - lambda_) * next_value)
    advantage = weight * (r_t + discount * bootstrap - value)
    return Estimates(advantage.astype(np.float32), target.astype(np.float32))


def _accumulated(delta: NDArray[np.float64], decay: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns x with x[i] = delta[i] + decay[i] x[i + 1], from the end; 0.1 ms for 2048 steps, in lists."""
    total, found = 0.0, []
    for error, kept in zip(delta[::-1].tolist(), decay[::-1].tolist(), strict=True):
        total = error + kept * total
        found.append(total)
    return np.array(found[::-1], np.float64)


def normalized(advantage: NDArray[np.float32], floor: float) -> NDArray[np.float32]:
    """Returns advantages [N] of mean 0 and deviation 1, or less where their deviation is below the floor.

    The floor keeps what is but the error of values, as long as no reward was found, from being all that is learned.
    """
    centred = advantage - advantage.mean()
    scaled: NDArray[np.float32] = centred / np.float32(max(float(centred.std()), floor, 1e-8))
    return scaled


def ratio(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """Returns pi / mu [B] of the actions that were taken."""
    return tf.exp(tf.minimum(log_pi - log_mu, _LOG_RATIO_MAX))


def clipped_surrogate(
    ratio_t: Tensor,  # [B]
    adv_t: Tensor,  # [B]
    epsilon: float,
) -> Tensor:
    """Returns what is to be climbed [B]: the less of ratio times advantage, and the same with the ratio clipped.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7.
    """
    _check_ranks(1, ratio_t=ratio_t, adv_t=adv_t)
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
    _check_ranks(1, v=v, v_old=v_old, target=target)
    error = tf.square(v - target)
    if epsilon:
        clipped = v_old + tf.clip_by_value(v - v_old, -epsilon, epsilon)
        error = tf.maximum(error, tf.square(clipped - target))
    return 0.5 * error


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Returns the log-probabilities [B] of choices [B] int32 by logits [B, A]."""
    _check_ranks(2, logits=logits)
    _check_ranks(1, action=action)
    # A one-hot product and not a gather: XLA fuses it on a CPU, and its gradient is no scatter.
    return tf.reduce_sum(tf.nn.log_softmax(logits) * tf.one_hot(action, logits.shape[1]), axis=1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Returns the entropy [B] in nats of the softmax of logits [B, A]."""
    _check_ranks(2, logits=logits)
    log_p = tf.nn.log_softmax(logits)
    return -tf.reduce_sum(tf.exp(log_p) * log_p, axis=1)


def gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Returns the log-densities [B] of actions [B, D] by diagonal Gaussians; `log_std` is [B, D] or [D]."""
    _check_ranks(2, mean=mean, action=action)
    z = (action - mean) * tf.exp(-log_std)
    return tf.reduce_sum(-0.5 * tf.square(z) - log_std - _HALF_LOG_2PI, axis=1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Returns the entropy in nats of diagonal Gaussians: over the last axis of `log_std`."""
    return tf.reduce_sum(log_std + 0.5 + _HALF_LOG_2PI, axis=-1)


def _check_ranks(rank: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape.rank != rank:
            raise ValueError(f"{name} must have rank {rank}, not shape {tensor.shape}")
