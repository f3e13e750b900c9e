"""Agreement, regret and the paired bootstrap, worked by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

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
