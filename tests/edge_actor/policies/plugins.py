"""Runtimes of a user's own, as MODULE:CLASS names them: one that works, and some that do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_actor.policies import interpreter


class Numpy:
    """Runs nothing: answers each observation with its first elements, doubled."""

    runtime = "numpy-double 1.0"
    delegate = "numpy"
    outputs = 2

    def __init__(self, model: bytes, batch: int, *, threads: int, limit_bytes: int) -> None:
        self.arguments = (model, batch, threads, limit_bytes)
        self.input = np.zeros((batch, 4), np.float32)
        self.output = np.zeros((batch, self.outputs), np.float32)

    def invoke(self) -> None:
        np.multiply(self.input[:, : self.outputs], 2.0, out=self.output)


class Float32Only:
    """The actor's own interpreter, for files as large as a float32 policy of 256x2."""

    runtime = "float32-only 2"

    def __init__(self, model: bytes, batch: int, *, threads: int, limit_bytes: int) -> None:
        if len(model) < 4 * 256 * 256:
            raise ValueError("this takes float32 alone")
        built = interpreter.Interpreter(model, batch, threads=threads, limit_bytes=limit_bytes)
        self.delegate, self.input, self.output, self.invoke = built.delegate, built.input, built.output, built.invoke


class Nameless:
    """Does not say what it is."""


class WithoutOutput(Numpy):
    """Builds what has no output."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.output


class WrongDtype(Numpy):
    """Has an input of another dtype."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input = self.input.astype(np.float64)


class Broken(Numpy):
    """Cannot load any model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("no such device: /dev/hailo0")


not_a_class = 3
