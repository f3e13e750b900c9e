"""What one side owes its broker: the retained messages, and which of them the broker lacks.

Of a retained message only the newest counts. So one that cannot go out yet waits by its topic alone, and is replaced
there: a broker that stands still costs its clients no memory.
"""

from __future__ import annotations

from collections.abc import Callable

Payload = bytes | Callable[[], bytes]
"""Bytes, or a function that makes them anew whenever they are sent."""


def made(payload: Payload) -> bytes:
    """The bytes to send now."""
    return payload() if callable(payload) else payload


class Outbox:
    """Not thread-safe: the caller holds a lock.

    Args:
        last: The topic that is sent behind all others, when all are sent again.

    Attributes:
        in_flight: Numbers of messages that were sent and not acknowledged.
    """

    def __init__(self, last: str) -> None:
        self._last = last
        self._retained: dict[str, Payload] = {}
        self._overdue: dict[str, None] = {}  # topics, in order
        self.in_flight: set[int] = set()

    @property
    def pending(self) -> bool:
        """The broker has not acknowledged everything."""
        return bool(self.in_flight or self._overdue)

    @property
    def is_overdue(self) -> bool:
        """Something waits until less is in flight."""
        return bool(self._overdue)

    def retain(self, topic: str, payload: Payload) -> None:
        """Keeps a message for its topic; it is overdue until it is taken."""
        self._retained[topic] = payload
        self._overdue[topic] = None

    def repeat(self) -> None:
        """Makes all of them overdue."""
        self._overdue = dict.fromkeys(sorted(self._retained, key=lambda topic: topic == self._last))

    def take(self) -> tuple[str, bytes] | None:
        """The overdue message that has waited longest."""
        if not self._overdue:
            return None
        topic = next(iter(self._overdue))
        del self._overdue[topic]
        return topic, made(self._retained[topic])

    def lose(self) -> None:
        """The connection is gone, with all that was in flight."""
        self.in_flight.clear()
        self._overdue.clear()
