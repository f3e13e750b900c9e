"""The sum tree, by hand and against cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.experience.buffers import priorities


def test_points_fall_into_leaves_laid_end_to_end() -> None:
    tree = priorities.SumTree(5)
    tree.set(np.arange(5), np.array([1.0, 0.0, 2.0, 0.5, 3.0]))
    assert tree.total == 6.5
    points = np.array([0.0, 0.99, 1.0, 2.99, 3.0, 3.49, 3.5, 6.49])
    assert tree.draw(points).tolist() == [0, 0, 2, 2, 3, 3, 4, 4]


def test_last_value_of_an_index_given_twice_counts() -> None:
    tree = priorities.SumTree(100)
    tree.set(np.array([7, 3, 7]), np.array([1.0, 2.0, 5.0]))
    assert tree.get(np.array([7, 3])).tolist() == [5.0, 2.0]
    assert tree.total == 7.0


@pytest.mark.parametrize("capacity", [1, 2, 3, 64, 65])
def test_every_capacity_draws_its_last_leaf(capacity: int) -> None:
    tree = priorities.SumTree(capacity)
    tree.set(np.array([capacity - 1]), 2.0)
    assert tree.draw(np.array([0.0, 1.999])).tolist() == [capacity - 1] * 2


@given(st.integers(1, 70), st.data())
def test_agrees_with_cumulative_sums(capacity: int, data: st.DataObject) -> None:
    tree = priorities.SumTree(capacity)
    leaves = np.zeros(capacity)
    for _ in range(data.draw(st.integers(1, 4))):
        indices = np.array(data.draw(st.lists(st.integers(0, capacity - 1), min_size=1, max_size=2 * capacity)))
        values = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(indices), max_size=len(indices))), float)
        tree.set(indices, values)
        for index, value in zip(indices, values, strict=True):
            leaves[index] = value
    assert tree.total == leaves.sum()
    if leaves.any():
        points = np.arange(0, leaves.sum(), 0.25)  # small integers: both sums are exact
        expected = np.searchsorted(np.cumsum(leaves), points, side="right")
        assert tree.draw(points).tolist() == expected.tolist()


def test_rounding_never_leads_to_an_empty_leaf() -> None:
    tree = priorities.SumTree(8)
    tree.set(np.array([0, 1, 2]), np.array([0.1, 0.2, 0.3]))
    assert tree.draw(np.full(4, tree.total)).tolist() == [2, 2, 2, 2]
