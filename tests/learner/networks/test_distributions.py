"""Distributions by hand; the squashed Gaussian also against an independent formula, far out, and its gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from broker.contract import specs
from learner.networks import distributions


def sample(mean: Any, log_std: Any, normal: Any) -> tuple[Any, Any]:
    found = distributions.squashed_gaussian_sample(*(tf.constant(x, tf.float32) for x in (mean, log_std, normal)))
    return found[0].numpy(), found[1].numpy()


def test_deviations_end_where_the_head_s_do() -> None:
    mean, log_std = distributions.squashed_gaussian(tf.constant([[1.0, 2.0, -90.0, 90.0], [3.0, 4.0, 0.0, 1.0]]))
    assert mean.numpy().tolist() == [[1.0, 2.0], [3.0, 4.0]]
    low, high = specs.SQUASHED_LOG_STD
    assert log_std.numpy() == pytest.approx(np.array([[low, high], [-1.5, -1.5 + 3.5 * math.tanh(1.0)]]))


def test_log_densities_by_hand() -> None:
    """Stable-Baselines3's SquashedDiagGaussianDistribution: log N(u) - sum log(1 - a^2 + 1e-6), of the same numbers."""
    action, log_prob = sample([[0.5, -0.2]], [[0.0, math.log(2.0)]], [[1.0, -0.5]])
    u = np.array([1.5, -1.2])  # 0.5 + 1 * 1, -0.2 - 2 * 0.5
    assert action[0] == pytest.approx(np.tanh(u))  # 0.9051, -0.8337
    normal = (-0.5 - 0.9189385) + (-0.125 - 0.6931472 - 0.9189385)  # -0.5 z^2 - log std - log sqrt(2 pi)
    slopes = math.log(1 - 0.9051483**2) + math.log(1 - 0.8336546**2)  # -1.7111, -1.1876
    assert slopes == pytest.approx(-2.8985, abs=1e-3)
    assert log_prob[0] == pytest.approx(normal - slopes, abs=1e-5)
    sb3 = normal - np.log(1 - np.tanh(u) ** 2 + 1e-6).sum()
    assert log_prob[0] == pytest.approx(sb3, abs=1e-4)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.5, -1.0), (-0.3, -4.0), (1.0, -0.5)])
def test_densities_sum_to_one_over_the_range(mean: float, log_std: float) -> None:
    normal = np.linspace(-8, 8, 40_001)[:, None]
    action, log_prob = sample(np.full_like(normal, mean), np.full_like(normal, log_std), normal)
    density, a = np.exp(log_prob.astype(np.float64)), action[:, 0].astype(np.float64)
    assert (0.5 * (density[1:] + density[:-1]) * np.diff(a)).sum() == pytest.approx(1.0, abs=5e-3)


def test_far_out_the_density_stays_exact() -> None:
    """Where tanh(u) is 1 in float32, log(1 - tanh(u)^2) is 2 log 2 - 2 |u|, and no logarithm of 0."""
    _, log_prob = sample([[50.0], [-50.0]], [[0.0], [0.0]], [[0.0], [0.0]])
    assert log_prob == pytest.approx([100 - 2 * math.log(2) - 0.5 * math.log(2 * math.pi)] * 2, rel=1e-6)


def test_gradients_reach_mean_and_deviation() -> None:
    """The slope of log p by the mean is that of -log(1 - tanh(u)^2), 2 tanh(u): its normal part has none."""
    mean, log_std, normal = (tf.constant([[x]]) for x in (0.4, -0.7, 1.3))
    with tf.GradientTape() as tape:
        tape.watch([mean, log_std])
        _, log_prob = distributions.squashed_gaussian_sample(mean, log_std, normal)
    by_mean, by_log_std = (float(g[0, 0]) for g in tape.gradient(log_prob, [mean, log_std]))
    std = math.exp(-0.7)
    a = math.tanh(0.4 + 1.3 * std)
    assert by_mean == pytest.approx(2 * a, rel=1e-5)
    assert by_log_std == pytest.approx(2 * a * 1.3 * std - 1, abs=1e-5)


def test_another_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"log_std.*must have rank 2"):
        distributions.squashed_gaussian_sample(tf.zeros((2, 1)), tf.zeros(2), tf.zeros((2, 1)))


def test_categorical_distribution_by_hand() -> None:
    logits = tf.math.log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]) + 3.0  # a constant changes nothing
    log_prob = distributions.categorical_log_prob(logits, tf.constant([1, 2]))
    assert log_prob.numpy() == pytest.approx([math.log(0.25), math.log(0.8)], abs=1e-6)
    assert distributions.categorical_entropy(logits).numpy()[0] == pytest.approx(1.5 * math.log(2.0), abs=1e-6)


@pytest.mark.parametrize("choices", [(3, 2), (2, 2)])
def test_several_choices_by_hand(choices: tuple[int, ...]) -> None:
    """Log-probabilities and entropies are sums over elements, each of which has a softmax of its own."""
    parts = [np.array([0.5, 0.25, 0.25][: choices[0]]), np.array([0.1, 0.9])]
    parts = [part / part.sum() for part in parts]
    logits = tf.constant(np.concatenate([np.log(parts[0]) + 3.0, np.log(parts[1]) - 50.0])[None], tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        spread = distributions.by_element(logits, choices)
        log_prob = distributions.categorical_log_prob(spread, tf.constant([[1, 0]]))
    assert log_prob.numpy() == pytest.approx([math.log(parts[0][1]) + math.log(0.1)], abs=1e-5)
    slope = np.concatenate([np.eye(choices[0])[1] - parts[0], np.eye(2)[0] - parts[1]])
    assert tape.gradient(log_prob, logits).numpy()[0] == pytest.approx(slope, abs=1e-5)
    entropy = -sum(float((part * np.log(part)).sum()) for part in parts)
    assert distributions.categorical_entropy(spread).numpy() == pytest.approx([entropy], abs=1e-5)


def test_gaussian_distribution_by_hand() -> None:
    mean, log_std = tf.constant([[1.0, 0.0]]), tf.constant([math.log(2.0), 0.0])
    found = distributions.gaussian_log_prob(mean, log_std, tf.constant([[3.0, 0.0]])).numpy()
    assert found == pytest.approx([-0.5 - math.log(2.0) - math.log(2 * math.pi)])
    entropy = distributions.gaussian_entropy(log_std).numpy()
    assert entropy == pytest.approx(math.log(2.0) + math.log(2 * math.pi * math.e))
