"""Advantages, V-trace and policy-gradient losses, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from learner.networks.losses import policy_gradient

# Two sequences: two steps of which the last terminates, and one that goes on somewhere else.
R = np.array([1.0, 2.0, 3.0], np.float32)
DISCOUNT = np.array([0.5, 0.0, 0.5], np.float32)
V_TM1 = np.array([1.0, 4.0, 2.0], np.float32)
V_T = np.array([4.0, 7.0, 6.0], np.float32)  # 7 is behind a terminal step, and counts for nothing
LAST = np.array([False, True, True])


def test_generalized_advantages_by_hand() -> None:
    found = policy_gradient.generalized_advantages(R, DISCOUNT, V_TM1, V_T, LAST, lambda_=0.8)
    deltas = [1 + 0.5 * 4 - 1, 2 - 4, 3 + 0.5 * 6 - 2]  # 2, -2, 4
    advantage = [2 + 0.5 * 0.8 * -2, -2, 4]
    assert deltas == [2, -2, 4]
    assert found.advantage.numpy().tolist() == pytest.approx(advantage)
    assert found.target.numpy().tolist() == pytest.approx([1.2 + 1, -2 + 4, 4 + 2])


@pytest.mark.parametrize("lambda_", [0.0, 1.0])
def test_lambda_0_trusts_values_and_1_trusts_rewards(lambda_: float) -> None:
    found = policy_gradient.generalized_advantages(R, DISCOUNT, V_TM1, V_T, LAST, lambda_)
    first = 1 + 0.5 * (4 if lambda_ == 0 else 2) - 1
    assert float(found.advantage[0]) == pytest.approx(first)


def test_vtrace_by_hand() -> None:
    log_rho = np.log(np.array([2.0, 0.5, 0.25], np.float32))
    found = policy_gradient.vtrace(R, DISCOUNT, V_TM1, V_T, LAST, log_rho, lambda_=1.0)
    # delta = min(1, rho) (r + discount v' - v); errors add up by discount times min(1, rho), from the end
    assert found.target.numpy().tolist() == pytest.approx([1 + (2 + 0.5 * 1.0 * -1), 4 + 0.5 * -2, 2 + 0.25 * 4])
    # advantage = min(1, rho) (r + discount target' - v), and behind a sequence the value
    assert found.advantage.numpy().tolist() == pytest.approx([1 + 0.5 * 3 - 1, 0.5 * (2 - 4), 0.25 * (3 + 0.5 * 6 - 2)])


def test_vtrace_with_its_bounds_and_lambda_agrees_with_the_definition_term_by_term() -> None:
    """Equation 1 of the paper as a double sum, with rlax's lambda in the traces."""
    rng = np.random.default_rng(0)
    n, lambda_, rho_bar, c_bar, gamma = 6, 0.9, 1.5, 0.8, 0.95
    r, values, log_rho = rng.normal(size=n), rng.normal(size=n + 1), rng.normal(size=n)
    discount, last = np.full(n, gamma), np.arange(n) == n - 1
    rho, c = np.minimum(rho_bar, np.exp(log_rho)), lambda_ * np.minimum(c_bar, np.exp(log_rho))
    delta = rho * (r + gamma * values[1:] - values[:-1])
    target = [values[s] + sum(gamma ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, n)) for s in range(n)]
    found = policy_gradient.vtrace(r, discount, values[:-1], values[1:], last, log_rho, lambda_, rho_bar, c_bar)
    assert found.target.numpy() == pytest.approx(np.array(target), abs=1e-6)
    mixed = [lambda_ * t + (1 - lambda_) * v for t, v in zip([*target[1:], 0], values[1:], strict=True)]
    mixed[-1] = values[-1]
    assert found.advantage.numpy() == pytest.approx(rho * (r + gamma * np.array(mixed) - values[:-1]), abs=1e-6)


def test_vtrace_on_policy_is_the_return_of_n_steps() -> None:
    found = policy_gradient.vtrace(R, DISCOUNT, V_TM1, V_T, LAST, np.zeros(3, np.float32), lambda_=1.0)
    same = policy_gradient.generalized_advantages(R, DISCOUNT, V_TM1, V_T, LAST, lambda_=1.0)
    assert found.target.numpy().tolist() == pytest.approx([1 + 0.5 * 2, 2, 3 + 0.5 * 6])
    assert found.advantage.numpy().tolist() == pytest.approx(same.advantage.numpy().tolist())


def test_a_ratio_beyond_float32_is_a_number() -> None:
    found = policy_gradient.vtrace(R, DISCOUNT, V_TM1, V_T, LAST, np.full(3, 1e6, np.float32), lambda_=1.0)
    assert np.isfinite(found.target).all()
    assert np.isfinite(policy_gradient.ratio(tf.constant([1e6]), tf.constant([-1e6])).numpy()).all()


def test_normalized_advantages() -> None:
    advantage = np.array([1.0, 3.0], np.float32)
    assert policy_gradient.normalized(advantage, 0.5).numpy().tolist() == pytest.approx([-1.0, 1.0])
    assert policy_gradient.normalized(advantage, 4.0).numpy().tolist() == pytest.approx([-0.25, 0.25])
    assert policy_gradient.normalized(np.full(4, 7.0, np.float32), 0.0).numpy().tolist() == [0.0] * 4


def test_divergence_is_that_of_the_distributions_on_average() -> None:
    rng, mu, pi = np.random.default_rng(0), np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    taken = rng.choice(3, 200_000, p=mu)
    found = policy_gradient.divergence(tf.constant(np.log(pi)[taken]), tf.constant(np.log(mu)[taken])).numpy()
    assert found.min() >= 0.0
    assert found.mean() == pytest.approx(np.sum(mu * np.log(mu / pi)), rel=0.02)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        (1.1, 2.0, 2.2, 2.0),
        (1.5, 2.0, 2.4, 0.0),  # more would earn no more
        (0.5, 2.0, 1.0, 2.0),  # what got less likely though it is good is not held back
        (0.5, -2.0, -1.6, 0.0),
        (1.5, -2.0, -3.0, -2.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, gain: float, slope: float) -> None:
    x = tf.constant([ratio])
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = policy_gradient.clipped_surrogate(x, tf.constant([advantage]), 0.2)
    assert found.numpy() == pytest.approx([gain])
    assert tape.gradient(found, x).numpy() == pytest.approx([slope])


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [
        (1.5, 1.0, 2.0, 0.2, 0.5 * 0.8**2),  # clipped to 1.2, whose error is larger
        (1.5, 1.0, 1.0, 0.2, 0.5 * 0.5**2),  # the value's own error is larger
        (1.5, 1.0, 2.0, 0.0, 0.5 * 0.5**2),
    ],
)
def test_clipped_value_loss_by_hand(value: float, old: float, target: float, clip: float, loss: float) -> None:
    found = policy_gradient.clipped_value_loss(tf.constant([value]), tf.constant([old]), tf.constant([target]), clip)
    assert found.numpy() == pytest.approx([loss])
