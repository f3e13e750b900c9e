"""Messages that wait to be opened: handled in the order they came, one at a time, small ones where they came.

A thread of its own handles the large ones: opening and checking them (digest, unpacking, adding) leaves Python's lock
to the acting loop. What takes less than the handing over is done where it came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from broker.contract import messages
from broker.program import bounded_queue

LIMIT = bounded_queue.Limit(32, 2 * messages.MAX_POLICY_BYTES)
"""Beyond it the oldest is dropped: nothing of what waits is known to be genuine, and a Pi has 512 MB."""
AT_ONCE_BYTES = 400_000
"""Message and policy together: opened, put together and checked within a millisecond. A thread takes several to take
over."""

Handler = Callable[[str, bytes, bool], None]


class _Arrival(NamedTuple):
    """A message that came at a monotonic time."""

    handle: Handler
    topic: str
    payload: bytes
    retained: bool
    at_s: float


class Arrivals:
    """A queue of messages, bounded in number and bytes, and the thread that works through it.

    Args:
        more_bytes: Returns the bytes that are read along with a message.
        on_fault: Called with an exception that handling a message raised: a bug, which ends nothing.
        on_drop: Called for each message that was dropped because too much waits.
        on_idle: Called on the thread when nothing waits any more, and after `wake`.

    Attributes:
        came_s: Monotonic time at which the message came that is handled, or was last.
        waiting: Guarded by a lock of this object's.
    """

    def __init__(
        self,
        more_bytes: Callable[[], int],
        on_fault: Callable[[Exception], None],
        on_drop: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._more_bytes, self._on_fault, self._on_drop, self._on_idle = more_bytes, on_fault, on_drop, on_idle
        self.waiting = bounded_queue.BoundedQueue[_Arrival](LIMIT)
        self._lock = threading.Lock()
        self._handling = threading.Lock()
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="policy-checker", daemon=True)
        self.came_s = time.monotonic()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, after what it is handling."""
        self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def wake(self) -> None:
        """Has `on_idle` called soon."""
        self._work.set()

    def queued(self, handle: Handler) -> Handler:
        """Returns a handler for `Link.subscribe` that has `handle` called in the order of arrival."""

        def put(topic: str, payload: bytes, retained: bool) -> None:
            arrival = _Arrival(handle, topic, payload, retained, time.monotonic())
            is_small = len(payload) + self._more_bytes() <= AT_ONCE_BYTES
            if is_small and self._handling.acquire(blocking=False):
                try:
                    if not self.waiting:
                        self._handle(arrival)
                        return
                finally:
                    self._handling.release()
            with self._lock:
                self.waiting.put(arrival, len(payload))
                while self.waiting.is_over:
                    self.waiting.get()
                    self._on_drop()
            self._work.set()

        return put

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            while not self._stopping:
                with self._handling:
                    arrival = self._next()
                    if arrival is None:
                        break
                    self._handle(arrival)
            if self._stopping:
                return
            self._on_idle()

    def _next(self) -> _Arrival | None:
        with self._lock:
            return self.waiting.get()

    def _handle(self, arrival: _Arrival) -> None:
        self.came_s = arrival.at_s
        try:
            arrival.handle(arrival.topic, arrival.payload, arrival.retained)
        except Exception as error:  # a bug: without this thread the actor would keep its policy for ever
            self._on_fault(error)
