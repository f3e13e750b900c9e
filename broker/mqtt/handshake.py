"""The steps between a TCP connection and its use: CONNECT is accepted, and every subscription stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from broker.mqtt import paho_client, subscriptions

_NOBODY_S_TOPIC = "actorq/nothing"


class Handshake:
    """Subscribes once the broker has accepted CONNECT, and calls `on_done` when it has acknowledged that.

    Args:
        client: The client of one connection; some of its callbacks are set.
        wanted: What to subscribe to.
        listens_first: It is done only when all has come that is retained at the topics subscribed to.
        on_done: Called once with the client, on the network thread.

    Attributes:
        failure: Why the broker refused; empty if it did not.
    """

    def __init__(
        self,
        client: paho_client.Client,
        wanted: subscriptions.Subscriptions,
        on_done: Callable[[paho_client.Client], None],
        *,
        listens_first: bool,
    ) -> None:
        self._wanted, self._on_done = wanted, on_done  # and not the client, lest only the collector frees it
        self._listens_first = listens_first
        self._awaited: int | None = None
        self._is_done = False
        self.failure = ""
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_unsubscribe = self._on_unsubscribe

    def _on_connect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.is_failure:
            self._refuse(client, f"refused: {reason}")
            return
        self._awaited = self._wanted.open(client)
        if self._awaited is None:
            self._finish(client)

    def _on_subscribe(self, client: Any, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        if any(reason.is_failure for reason in reasons):
            self._refuse(client, "a subscription was refused")
        elif mid == self._awaited and self._listens_first:
            client.unsubscribe(_NOBODY_S_TOPIC)  # a broker answers in order: all that is retained comes before
        elif mid == self._awaited:
            self._finish(client)

    def _on_unsubscribe(self, client: Any, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        self._finish(client)

    def _finish(self, client: paho_client.Client) -> None:
        if not self._is_done:
            self._is_done = True
            self._on_done(client)

    def _refuse(self, client: paho_client.Client, why: str) -> None:
        self.failure = why
        client.disconnect()
