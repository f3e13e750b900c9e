"""How training stores dense kernels: with their longer side last, along which XLA's products and loops run.

A product copies a kernel that lies the other way before it multiplies, and a loop along 24 inputs vectorises badly. So
a kernel [out, in], as `layers` has it, is stored as [in, out], unless it has fewer outputs than inputs: an update of
DQN takes 0.91 of the time (docs/decisions.md). Everybody else reads and writes it as `layers` has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

_LARGE = 1 << 18
"""Elements of a kernel that is not turned any more: turning it for each policy takes longer than updates gain."""


def is_turned(shape: tuple[int, ...]) -> bool:
    """Returns True if an array of this shape, as `layers` has it, is stored transposed."""
    return len(shape) == 2 and shape[0] >= shape[1] and shape[0] * shape[1] <= _LARGE


def output_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes along which a stored kernel, of this shape in `layers`, has the weights of one output."""
    return (0,) if is_turned(shape) else tuple(range(1, len(shape)))


def of(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array of `layers` as it is stored."""
    return np.transpose(array) if is_turned(array.shape) else array


class Weight:
    """A variable of training, whose numbers are read and written as `layers` has them.

    Args:
        name: Stable name, for checkpoints.
        value: The numbers at first.

    Attributes:
        variable: The numbers as they are stored: what compiled functions read and assign.
    """

    def __init__(self, name: str, value: NDArray[Any]) -> None:
        self.name, self.shape = name, value.shape
        self._is_turned = is_turned(value.shape)
        self.variable = tf.Variable(of(value), trainable=False, name=name)

    @property
    def dtype(self) -> Any:
        """The type of the numbers, as TensorFlow has it."""
        return self.variable.dtype

    def numpy(self) -> NDArray[Any]:
        """Returns the numbers as they are now."""
        now: NDArray[Any] = (tf.transpose(self.variable) if self._is_turned else self.variable).numpy()
        return now

    def assign(self, value: NDArray[Any]) -> None:
        """Takes other numbers."""
        self.variable.assign(of(value))
