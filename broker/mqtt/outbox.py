"""Messages that one side sends to its broker: the retained messages that it owes it, and a window of what is in flight.

Of a retained message only the newest counts. So one that cannot go out yet waits by its topic alone, and is replaced
there: a broker that stands still costs its clients no memory.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from broker.mqtt import paho_client

IN_FLIGHT_LIMIT = 20  # more is slower with paho, and delays what is urgent

Payload = bytes | Callable[[], bytes]
"""Bytes, or a function that makes them anew whenever they are sent."""


def made(payload: Payload) -> bytes:
    """Returns the bytes to send now."""
    return payload() if callable(payload) else payload


class Outbox:
    """Messages to one broker. The caller holds the lock.

    Args:
        lock: The link's.
        last: The topic that is sent behind all others, when all are sent again.

    Attributes:
        in_flight: Numbers of messages that were sent and not acknowledged.
        bytes_sent: Payload bytes of all messages.
        is_muted: Nothing is retained any longer.
    """

    def __init__(self, lock: threading.RLock, last: str) -> None:
        self._drained = threading.Condition(lock)
        self._client: paho_client.Client | None = None
        self._last = last
        self._retained: dict[str, Payload] = {}
        self._overdue: dict[str, None] = {}  # topics, in order
        self.in_flight: set[int] = set()
        self.bytes_sent = 0
        self.is_muted = False

    @property
    def is_full(self) -> bool:
        """True if as much is in flight as may be."""
        return len(self.in_flight) >= IN_FLIGHT_LIMIT

    @property
    def is_overdue(self) -> bool:
        """True if something waits until less is in flight."""
        return bool(self._overdue)

    def open(self, client: paho_client.Client) -> None:
        """Sends everything that is retained by a new connection, which stays in use."""
        self._client = client
        self._make_all_overdue()
        self._send_overdue(math.inf)

    def close(self) -> None:
        """Takes note that the connection is gone, with everything that was in flight."""
        self._client = None
        self.in_flight.clear()
        self._overdue.clear()
        self._drained.notify_all()

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> bool:
        """Sends one message; returns false where it was not sent, since there is no connection or it is just lost."""
        sent = self._queue(topic, payload, retain=retain)
        if sent is None or self._client is None or self._client.flush():
            return False
        self._count(sent, payload)
        return True

    def retain(self, topic: str, payload: Payload) -> None:
        """Keeps a message for its topic; `send_overdue` sends it."""
        self._retained[topic] = payload
        self._overdue[topic] = None

    def repeat(self) -> None:
        """Sends everything that is retained once more."""
        self._make_all_overdue()
        self.send_overdue()

    def send_overdue(self) -> None:
        """Sends what is overdue, as far as the window allows."""
        if self._overdue and self._client is not None:
            self._send_overdue(IN_FLIGHT_LIMIT)

    def on_publish(self, client: Any, userdata: Any, mid: int, reason: Any, properties: Any) -> None:
        """Takes note of an acknowledgement, and sends what it makes room for; paho's callback."""
        self.in_flight.discard(mid)
        self.send_overdue()
        self._drained.notify_all()

    def drain(self, deadline: float) -> None:
        """Waits until everything is acknowledged, the connection is gone, or a monotonic time has come."""
        while (self.in_flight or self._overdue) and self._client is not None:
            if (left_s := deadline - time.monotonic()) <= 0:
                return
            self._drained.wait(left_s)

    def _make_all_overdue(self) -> None:
        self._overdue = dict.fromkeys(sorted(self._retained, key=lambda topic: topic == self._last))

    def _send_overdue(self, limit: float) -> None:
        """Queues them one by one and writes them together: each write lets go of Python's lock."""
        while self._overdue and len(self.in_flight) < limit:
            topic = next(iter(self._overdue))
            del self._overdue[topic]
            payload = made(self._retained[topic])
            if (sent := self._queue(topic, payload, retain=True)) is not None:
                self._count(sent, payload)
        if self._client is not None:
            self._client.flush()

    def _queue(self, topic: str, payload: bytes, *, retain: bool) -> int | None:
        """Returns the number of the message; None if it cannot be sent."""
        if self._client is None or (retain and self.is_muted):
            return None
        info = self._client.publish(topic, payload, qos=1, retain=retain)
        return None if info.rc else info.mid

    def _count(self, mid: int, payload: bytes) -> None:
        self.in_flight.add(mid)
        self.bytes_sent += len(payload)
