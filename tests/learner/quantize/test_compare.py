"""Agreement, regret and the paired bootstrap, worked by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import specs
from learner.quantize import compare

# Advantages (+-): 4, -1, 0.03, -0.5, 1: their range is 4 - (-4) = 8, so a gap of 0.08 or less leaves a state undecided.
EXACT = np.array([[4.0, -4.0], [-1.0, 1.0], [0.03, -0.03], [-0.5, 0.5], [1.0, -1.0]], np.float32) + 95


def test_states_by_hand() -> None:
    #             same        other       tie, other  tie, the 0th wins: other  same
    other = [[2.0, 1.0], [3.0, 1.0], [5.0, 5.0], [7.0, 7.0], [0.1, 0.0]]
    found = compare.states(EXACT, np.array(other, np.float32))
    assert found.agreement == pytest.approx(3 / 5)
    assert found.decided == pytest.approx(4 / 5)
    assert found.agreement_decided == pytest.approx(2 / 4)
    assert found.ties == pytest.approx(2 / 5)
    assert found.regret == pytest.approx((2.0 + 1.0) / 5 / 8, rel=1e-5)


def test_the_range_is_of_advantages_so_the_value_of_a_state_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    exact, other = rng.normal(size=(2, 500, 4))
    plain, shifted = compare.states(exact, other), compare.states(exact + rng.normal(size=(500, 1)) * 100, other)
    assert plain.regret == pytest.approx(shifted.regret)
    assert (plain.decided, plain.agreement_decided) == (shifted.decided, shifted.agreement_decided)
    assert plain.agreement == pytest.approx(1 / 4, abs=0.06)


def test_itself_is_faithful() -> None:
    assert compare.states(EXACT, EXACT) == compare.States(1.0, 1.0, 4 / 5, 0.0, 0.0)


def test_equal_advantages_everywhere_leave_nothing_decided() -> None:
    flat = np.full((3, 2), 7.0)
    assert compare.states(flat, flat) == compare.States(1.0, None, 0.0, 1.0, 0.0)


def test_interval_of_two_values() -> None:
    """Means of resamples of (0, 1): 0 in a quarter of them, 1/2 in half, 1 in a quarter."""
    values = np.array([0.0, 1.0])
    assert compare.interval(values, 0.95) == (0.0, 1.0)
    assert compare.interval(values, 0.40) == (0.5, 0.5)
    assert compare.interval(np.full(7, 3.0)) == (3.0, 3.0)


def test_interval_of_many_values_is_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(5.0, 2.0, 400)
    half = 1.96 * values.std() / 20
    assert compare.interval(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_the_divergence_of_gaussians_by_hand() -> None:
    """KL(0 || 1) of one element is log(s1 / s0) + (s0^2 + (m0 - m1)^2) / (2 s1^2) - 1/2; elements add up."""
    one = np.array([[1.0, 0.0, np.log(1.0), np.log(2.0)]], np.float32)
    other = np.array([[0.0, 0.0, np.log(2.0), np.log(2.0)]], np.float32)
    assert compare.gaussian_divergence(other, one) == pytest.approx([np.log(2) + 2 / 8 - 0.5])
    assert compare.gaussian_divergence(one, other) == pytest.approx([-np.log(2) + 5 / 2 - 0.5])
    assert compare.gaussian_divergence(one, one) == pytest.approx([0.0])


def test_squashed_gaussians_are_compared_by_mode_and_divergence() -> None:
    """Outputs are mean, then what brings the log of the deviation from -5 to 2: 0 is -1.5."""
    action = specs.ActionSpec("continuous", shape=(2,), low=(0.0, -1.0), high=(4.0, 1.0))
    exact = np.array([[0.0, 0.0, 0.0, 0.0]] * 2, np.float32)
    other = np.array([[np.arctanh(0.5), 0.0, 0.0, 0.0], [0.0, 0.0, np.arctanh(0.2), 0.0]], np.float32)
    found = compare.squashed(exact, other, action)
    # The tanh of the mean moves by 0.5 of the 2 between the bounds in one of two states
    assert found.error_means == pytest.approx([0.125, 0.0], abs=1e-6)
    assert found.error_mean == pytest.approx(0.125)
    assert found.error_max == pytest.approx(0.25)
    moved = 0.5 * (np.arctanh(0.5) / np.exp(-1.5)) ** 2
    wider = -0.7 + 0.5 * (np.exp(1.4) - 1)  # 0.2 of 3.5
    assert found.kl_mean == pytest.approx((moved + wider) / 2, rel=1e-5)
    assert found.kl_p99 == pytest.approx(wider + 0.99 * (moved - wider), rel=1e-5)


def test_divergence_is_the_mean_of_how_much_likelier_int8_s_own_actions_are_to_it() -> None:
    """Against samples behind the tanh, by densities that are worked out there: squashing changes no divergence."""
    rng = np.random.default_rng(0)
    (mean0, std0), (mean1, std1) = (0.3, 0.5), (0.1, 0.7)
    a = np.tanh(mean0 + std0 * rng.normal(size=200_000))

    def log_density(mean: float, std: float) -> NDArray[np.float64]:
        z = (np.arctanh(a) - mean) / std
        log: NDArray[np.float64] = -0.5 * z * z - np.log(std) - np.log(1 - a * a)
        return log

    sampled = float((log_density(mean0, std0) - log_density(mean1, std1)).mean())
    one, other = (np.array([[mean, np.log(std)]], np.float32) for mean, std in ((mean0, std0), (mean1, std1)))
    assert compare.gaussian_divergence(other, one)[0] == pytest.approx(sampled, abs=3e-3)


def test_returns_are_paired() -> None:
    exact = np.array([100.0, 500.0, 300.0], np.float32)
    found = compare.returns(exact, exact - 9, chance=np.array([50.0, 150.0]))
    assert dataclasses.astuple(found) == (291.0, -9.0, -9.0, -9.0, pytest.approx(-9 / 200), True)
    assert compare.returns(exact, exact - 11, chance=np.array([100.0])).non_inferior is False
    assert compare.returns(exact, exact + 50, chance=np.array([100.0])).low_relative == pytest.approx(0.25)


def test_where_fp32_is_no_better_than_chance_nothing_is_said() -> None:
    exact = np.array([10.0, 20.0])
    found = compare.returns(exact, exact, chance=np.array([15.0, 15.0]))
    assert (found.low_relative, found.non_inferior) == (None, None)


def test_divergence_of_choices_by_hand() -> None:
    exact, other = np.log([[0.5, 0.5], [0.2, 0.8]]), np.log([[0.25, 0.75], [0.2, 0.8]]) + 3.0
    expected = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5)
    assert compare.categorical_divergence(exact, other) == pytest.approx([expected, 0.0])


def test_divergence_of_gaussians_by_hand() -> None:
    exact = np.array([[0.0, 1.0, 0.0, np.log(2.0)]])  # means 0 and 1, deviations 1 and 2
    other = np.array([[0.5, 1.0, 0.0, 0.0]])
    shifted, narrower = 0.5**2 / 2, np.log(2.0) + 1 / 8 - 0.5
    assert compare.gaussian_divergence(exact, other) == pytest.approx([shifted + narrower])


def test_distributions_are_compared_with_their_modes() -> None:
    choices = compare.distributions(np.eye(2), np.eye(2)[[0, 0]], specs.ActionSpec("discrete", n=2))
    assert (choices.agreement, choices.action_error_mean) == (0.5, None)
    action = specs.ActionSpec("continuous", shape=(1,), low=(-1.0,), high=(1.0,))
    actions = compare.distributions(np.array([[0.5, 0.0], [9.0, 0.0]]), np.array([[0.6, 0.0], [5.0, 0.0]]), action)
    assert actions.agreement is None
    assert actions.action_error_mean == pytest.approx(0.025), "beyond the bounds all are one"
    assert actions.kl_mean == pytest.approx((0.005 + 8.0) / 2)
