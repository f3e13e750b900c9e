"""Value heads: what a critic's outputs say, a value or how probable each of some returns is.

Either way it is one row of numbers per transition [B, N], the estimate, from which `mean` makes a value linearly; so
the difference of two estimates has the difference of their values. Shapes: B transitions, N outputs.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from learner.networks.losses import value_learning

Tensor = Any  # TensorFlow ships no types


class ValueHead(Protocol):
    """What the algorithms need of either."""

    def estimate(self, outputs: Tensor) -> Tensor:
        """Returns what outputs [B, N] of a critic say: [B, N]."""
        ...

    def mean(self, estimate: Tensor) -> Tensor:
        """Returns the values [B] of estimates [B, N]."""
        ...

    def target(self, reward: Tensor, discount: Tensor, estimate: Tensor) -> Tensor:
        """Returns the estimate [B, N] of rewards [B] before what `estimate` [B, N] says, discounted by `discount` [B].

        No gradient goes through it.
        """
        ...

    def loss(self, target: Tensor, outputs: Tensor) -> Tensor:
        """Returns how far outputs [B, N] are from saying `target` [B, N]: [B]."""
        ...

    def clipped(self, reward: Tensor, discount: Tensor) -> Tensor:
        """Returns the share of the returns in a target that the head cannot say: a scalar in 0..1."""
        ...


class Scalar:
    """The value itself, learned by its squared error."""

    def estimate(self, outputs: Tensor) -> Tensor:
        return outputs

    def mean(self, estimate: Tensor) -> Tensor:
        return estimate[:, 0]

    def target(self, reward: Tensor, discount: Tensor, estimate: Tensor) -> Tensor:
        return tf.stop_gradient(reward[:, None] + discount[:, None] * estimate)

    def loss(self, target: Tensor, outputs: Tensor) -> Tensor:
        return 0.5 * tf.square(target - outputs)[:, 0]

    def clipped(self, reward: Tensor, discount: Tensor) -> Tensor:
        return tf.zeros(())


class Categorical:
    """Probabilities of evenly spaced returns, learned by cross entropy (Bellemare et al. 2017).

    Args:
        low: The lowest of them; lower ones count as it.
        high: The highest of them; higher ones count as it.
        size: How many.
    """

    def __init__(self, low: float, high: float, size: int) -> None:
        self._atoms = np.linspace(low, high, size, dtype=np.float32)

    def estimate(self, outputs: Tensor) -> Tensor:
        return tf.nn.softmax(outputs)

    def mean(self, estimate: Tensor) -> Tensor:
        return tf.linalg.matvec(estimate, self._atoms)

    def target(self, reward: Tensor, discount: Tensor, estimate: Tensor) -> Tensor:
        return value_learning.categorical_projection(self._returns(reward, discount), estimate, self._atoms)

    def loss(self, target: Tensor, outputs: Tensor) -> Tensor:
        return value_learning.cross_entropy(target, outputs)

    def clipped(self, reward: Tensor, discount: Tensor) -> Tensor:
        returns = self._returns(reward, discount)
        return tf.reduce_mean(tf.cast((returns < self._atoms[0]) | (returns > self._atoms[-1]), tf.float32))

    def _returns(self, reward: Tensor, discount: Tensor) -> Tensor:
        return reward[:, None] + discount[:, None] * self._atoms


def of(low: float, high: float, atoms: int) -> ValueHead:
    """Returns the head of `atoms` outputs; one says the value itself, whatever the bounds."""
    return Categorical(low, high, atoms) if atoms > 1 else Scalar()
