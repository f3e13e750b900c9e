"""Sum tree over priorities, vectorised: thousands of draws or updates in one call.

Proportional prioritisation as in Schaul et al. 2016, https://arxiv.org/abs/1511.05952, appendix B.2.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class SumTree:
    """A binary tree whose leaves are priorities and whose inner nodes are the sums of their two children.

    Args:
        capacity: Number of leaves; all start at zero and are never drawn while they are.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        depth = max(1, (capacity - 1).bit_length())
        self._levels = [np.zeros(1 << d, np.float64) for d in range(depth + 1)]  # root first, leaves last

    @property
    def total(self) -> float:
        return float(self._levels[0][0])

    def get(self, indices: IntArray) -> NDArray[np.float64]:
        """Returns the priorities of the leaves `indices`."""
        return self._levels[-1][indices]

    def set(self, indices: IntArray, priorities: NDArray[np.float64] | float) -> None:
        """Sets leaves and repairs the sums above them; of an index that occurs twice, the last value counts."""
        self._levels[-1][indices] = priorities
        for parents, children in zip(self._levels[-2::-1], self._levels[:0:-1], strict=True):
            if len(parents) <= len(indices):  # all of a narrow level costs less than picking
                np.add(children[0::2], children[1::2], out=parents)
                continue
            indices = indices >> 1
            left = indices << 1
            parents[indices] = children[left] + children[left + 1]

    def draw(self, points: NDArray[np.float64]) -> IntArray:
        """Returns the leaves in which `points`, each in [0, total), fall when the leaves are laid end to end."""
        at = np.zeros(len(points), np.int64)
        rest = points.copy()
        for level in self._levels[1:]:
            at <<= 1
            left = level[at]
            # A rounded sum can send a point into an empty right subtree: only nodes that hold something are entered.
            right = (rest >= left) & (level[at + 1] > 0)
            rest -= left * right
            at += right
        return at
