"""Replay that lies in several workers, as the learner's updates see it: uniform over all transitions of all shards.

Batches of several calls are asked for at once, for what a question of Ray takes is mostly the question, and while there
still are some of the time before: so they have come when they are due.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.experience import replay
from learner.run.workers import shards

DRAW_S = 0.25
"""Seconds of updates for which batches are asked for at once, if these are small."""
DRAW_BYTES = 2_000_000
"""Bytes of batches that are asked for at once, unless those of one call are more."""
STALE_S = 0.5
"""Seconds after which what was asked for is forgotten, if it is of more than one call: updates had to wait."""
_WAIT_S = 0.05


class _Part(NamedTuple):
    """A share of a draw that a worker was asked for."""

    shard: int
    n: int
    asked: shards.Asked | None


class _Draw(NamedTuple):
    """Batches of so many calls that workers were asked for."""

    at_s: float
    calls: int
    parts: list[_Part]

    def is_stale(self, now_s: float) -> bool:
        return self.calls > 1 and now_s - self.at_s > STALE_S


class ShardedReplay:
    """What is in the workers' replay.

    Args:
        workers: They.
        capacity: Transitions that they keep together.
    """

    def __init__(self, workers: shards.Shards, capacity: int) -> None:
        self._shards, self.capacity = workers, capacity
        self._shape = (0, 0)  # of a call
        self._call_bytes = 0
        self._ready: deque[replay.Batch] = deque()
        self._taken: _Draw | None = None  # what is ready
        self._next: _Draw | None = None
        self._began = 0.0, 0  # when the newest draw was asked for, and calls that were served since
        self._put_aside = 0

    def __len__(self) -> int:
        """Returns the number of transitions that may be drawn now; those of a worker that begins may not."""
        return sum(self._sizes())

    @property
    def has_observations(self) -> bool:
        """Returns whether `observations` has any to give."""
        return len(self) > 0

    def sample(self, k: int, b: int, rng: np.random.Generator) -> replay.Batch:
        """Draws K minibatches of B transitions, with replacement. No two batches share an array.

        They were drawn up to `STALE_S` before, or one call; and after the newest experience was put aside.

        Raises:
            IndexError: Replay is empty.
            ActorqError: A worker tells of an error, or none comes back.
        """
        if not len(self):
            raise IndexError("replay is empty")
        self._forget_old((k, b), time.monotonic())
        if not self._ready:
            self._taken, self._next = self._next or self._draw(rng), None
            self._ready.extend(self._batches(self._taken, rng))
        assert self._taken is not None
        batch = self._ready.popleft()
        self._began = self._began[0], self._began[1] + 1
        if self._next is None and len(self._ready) <= self._taken.calls // 2:
            self._next = self._draw(rng)
        return batch

    def _forget_old(self, shape: tuple[int, int], now_s: float) -> None:
        if shape != self._shape or self._shards.put_aside != self._put_aside:
            self._shape, self._put_aside = shape, self._shards.put_aside
            self._ready.clear()
            self._next = None
        if self._taken is not None and self._taken.is_stale(now_s):
            self._ready.clear()
        if self._next is not None and self._next.is_stale(now_s):
            self._next = None

    def _draw(self, rng: np.random.Generator) -> _Draw:
        """Asks for the batches of as many calls as are served in `DRAW_S`, by how many were since the last time."""
        now, (began, served) = time.monotonic(), self._began
        calls = int(served * DRAW_S / max(now - began, 1e-3))
        calls = max(1, min(calls, DRAW_BYTES // max(self._call_bytes, 1)))
        self._began = now, 0
        return _Draw(now, calls, self._ask(calls * self._shape[0] * self._shape[1], rng))

    def _batches(self, draw: _Draw, rng: np.random.Generator) -> Iterator[replay.Batch]:
        k, b = self._shape
        n = draw.calls * k * b
        order = rng.permutation(n)  # minibatches are alike
        whole: list[NDArray[Any]] = []
        at = 0
        for found in self._found(draw, rng):
            whole = whole or [np.empty((n, *array.shape[1:]), array.dtype) for array in found]
            places = order[at : at + len(found[0])]
            at += len(places)
            for array, values in zip(whole, found, strict=True):
                array[places] = values
        names = [field.name for field in dataclasses.fields(replay.Batch)]
        shaped = [array.reshape(draw.calls, k, b, *array.shape[1:]) for array in whole]
        self._call_bytes = sum(array[0].nbytes for array in shaped)
        for call in range(draw.calls):
            yield replay.Batch(**{name: array[call] for name, array in zip(names, shaped, strict=True)})

    def _found(self, draw: _Draw, rng: np.random.Generator) -> Iterator[tuple[NDArray[Any], ...]]:
        """Yields what workers drew; others stand in for one that died meanwhile."""
        missing, parts = draw.calls * self._shape[0] * self._shape[1], draw.parts
        while True:
            for part in parts:
                if (found := self._answer(part)) is not None:
                    missing -= part.n
                    yield found
            if not missing:
                return
            self._shards.advance()
            if not (parts := self._ask(missing, rng)):
                self._shards.wait(_WAIT_S)

    def update_priorities(self, ids: NDArray[np.int64], td_error: NDArray[np.float32]) -> None:
        """Leaves all as likely as they are: shards are sampled uniformly."""

    def observations(self, n: int, rng: np.random.Generator) -> NDArray[Any]:
        """Returns up to n different observations [n, *shape] of those kept, in their stored dtype.

        Raises:
            ActorqError: A worker tells of an error, or none comes back.
        """
        while True:
            asked = [
                (part, self._shards.ask_later(part.shard, "observations", part.n, _seed(rng)))
                for part in self._shares(n, rng)
            ]
            found = [self._shards.answer_of(part.shard, one) for part, one in asked if one is not None]
            if given := [one for one in found if one is not None and len(one)]:
                return np.concatenate(given)
            self._shards.advance()
            self._shards.wait(_WAIT_S)

    def _sizes(self) -> list[int]:
        return [one.transitions if one.is_live else 0 for one in self._shards.places]

    def _shares(self, n: int, rng: np.random.Generator) -> list[_Part]:
        """Shares n draws among the shards by what they hold: together that is uniform."""
        sizes = np.array(self._sizes(), np.float64)
        if not sizes.sum():
            return []
        shares = rng.multinomial(n, sizes / sizes.sum())
        return [_Part(shard, share, None) for shard, share in enumerate(shares.tolist()) if share]

    def _ask(self, n: int, rng: np.random.Generator) -> list[_Part]:
        return [
            part._replace(asked=self._shards.ask_later(part.shard, "sample", part.n, _seed(rng)))
            for part in self._shares(n, rng)
        ]

    def _answer(self, part: _Part) -> tuple[NDArray[Any], ...] | None:
        if part.asked is None or (found := self._shards.answer_of(part.shard, part.asked)) is None:
            return None
        *fields, ids = found  # in the order of replay.Batch, whose last one are the ids
        return (*fields, shards.number(part.shard, part.asked.life, 0) | ids)


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 62))
