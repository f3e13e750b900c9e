"""What experience is kept in behind the ledger, whether an algorithm learns from it many times or once."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from broker.contract import messages

IntArray = NDArray[np.int64]


class Observed(Protocol):
    """Has observations, for ranges and for the gate."""

    @property
    def has_observations(self) -> bool:
        """Returns whether `observations` has any to give: not if all that was kept is held back."""

    def observations(self, n: int, rng: np.random.Generator) -> NDArray[Any]:
        """Returns up to n different observations [n, *shape] of those kept, uniformly, in their stored dtype."""


class Memory(Observed, Protocol):
    """Keeps the newest steps that the ledger has; it numbers them from 0, in the order in which they come."""

    @property
    def capacity(self) -> int:
        """The most steps that are kept."""

    @property
    def inserted(self) -> int:
        """Steps ever inserted: the id of the next one."""

    @property
    def oldest(self) -> int:
        """The id of the oldest step that is kept; the ledger need not keep messages of older ones."""

    def __len__(self) -> int:
        """Returns the number of steps that may yet be learned from."""

    def fits(self, steps: int, segments: int) -> bool:
        """Returns whether a message of so many steps in so many segments can be inserted."""

    def insert(self, *arrived: messages.Experience) -> int:
        """Adds messages; returns the number of their steps."""

    def drop(self, first: int, end: int) -> None:
        """Never gives out steps `first` to `end` - 1 again, which one message brought, nor its observations."""


class Batch(Protocol):
    """Experience for one call of updates."""

    @property
    def ids(self) -> IntArray:
        """Those of its N steps, in any shape."""

    @property
    def numbers(self) -> tuple[NDArray[Any], ...]:
        """All that training computes with, each with a first dimension or dimensions for the N steps."""
