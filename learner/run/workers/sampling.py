"""Replay that lies in several workers, as the learner's updates see it: uniform over all transitions of all shards.

What several calls need is asked for at once, for what a question of Ray takes is mostly the question, and while there
still is some of the time before: so it has come when it is due.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from learner.experience.buffers import replay
from learner.run.workers import shards

DRAW_S = 0.5
"""Seconds of updates, or of policies, for which is asked at once, if that is small."""
DRAW_BYTES = 2_000_000
"""Bytes that are asked for at once, unless those of one call are more."""
STALE_S = 1.0
"""Seconds after which what was asked for is forgotten, if it is of more than one call: updates had to wait."""
_WAIT_S = 0.05
_T = TypeVar("_T")


class _Part(NamedTuple):
    """A share of a draw that a worker was asked for."""

    shard: int
    n: int
    asked: shards.Asked | None


class _Draw(NamedTuple):
    """What workers were asked for, for so many calls."""

    at_s: float
    calls: int
    parts: list[_Part]

    def is_stale(self, now_s: float) -> bool:
        return self.calls > 1 and now_s - self.at_s > STALE_S


class _Stock(Generic[_T]):
    """What calls take, one after the other, and is asked for ahead.

    Args:
        size: Returns the bytes of what a call takes.
        one_ahead: Ask ahead also where that is for one call, which may then be old when it comes.
    """

    def __init__(self, size: Callable[[_T], int], *, one_ahead: bool) -> None:
        self._size, self._one_ahead = size, one_ahead
        self._kind: object = None
        self._ready: deque[_T] = deque()
        self._taken: _Draw | None = None  # what is ready
        self._next: _Draw | None = None
        self._bytes = 0  # of a call
        self._taken_at, self._gap_s = -math.inf, math.inf  # of the newest call, and since the one before

    def take(self, kind: object, ask: Callable[[int], list[_Part]], unpack: Callable[[_Draw], Sequence[_T]]) -> _T:
        """Returns what the next call takes.

        Args:
            kind: Whatever was asked for when it was another one is forgotten.
            ask: Asks workers for what so many calls take.
            unpack: Waits for it, and returns what each call takes.
        """
        now = time.monotonic()
        self._gap_s, self._taken_at = now - self._taken_at, now
        if kind != self._kind:
            self._kind, self._next = kind, None
            self._ready.clear()
        if self._taken is not None and self._taken.is_stale(now):
            self._ready.clear()
        if self._next is not None and self._next.is_stale(now):
            self._next = None
        if not self._ready:
            self._taken, self._next = self._next or self._draw(ask), None
            self._ready.extend(unpack(self._taken))
            self._bytes = self._size(self._ready[0])
        assert self._taken is not None
        one = self._ready.popleft()
        if self._next is None and len(self._ready) <= self._taken.calls // 2 and (self._one_ahead or self._calls > 1):
            self._next = self._draw(ask)
        return one

    @property
    def _calls(self) -> int:
        """Returns how many are made in `DRAW_S`, or take `DRAW_BYTES`; one at least."""
        return max(1, min(int(DRAW_S / max(self._gap_s, 1e-3)), DRAW_BYTES // max(self._bytes, 1)))

    def _draw(self, ask: Callable[[int], list[_Part]]) -> _Draw:
        return _Draw(time.monotonic(), self._calls, ask(self._calls))


class ShardedReplay:
    """What is in the workers' replay.

    Args:
        workers: They.
        capacity: Transitions that they keep together.
    """

    def __init__(self, workers: shards.Shards, capacity: int) -> None:
        self._shards, self.capacity = workers, capacity
        self._batches = _Stock(_batch_bytes, one_ahead=True)
        self._observations = _Stock(_bytes, one_ahead=False)

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
        return self._batches.take(
            (k, b, self._shards.put_aside),
            lambda calls: self._ask("sample", calls * k * b, rng),
            functools.partial(self._unpack_batches, k, b, rng),
        )

    def observations(self, n: int, rng: np.random.Generator) -> NDArray[Any]:
        """Returns up to n different observations [n, *shape] of those kept, in their stored dtype.

        They were drawn up to `STALE_S` before, and after the newest experience was put aside.

        Raises:
            ActorqError: A worker tells of an error, or none comes back.
        """
        return self._observations.take(
            (n, self._shards.put_aside),
            lambda calls: self._ask("observations", calls * n, rng),
            functools.partial(self._unpack_observations, n, rng),
        )

    def update_priorities(self, ids: NDArray[np.int64], td_error: NDArray[np.float32]) -> None:
        """Leaves all as likely as they are: shards are sampled uniformly."""

    def _unpack_batches(self, k: int, b: int, rng: np.random.Generator, draw: _Draw) -> list[replay.Batch]:
        n = draw.calls * k * b
        order = rng.permutation(n)  # minibatches are alike
        whole: list[NDArray[Any]] = []
        at = 0
        for found in self._found(draw.parts, n, rng):
            whole = whole or [np.empty((n, *array.shape[1:]), array.dtype) for array in found]
            places = order[at : at + len(found[0])]
            at += len(places)
            for array, values in zip(whole, found, strict=True):
                array[places] = values
        names = [field.name for field in dataclasses.fields(replay.Batch)]
        shaped = [array.reshape(draw.calls, k, b, *array.shape[1:]) for array in whole]
        return [
            replay.Batch(**{name: array[call] for name, array in zip(names, shaped, strict=True)})
            for call in range(draw.calls)
        ]

    def _found(self, parts: list[_Part], missing: int, rng: np.random.Generator) -> Iterator[tuple[NDArray[Any], ...]]:
        """Yields what workers drew; others stand in for one that died meanwhile."""
        while True:
            for part in parts:
                if (found := self._answer(part)) is not None:
                    missing -= part.n
                    yield found
            if not missing:
                return
            self._shards.advance()
            if not (parts := self._ask("sample", missing, rng)):
                self._shards.wait(_WAIT_S)

    def _answer(self, part: _Part) -> tuple[NDArray[Any], ...] | None:
        if part.asked is None or (found := self._shards.answer_of(part.shard, part.asked)) is None:
            return None
        *fields, ids = found  # in the order of replay.Batch, whose last one are the ids
        return (*fields, shards.number(part.shard, part.asked.life, 0) | ids)

    def _unpack_observations(self, n: int, rng: np.random.Generator, draw: _Draw) -> list[NDArray[Any]]:
        parts = draw.parts
        while not (found := [one for one in map(self._seen, parts) if one is not None and len(one)]):
            self._shards.advance()
            self._shards.wait(_WAIT_S)
            parts = self._ask("observations", draw.calls * n, rng)
        seen = np.concatenate(found)
        if len(seen) <= n:
            return [seen]
        seen = seen[rng.permutation(len(seen))]
        return [seen[at : at + n] for at in range(0, len(seen) - n + 1, n)]

    def _seen(self, part: _Part) -> NDArray[Any] | None:
        return None if part.asked is None else self._shards.answer_of(part.shard, part.asked)

    def _ask(self, what: str, n: int, rng: np.random.Generator) -> list[_Part]:
        """Shares a question for n among the shards by what they hold: together that is uniform."""
        sizes = np.array(self._sizes(), np.float64)
        if not sizes.sum():
            return []
        shares = rng.multinomial(n, sizes / sizes.sum()).tolist()
        return [
            _Part(shard, share, self._shards.ask_later(shard, what, share, int(rng.integers(1 << 62))))
            for shard, share in enumerate(shares)
            if share
        ]

    def _sizes(self) -> list[int]:
        return [one.transitions if one.is_live else 0 for one in self._shards.places]


def _batch_bytes(batch: replay.Batch) -> int:
    return sum(getattr(batch, field.name).nbytes for field in dataclasses.fields(batch))


def _bytes(array: NDArray[Any]) -> int:
    return int(array.nbytes)
