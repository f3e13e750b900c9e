"""Who takes what arrives: handlers by topic filter."""

from __future__ import annotations

from collections.abc import Callable

from broker.mqtt import paho_client

Handler = Callable[[str, bytes, bool], None]


class Handlers:
    """Of one connection, in the order in which they were added."""

    def __init__(self) -> None:
        self._all: list[tuple[str, Handler]] = []
        self.filters: list[str] = []
        """What to subscribe to."""

    def add(self, topic_filter: str, handler: Handler, *, subscribed: bool = True) -> None:
        """Hands what matches a filter to `handler(topic, payload, retained)`."""
        self._all.append((topic_filter, handler))
        if subscribed:
            self.filters.append(topic_filter)

    def handle(self, topic: str, payload: bytes, retained: bool) -> list[str]:
        """Hands a message to all whose filter it matches; a line for people about each that failed.

        paho would end its loop, and the fleet its connection, over one message.
        """
        failures = []
        for topic_filter, handler in self._all:
            if paho_client.matches(topic_filter, topic):
                try:
                    handler(topic, payload, retained)
                except Exception as error:
                    failures.append(f"handling a message on {topic} failed: {type(error).__name__}: {error}")
        return failures
