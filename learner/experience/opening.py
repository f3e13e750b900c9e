"""Messages of frames are opened on a thread of their own: MAC, decoding, and zstd, which lets go of Python's lock.

The loop goes on meanwhile, and takes them in again in the order in which they came. What is wrong with one is said
there, so that refusals are counted where all are; and nothing is committed that is not unpacked. Messages of numbers
do not come by here: to hand one over would take as long as to open it.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import NamedTuple

from learner.experience import validate

MOST = 16
"""Messages under way: each is 8 MB at most when it is unpacked (specs.MAX_EXPERIENCE_BYTES)."""


class Arrived(NamedTuple):
    """A message that is opened; `opened` returns it, or raises what is wrong with it."""

    actor_id: str
    topic: str
    payload: bytes
    opened: Callable[[], validate.Opened]


class Opener:
    """Opens sealed messages on a thread, and gives them back in their order.

    Args:
        validator: Opens them.
        wake: Called, from that thread, whenever one is open.

    Attributes:
        spent_s: Seconds that the thread has spent on opening.
    """

    def __init__(self, validator: validate.Validator, wake: Callable[[], None]) -> None:
        self._validator, self._wake = validator, wake
        self._worker = futures.ThreadPoolExecutor(1, "opening")
        self.spent_s = 0.0
        self._under_way: collections.deque[tuple[Arrived, futures.Future[validate.Opened]]] = collections.deque()

    @property
    def is_full(self) -> bool:
        """Returns whether one has to be taken before another may be added."""
        return len(self._under_way) >= MOST

    def add(self, actor_id: str, topic: str, payload: bytes) -> None:
        """Has a message opened; arguments as of `Validator.open`."""
        job = self._worker.submit(self._open, actor_id, topic, payload)
        self._under_way.append((Arrived(actor_id, topic, payload, job.result), job))
        job.add_done_callback(lambda job: self._wake())

    def pop(self) -> Arrived:
        """Returns the one at the front, when it is open; there must be one."""
        arrived, job = self._under_way.popleft()
        futures.wait([job])
        return arrived

    def opened(self, *, wait: bool) -> Iterator[Arrived]:
        """Yields those at the front that are open; with `wait`, all of them, when they are."""
        while self._under_way and (wait or self._under_way[0][1].done()):
            yield self.pop()

    def drop(self) -> None:
        """Forgets what is under way: it has no receipt, and comes again."""
        self._under_way.clear()

    def close(self) -> None:
        """Ends the thread; what is not open is dropped: it has no receipt, and comes again."""
        self._worker.shutdown(cancel_futures=True)

    def _open(self, actor_id: str, topic: str, payload: bytes) -> validate.Opened:
        began = time.perf_counter()
        try:
            return self._validator.open(actor_id, topic, payload)
        finally:
            self.spent_s += time.perf_counter() - began
