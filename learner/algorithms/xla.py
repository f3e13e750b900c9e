"""Functions that XLA compiles, and a short way to call them.

A module that has one imports this before anything is compiled: XLA reads its flags once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

Tensor = Any  # TensorFlow ships no types
_FLAGS, _SKIP = "XLA_FLAGS", "--xla_disable_hlo_passes"
_UNWANTED = "tree_reduction_rewriter"
"""A pass of XLA that makes trees of windows of all sums (gradients of biases, the global norm), which then neither fuse
nor vectorise: without it an update takes a seventh less (docs/decisions.md)."""
if _SKIP not in os.environ.get(_FLAGS, ""):  # read once, when the first function is compiled; it has no other setting
    os.environ[_FLAGS] = f"{os.environ.get(_FLAGS, '')} {_SKIP}={_UNWANTED}".strip()
_ALIGNED = 64  # bytes, as Eigen wants it


class Program:
    """A function of tensors that XLA compiles: 2.5 times the speed at width 64, for a second once per set of shapes.

    What TensorFlow does in Python around a call takes longer than an update of a small network (docs/decisions.md). So
    a call finds its graph by the arrays' shapes alone, and copies them to where that graph reads them, instead of into
    new tensors.

    Args:
        function: Takes tensors, each of the same type at every call, and returns a list of tensors. None of these may
            be one that it took: the next call overwrites those.

    Attributes:
        function: The same as a `tf.function`.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]]) -> None:
        self.function = tf.function(function, jit_compile=True, autograph=False)
        self._graphs: dict[tuple[tuple[int, ...], ...], _Graph] = {}

    def __call__(self, *arrays: NDArray[Any]) -> Sequence[Tensor]:
        """Runs it."""
        return self.given(*arrays)()

    def given(self, *arrays: NDArray[Any]) -> Callable[[], Sequence[Tensor]]:
        """Copies arrays to where the program reads them; returns what runs it on the last ones of these shapes.

        Raises:
            TypeError: One is of another type than at the first call.
        """
        shapes = tuple(array.shape for array in arrays)
        if (graph := self._graphs.get(shapes)) is None:
            graph = self._graphs[shapes] = _Graph(self.function, arrays)
        for room, array in zip(graph.rooms, arrays, strict=True):
            np.copyto(room, array, casting="no")
        return graph.run


class _Graph:
    """The graph of a function for arrays of such shapes and types, and the memory from which it reads them."""

    def __init__(self, function: Any, arrays: Sequence[NDArray[Any]]) -> None:
        self.rooms = [_room(array) for array in arrays]
        tensors = [tf.experimental.dlpack.from_dlpack(room.__dlpack__()) for room in self.rooms]
        graph = function.get_concrete_function(*tensors)
        self._graph, self._inputs = graph.inference_fn, (*tensors, *graph.captured_inputs)

    def run(self) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = self._graph.call_flat(*self._inputs)
        return outputs


def _room(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array of the same shape and type, aligned as TensorFlow has its tensors."""
    memory = np.zeros(array.nbytes + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
