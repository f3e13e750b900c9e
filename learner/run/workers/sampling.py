"""Replay that lies in several workers, as the learner's updates see it: uniform over all transitions of all shards.

A batch is asked for one call ahead, so that it has come when the next call is due.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.experience import replay
from learner.run.workers import shards

_WAIT_S = 0.05


class _Part(NamedTuple):
    """A share of a batch that a worker was asked for."""

    shard: int
    n: int
    asked: shards.Asked | None


class ShardedReplay:
    """What is in the workers' replay.

    Args:
        workers: They.
        capacity: Transitions that they keep together.
    """

    def __init__(self, workers: shards.Shards, capacity: int) -> None:
        self._shards, self.capacity = workers, capacity
        self._next: tuple[tuple[int, int], list[_Part]] | None = None

    def __len__(self) -> int:
        """Returns the number of transitions that may be drawn now; those of a worker that begins may not."""
        return sum(self._sizes())

    @property
    def has_observations(self) -> bool:
        """Returns whether `observations` has any to give."""
        return len(self) > 0

    def sample(self, k: int, b: int, rng: np.random.Generator) -> replay.Batch:
        """Draws K minibatches of B transitions, with replacement, and asks for the next ones. Every array is new.

        Raises:
            IndexError: Replay is empty.
            ActorqError: A worker tells of an error, or none comes back.
        """
        if not len(self):
            raise IndexError("replay is empty")
        if self._next is not None and self._next[0] == (k, b):
            asked = self._next[1]
        else:
            asked = self._ask(k * b, rng)
        self._next = (k, b), self._ask(k * b, rng)
        parts: list[tuple[NDArray[Any], ...]] = []
        missing = 0
        for part in asked:
            found = self._answer(part)
            if found is None:
                missing += part.n
            else:
                parts.append(found)
        while missing:  # of a worker that died meanwhile: the others stand in
            self._shards.advance()
            n, missing = missing, 0
            if not len(self):
                self._shards.wait(_WAIT_S)
                missing = n
                continue
            for part in self._ask(n, rng):
                found = self._answer(part)
                if found is None:
                    missing += part.n
                else:
                    parts.append(found)
        order = rng.permutation(k * b)  # minibatches are alike
        names = [field.name for field in dataclasses.fields(replay.Batch)]
        whole = [np.concatenate(arrays)[order] for arrays in zip(*parts, strict=True)]
        shaped = {name: array.reshape(k, b, *array.shape[1:]) for name, array in zip(names, whole, strict=True)}
        return replay.Batch(**shaped)

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
