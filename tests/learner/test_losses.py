"""Losses on numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from learner import losses

Q_TM1 = [[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]]
A_TM1 = [1, 0]
R_T = [0.5, 10.0]
DISCOUNT_T = [0.9, 0.0]
Q_T_VALUE = [[5.0, 1.0, 2.0], [7.0, 7.0, 7.0]]
Q_T_SELECTOR = [[0.0, 0.0, 1.0], [0.0, 9.0, 0.0]]


def td_errors(selector: list[list[float]]) -> list[float]:
    tensors = [tf.constant(v, tf.float32) for v in (R_T, DISCOUNT_T, Q_T_VALUE, selector)]
    error = losses.q_learning(tf.constant(Q_TM1), tf.constant(A_TM1), *tensors)
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
            losses.q_learning(q_tm1, tf.constant(A_TM1), tf.constant(R_T), tf.constant(DISCOUNT_T), q_t, q_t)
        )
    d_q_tm1, d_q_t = tape.gradient(loss, [q_tm1, q_t])
    assert d_q_tm1.numpy().tolist() == [[0.0, -1.0, 0.0], [-1.0, 0.0, 0.0]]
    assert d_q_t is None


@pytest.mark.parametrize(
    ("error", "delta", "expected"),
    [(0.5, 1.0, 0.125), (-1.0, 1.0, 0.5), (3.0, 1.0, 2.5), (-3.0, 2.0, 4.0), (0.0, 1.0, 0.0)],
)
def test_huber(error: float, delta: float, expected: float) -> None:
    assert float(losses.huber(tf.constant(error), delta)) == pytest.approx(expected)


@pytest.mark.parametrize("bad", range(6))
def test_every_rank_is_asserted(bad: int) -> None:
    shapes = [(2, 3), (2,), (2,), (2,), (2, 3), (2, 3)]
    arguments = [tf.constant(np.zeros(s + ((1,) if i == bad else ()), np.int32 if i == 1 else np.float32))
                 for i, s in enumerate(shapes)]  # fmt: skip
    with pytest.raises(ValueError, match="must have rank"):
        losses.q_learning(*arguments)
