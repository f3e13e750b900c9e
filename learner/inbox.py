"""What came in and waits for the loop. Network threads fill it until it is full, and leave the rest in the socket."""

from __future__ import annotations

import collections
import threading

LIMIT_BYTES = 64_000_000
"""Of payloads. A link reads packet by packet, so each may go beyond it by one; TCP then holds its broker back."""
LIMIT_MESSAGES = 20_000

Arrived = tuple[str, bytes, bool]


class Inbox:
    """A queue of (topic, payload, retained), bounded by those who ask before they put."""

    def __init__(self) -> None:
        self._queue: collections.deque[Arrived] = collections.deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._woken = False
        self.size_bytes = 0

    def has_room(self) -> bool:
        """Whether more should be read."""
        return self.size_bytes < LIMIT_BYTES and len(self._queue) < LIMIT_MESSAGES

    def put(self, topic: str, payload: bytes, retained: bool) -> None:
        with self._lock:
            self._queue.append((topic, payload, retained))
            self.size_bytes += len(payload)
            self._changed.notify()

    def wake(self) -> None:
        """Ends the wait of `get`, now or the next one: there is something else to do. From any thread."""
        with self._lock:
            self._woken = True
            self._changed.notify()

    def get(self, wait_s: float) -> Arrived | None:
        """The oldest message; waits for one if there is none, and returns None if none came, or if woken."""
        with self._lock:
            if not self._queue and wait_s > 0:
                self._changed.wait_for(lambda: self._queue or self._woken, wait_s)
                self._woken = False
            if not self._queue:
                return None
            arrived = self._queue.popleft()
            self.size_bytes -= len(arrived[1])
            return arrived
