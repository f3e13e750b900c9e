"""Subscriptions of one side at its broker, and the handlers of what arrives."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

from broker.mqtt import paho_client

_log = logging.getLogger(__name__)

Handler = Callable[[str, bytes, bool], None]
"""Takes topic, payload, and whether the message was retained; called on the network thread."""


class Subscriptions:
    """Topic filters with their handlers, in the order in which they were added. The caller holds the link's lock.

    Args:
        qos: Of all subscriptions.

    Attributes:
        bytes_received: Payload bytes of all messages.
        failures: Calls of handlers that raised an exception.
    """

    def __init__(self, qos: int) -> None:
        self._qos = qos
        self._client: paho_client.Client | None = None
        self._handlers: list[tuple[str, Handler]] = []
        self._filters: list[str] = []
        self._followed: dict[str, tuple[str, ...]] = {}
        self.bytes_received = self.failures = 0

    def add(self, topic_filter: str, handler: Handler, *, is_subscribed: bool = True) -> None:
        """Hands what matches a filter to a handler; subscribes to it, if told to."""
        self._handlers.append((topic_filter, handler))
        if is_subscribed:
            self._filters.append(topic_filter)
            if self._client is not None:
                self._client.subscribe(topic_filter, qos=self._qos)
                self._client.flush()

    def remove(self, topic_filter: str) -> None:
        """Hands what matches a filter that was added to nobody any more, and unsubscribes from it."""
        # Another list, since a handler may be called on another thread meanwhile
        self._handlers = [one for one in self._handlers if one[0] != topic_filter]
        if topic_filter in self._filters:
            self._filters.remove(topic_filter)
            if self._client is not None:
                self._client.unsubscribe([topic_filter])
                self._client.flush()

    def follow(self, topics: Iterable[str], group: str = "") -> None:
        """Subscribes to these topics, in their order, and no longer to those named before by this group alone."""
        before, named = self._followed.get(group, ()), tuple(topics)
        self._followed[group] = named
        if self._client is None:
            return
        known, wanted = frozenset(before), frozenset(itertools.chain.from_iterable(self._followed.values()))
        if new := [(topic, self._qos) for topic in named if topic not in known]:
            self._client.subscribe(new)
        if gone := [topic for topic in before if topic not in wanted]:
            self._client.unsubscribe(gone)
        self._client.flush()

    def open(self, client: paho_client.Client) -> int | None:
        """Subscribes to everything by a new connection.

        Returns:
            The number of the packet that the broker will acknowledge; None if there is nothing to subscribe to.
        """
        self._client = client
        followed = itertools.chain.from_iterable(self._followed.values())
        wanted = [(topic_filter, self._qos) for topic_filter in (*self._filters, *followed)]
        return client.subscribe(wanted)[1] if wanted else None

    def close(self) -> None:
        """Takes note that the connection is gone."""
        self._client = None

    def on_message(self, client: Any, userdata: Any, message: Any) -> None:
        """Hands a message to every handler whose filter it matches; paho's callback.

        What a handler raises is logged: paho would end its loop, and the fleet its connection, over one message.
        """
        topic, payload = message.topic, bytes(message.payload)
        self.bytes_received += len(payload)
        for topic_filter, handler in self._handlers:
            if paho_client.matches(topic_filter, topic):
                try:
                    handler(topic, payload, message.retain)
                except Exception as error:
                    self.failures += 1
                    _log.warning("handling a message on %s failed: %s: %s", topic, type(error).__name__, error)
