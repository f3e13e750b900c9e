"""Losses on numbers worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from learner.networks.losses import value_learning

Q_TM1 = [[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]]
A_TM1 = [1, 0]
R_T = [0.5, 10.0]
DISCOUNT_T = [0.9, 0.0]
Q_T_VALUE = [[5.0, 1.0, 2.0], [7.0, 7.0, 7.0]]
Q_T_SELECTOR = [[0.0, 0.0, 1.0], [0.0, 9.0, 0.0]]


def td_errors(selector: list[list[float]]) -> list[float]:
    tensors = [tf.constant(v, tf.float32) for v in (R_T, DISCOUNT_T, Q_T_VALUE, selector)]
    error = value_learning.q_learning(tf.constant(Q_TM1), tf.constant(A_TM1), *tensors)
    return [float(e) for e in error]


def test_double_q_values_the_action_that_the_selector_likes_best() -> None:
    # 0.5 + 0.9 * Q_T_VALUE[0][2] - Q_TM1[0][1];   terminated: 10 + 0 - Q_TM1[1][0]
    assert td_errors(Q_T_SELECTOR) == pytest.approx([0.5 + 0.9 * 2.0 - 2.0, 10.0])


def test_plain_q_takes_the_maximum() -> None:
    assert td_errors(Q_T_VALUE) == pytest.approx([0.5 + 0.9 * 5.0 - 2.0, 10.0])


def test_gradient_reaches_only_the_value_of_the_action_taken() -> None:
    q_tm1, q_t = tf.Variable(Q_TM1), tf.Variable(Q_T_VALUE)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(
            value_learning.q_learning(q_tm1, tf.constant(A_TM1), tf.constant(R_T), tf.constant(DISCOUNT_T), q_t, q_t)
        )
    d_q_tm1, d_q_t = tape.gradient(loss, [q_tm1, q_t])
    assert d_q_tm1.numpy().tolist() == [[0.0, -1.0, 0.0], [-1.0, 0.0, 0.0]]
    assert d_q_t is None


@pytest.mark.parametrize(
    ("error", "delta", "expected"),
    [(0.5, 1.0, 0.125), (-1.0, 1.0, 0.5), (3.0, 1.0, 2.5), (-3.0, 2.0, 4.0), (0.0, 1.0, 0.0)],
)
def test_huber(error: float, delta: float, expected: float) -> None:
    assert float(value_learning.huber(tf.constant(error), delta)) == pytest.approx(expected)


@pytest.mark.parametrize("bad", range(6))
def test_every_rank_is_asserted(bad: int) -> None:
    shapes = [(2, 3), (2,), (2,), (2,), (2, 3), (2, 3)]
    arguments = [tf.constant(np.zeros(s + ((1,) if i == bad else ()), np.int32 if i == 1 else np.float32))
                 for i, s in enumerate(shapes)]  # fmt: skip
    with pytest.raises(ValueError, match="must have rank"):
        value_learning.q_learning(*arguments)


def test_value_error_by_hand_and_no_gradient_reaches_the_target() -> None:
    q_tm1, q_t = tf.Variable([1.0, 4.0]), tf.Variable([10.0, 7.0])
    with tf.GradientTape() as tape:
        error = value_learning.value_error(q_tm1, tf.constant([0.5, 2.0]), tf.constant([0.9, 0.0]), q_t)
        loss = tf.reduce_sum(error)
    assert error.numpy() == pytest.approx([0.5 + 0.9 * 10 - 1, 2.0 - 4.0])
    d_q_tm1, d_q_t = tape.gradient(loss, [q_tm1, q_t])
    assert d_q_tm1.numpy().tolist() == [-1.0, -1.0]
    assert d_q_t is None


def project_by_loop(z_p: list[float], p: list[float], z_q: NDArray[Any]) -> list[float]:
    """Bellemare et al. 2017, algorithm 1, as it is printed."""
    v_min, v_max, delta = z_q[0], z_q[-1], (z_q[-1] - z_q[0]) / (len(z_q) - 1)
    m = [0.0] * len(z_q)
    for z, probability in zip(z_p, p, strict=True):
        b = (min(max(z, v_min), v_max) - v_min) / delta
        lower, upper = int(np.floor(b)), int(np.ceil(b))
        if lower == upper:  # the printed form loses what falls on an atom
            m[lower] += probability
        else:
            m[lower] += probability * (upper - b)
            m[upper] += probability * (b - lower)
    return m


def test_projection_by_hand() -> None:
    z_q = tf.constant([0.0, 1.0, 2.0, 3.0])
    # A quarter of the way from 1 to 2; on an atom; beyond either end
    projected = value_learning.categorical_projection(
        tf.constant([[1.25, 2.0], [-5.0, 9.0]]), tf.constant([[0.8, 0.2], [0.3, 0.7]]), z_q
    )
    assert projected.numpy() == pytest.approx(np.array([[0.0, 0.6, 0.4, 0.0], [0.3, 0.0, 0.0, 0.7]]))


def test_projection_is_the_reference_s_on_random_distributions() -> None:
    rng = np.random.default_rng(0)
    z_q = np.linspace(-7.0, 13.0, 51).astype(np.float32)
    p = rng.dirichlet(np.full(51, 0.3), 200)
    discount = rng.choice([0.0, 0.95, 0.99**5, 1.0], 200)
    z_p = (rng.normal(0, 6, (200, 1)) + discount[:, None] * z_q).astype(np.float32)
    projected = value_learning.categorical_projection(*(tf.constant(a, tf.float32) for a in (z_p, p, z_q))).numpy()
    expected = np.array([project_by_loop(list(z), list(q), z_q) for z, q in zip(z_p, p, strict=True)])
    assert projected == pytest.approx(expected, abs=2e-5)
    assert projected.sum(1) == pytest.approx(np.ones(200), abs=1e-5)
    inside = (z_p.min(1) >= z_q[0]) & (z_p.max(1) <= z_q[-1])
    assert inside.sum() > 10
    assert (projected @ z_q)[inside] == pytest.approx((p * z_p).sum(1)[inside], abs=1e-3), "keeps the mean"


def test_cross_entropy_by_hand() -> None:
    logits = tf.math.log([[0.5, 0.25, 0.25]])
    expected = -(0.5 * np.log(0.25) + 0.5 * np.log(0.5))
    assert value_learning.cross_entropy(tf.constant([[0.5, 0.5, 0.0]]), logits).numpy() == pytest.approx([expected])
