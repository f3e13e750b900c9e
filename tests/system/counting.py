"""An environment whose steps are numbered, and which keeps its own books, apart from the actor's.

In `log`: `life-K` gets a byte for every step of the K-th process, `accepted-K` the numbers of the
steps whose message is in a file of the spool, `dropped-K` of those that the spool let go of without a receipt.
Observation and reward carry K and the number.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from broker.contract import codec, messages
from edge_actor.experience import spool, trajectory


class Counting(gymnasium.Env[Any, Any]):
    """Step n of life k gives the reward n and leads to the observation [k, n]; episodes last 23 steps.

    Args:
        log: Directory of this actor's books.
    """

    observation_space = gymnasium.spaces.Box(0.0, 2.0**24, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, log: str) -> None:
        self._log = Path(log)
        self.life = sum(1 for path in self._log.glob("life-*"))
        while True:
            try:
                self._file = self._open("life", os.O_EXCL)
                break
            except FileExistsError:  # a second machine of this name starts as well
                self.life += 1
        self._steps = 0
        self._watch()

    def _open(self, name: str, flags: int = 0) -> int:
        return os.open(self._log / f"{name}-{self.life}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags)

    def _watch(self) -> None:
        books, accepted = self._log, self._open("accepted")
        os.close(self._open("dropped"))
        add, drop = spool.Spool.add, spool.Spool._drop

        def add_and_tell(
            self: spool.Spool, segments: trajectory.Segments, assigned_epoch: int, epoch: int, version: int
        ) -> None:
            add(self, segments, assigned_epoch, epoch, version)
            if self._held[-1].record is not None:  # in a file: what waits in memory for room is not accepted yet
                os.write(accepted, segments.reward.astype(np.int32).tobytes())

        def drop_and_tell(self: spool.Spool) -> None:
            held = self._held[0]
            body = held.body if held.record is None else self._files.read(held.record)
            message = codec.decode(messages.Experience, body)
            with open(books / f"dropped-{int(message.observation.item(0))}", "ab") as file:  # maybe of an earlier life
                file.write(message.reward.astype(np.int32).tobytes())
            drop(self)

        spool.Spool.add = add_and_tell  # type: ignore[method-assign]
        spool.Spool._drop = drop_and_tell  # type: ignore[method-assign]

    def _observe(self) -> np.ndarray[Any, Any]:
        return np.array([self.life, self._steps], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        os.write(self._file, b".")
        return self._observe(), float(self._steps), self._steps % 23 == 0, False, {}


class Wide(Counting):
    """Counting, with observations of 4 KB."""

    observation_space = gymnasium.spaces.Box(0.0, 2.0**24, (1000,), np.float32)

    def _observe(self) -> np.ndarray[Any, Any]:
        return np.resize(super()._observe(), 1000)
