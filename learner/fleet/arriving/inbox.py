"""A bounded queue of what waits for the loop. Network threads fill it, and leave the rest in the socket.

Where the broker vouches for topics, no actor takes the place of others. Each topic of each actor has a bucket of
tokens: a message costs one, and more if it is long, before anybody looks into it; what finds none is left out, counted.
Tokens come back with time, and with every message of experience that was taken: so an honest actor, which has at most
64 messages on their way (edge_actor/experience/window.py), is never short of them however fast it is, and what is
refused is soon rare. What is left out has no receipt, so that an actor sends it again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from broker.program import bounded_queue

LIMIT = bounded_queue.Limit(20_000, 64_000_000)
"""A link reads packet by packet, so each may go beyond it by one; TCP then holds its broker back."""
BYTES_PER_TOKEN = 1 << 16
MOST_TOKENS = 200.0
"""The cost of the longest message."""
REFUSED_TOKENS = 20.0
"""The cost of a message that was refused: as much work, and a row in the ledger or a dead letter besides."""
FULL_BYTES = 16_000
"""An accepted message of so many bytes brings all its tokens back; a shorter one half of them, at least."""

Arrived = tuple[str, bytes, bool]


class Rate(NamedTuple):
    """The tokens that one bucket holds, and those that it gets a second."""

    burst: float
    per_s: float


RATES = {"experience": Rate(600.0, 200.0), "state": Rate(300.0, 150.0), "report": Rate(400.0, 20.0)}
"""Experience comes in small messages where policies or grants change often, 50 to 100 a second; a state comes with each
policy that acts; `bench` reports some hundred rows."""


class _Bucket:
    def __init__(self, leaf: str, now_s: float) -> None:
        self.leaf, self._rate = leaf, RATES[leaf]
        self._tokens, self._at_s = self._rate.burst, now_s

    def spend(self, tokens: float, now_s: float) -> bool:
        self._tokens = min(self._rate.burst, self._tokens + (now_s - self._at_s) * self._rate.per_s)
        self._at_s = now_s
        if self._tokens < tokens:
            return False
        self._tokens -= tokens
        return True

    def refund(self, tokens: float) -> None:
        self._tokens = max(-self._rate.burst, min(self._rate.burst, self._tokens + tokens))


class Inbox:
    """A queue of (topic, payload, retained), bounded by those who ask before they put.

    Args:
        bucket_of: Which bucket pays for a topic, and the last level of that topic; None for nobody. Without this
            function there are no buckets: topics are anybody's.
        full_steps: A message of so many steps brings all its tokens back.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        bucket_of: Callable[[str], tuple[str, str] | None] | None = None,
        full_steps: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = bounded_queue.BoundedQueue[Arrived](LIMIT)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._woken = False
        self._bucket_of, self._full_steps, self._clock = bucket_of, full_steps, clock
        self._buckets: dict[str, _Bucket] = {}
        self._left_out: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        """Returns how many messages wait."""
        return len(self._waiting)

    def has_room(self) -> bool:
        """Returns whether more should be read."""
        return not self._waiting.is_full

    def put(self, topic: str, payload: bytes, retained: bool) -> None:
        with self._lock:
            if self._bucket_of is not None and not self._pays(topic, len(payload), self._bucket_of):
                return
            self._waiting.put((topic, payload, retained), len(payload))
            self._changed.notify()

    def note_outcome(self, topic: str, size_bytes: int, steps: int | None) -> None:
        """Refunds the tokens of a message that brought so many steps; charges more for one that was refused (None)."""
        with self._lock:
            bucket = self._buckets.get(topic)
            if bucket is None:
                return
            if steps is None:
                bucket.refund(-REFUSED_TOKENS)
            else:
                share = 1.0 if size_bytes >= FULL_BYTES else max(0.5, min(1.0, steps / self._full_steps))
                bucket.refund(share * _cost(size_bytes))

    def pop_left_out(self) -> Counter[tuple[str, str]]:
        """Returns how many were left out since the last call, by bucket and the last level of the topic."""
        if not self._left_out:
            return Counter()
        with self._lock:
            found, self._left_out = self._left_out, Counter()
        return found

    def _pays(self, topic: str, size_bytes: int, bucket_of: Callable[[str], tuple[str, str] | None]) -> bool:
        now_s = self._clock()
        bucket = self._buckets.get(topic)
        if bucket is None:
            key = bucket_of(topic)
            if key is None:
                return True
            bucket = self._buckets.setdefault(key[0], _Bucket(key[1], now_s))
            topic = key[0]
        if bucket.spend(_cost(size_bytes), now_s):
            return True
        self._left_out[topic, bucket.leaf] += 1
        return False

    def wake(self) -> None:
        """Ends the wait of `get`, now or the next one: there is something else to do. From any thread."""
        with self._lock:
            self._woken = True
            self._changed.notify()

    def get(self, wait_s: float) -> Arrived | None:
        """Returns the oldest message; waits for one if there is none. None if none came, or if woken."""
        with self._lock:
            if not self._waiting and wait_s > 0:
                self._changed.wait_for(lambda: self._waiting or self._woken, wait_s)
                self._woken = False
            return self._waiting.get()


def _cost(size_bytes: int) -> float:
    return min(MOST_TOKENS, 1.0 + size_bytes / BYTES_PER_TOKEN)
