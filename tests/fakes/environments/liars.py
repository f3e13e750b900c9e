"""Actors that do not do what they say: environments which, once they are made, change the actor's own code around them.

`--env liars.py:Flipped` and so on; the task is Pendulum-v1 with all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from edge_actor.experience import trajectory
from edge_actor.policies import interpreter, runtimes

_build = runtimes.build
_flush = trajectory.Trajectory.flush


def kernels(model: bytes) -> list[range]:
    """Returns where in a model's file the int8 kernels of its dense layers lie, in their order."""
    from ai_edge_litert import interpreter as litert  # here: 32-bit boards lie too, and have another runtime

    built = litert.Interpreter(model_content=model)
    dense = [op["inputs"][1] for op in built._get_ops_details() if op["op_name"] == "FULLY_CONNECTED"]
    found = [built.get_tensor(int(index)).tobytes() for index in dense]
    return [range(model.index(kernel), model.index(kernel) + len(kernel)) for kernel in found]


def weights(model: bytes) -> range:
    """Returns where the largest of them lies."""
    return max(kernels(model), key=len)


def _flip(model: bytes, at: int) -> bytes:
    return model[:at] + bytes([model[at] ^ 1 << 7]) + model[at + 1 :]


class Honest(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The task, and nothing else."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))


class _Building(Honest):
    def __init__(self) -> None:
        super().__init__()
        runtimes.build = self.build

    def build(self, model: bytes, batch: int, **options: Any) -> Any:
        raise NotImplementedError


class Flipped(_Building):
    """Runs each policy with one bit of one weight flipped: the file was read wrongly.

    It is in the first layer, and of some there the one that changes the most answers of the first policy: many a bit
    changes none, and is no lie.
    """

    def __init__(self) -> None:
        super().__init__()
        self._at = 0

    def build(self, model: bytes, batch: int, **options: Any) -> Any:
        self._at = self._at or self._most_telling(model, options)
        return _build(_flip(model, self._at), batch, **options)

    def _most_telling(self, model: bytes, options: dict[str, Any]) -> int:
        seen = np.stack([self.observation_space.sample() for _ in range(64)])

        def answers(model: bytes) -> NDArray[np.float32]:
            built = _build(model, len(seen), **options)
            built.input[:] = seen
            built.invoke()
            return built.output.copy()

        where, right = kernels(model)[0], answers(model)
        return max(where[:: len(where) // 8], key=lambda at: int(np.count_nonzero(answers(_flip(model, at)) != right)))


class Older(_Building):
    """Runs the first policy that it ever got, and says that it is the newest."""

    def __init__(self) -> None:
        super().__init__()
        self._first = b""

    def build(self, model: bytes, batch: int, **options: Any) -> Any:
        self._first = self._first or model
        return _build(self._first, batch, **options)


class OtherKernels(_Building):
    """Runs policies on the runtime's own kernels, and says that XNNPACK does."""

    def build(self, model: bytes, batch: int, **options: Any) -> Any:
        made = _build(model, batch, **(options | {"delegated": False}))
        assert isinstance(made, interpreter.Interpreter)
        made.delegate = "XNNPACK"
        return made


class Misreporting(Honest):
    """Says of every hundredth step that it did the contrary of what it did."""

    def __init__(self) -> None:
        super().__init__()
        trajectory.Trajectory.flush = self._lying(_flush)  # type: ignore[method-assign]

    @staticmethod
    def _lying(flush: Callable[[trajectory.Trajectory], trajectory.Segments]) -> Any:
        def lie(record: trajectory.Trajectory) -> trajectory.Segments:
            record.action[: record.used : 100] *= -1
            return flush(record)

        return lie


LIARS = {
    "flipped": ("Flipped", "no policy here explains"),
    "older": ("Older", "it plays version"),
    "kernels": ("OtherKernels", ""),
    "reports": ("Misreporting", "no policy here explains"),
}
"""Classes by what the actor may be called, and what the learner says of it, where it always can."""
