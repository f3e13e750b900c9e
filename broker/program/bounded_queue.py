"""A queue for another thread, bounded in number and in bytes; who owns it decides what happens beyond that.

Some leave the rest in the socket, some drop what waits longest and count it. The owner's lock guards the queue: he has
more than the queue to keep in step.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Limit(NamedTuple):
    """The most that may wait: so many items, of so many bytes together."""

    items: int
    size_bytes: int


class BoundedQueue(Generic[T]):
    """Items and the bytes of each, in the order in which they came.

    Args:
        limit: When it is full.

    Attributes:
        size_bytes: The bytes of all that wait.
    """

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._waiting: OrderedDict[object, tuple[T, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Returns whether as much waits as may."""
        return len(self._waiting) >= self._limit.items or self.size_bytes >= self._limit.size_bytes

    @property
    def is_over(self) -> bool:
        """Returns whether more waits than may."""
        return len(self._waiting) > self._limit.items or self.size_bytes > self._limit.size_bytes

    def put(self, item: T, size_bytes: int, subject: object = None) -> None:
        """Appends an item, full or not. It replaces what waits on the same subject, unless that is None."""
        if subject is not None:
            self.size_bytes -= self._waiting.pop(subject, (None, 0))[1]
        self._waiting[object() if subject is None else subject] = item, size_bytes
        self.size_bytes += size_bytes

    def get(self) -> T | None:
        """Returns the item that waits longest, and takes it out; None if there is none."""
        if not self._waiting:
            return None
        item, size_bytes = self._waiting.popitem(last=False)[1]
        self.size_bytes -= size_bytes
        return item
