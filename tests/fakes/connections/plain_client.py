"""A plain paho client for tests: connects, subscribes and publishes, each awaited; keeps what arrives in a queue."""

from __future__ import annotations

import queue
import ssl
import threading
from types import TracebackType
from typing import Any, Self

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion


class PlainClient:
    """A client, connected when constructed; `reason` says with which answer.

    `received` holds (topic, payload, retained).
    """

    def __init__(
        self,
        port: int,
        client_id: str,
        username: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.received: queue.Queue[tuple[str, bytes, bool]] = queue.Queue()
        self.reason = ""
        self.disconnected = threading.Event()
        self._event = threading.Event()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=client_id, reconnect_on_failure=False)
        self._client.on_connect = self._connected
        self._client.on_disconnect = lambda *_: self.disconnected.set()
        self._client.on_subscribe = lambda *_: self._event.set()
        self._client.on_message = lambda c, u, m: self.received.put((m.topic, bytes(m.payload), m.retain))
        if username:
            self._client.username_pw_set(username, password)
        if tls is not None:
            self._client.tls_set_context(tls)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        # A broker that refuses a certificate says so after the handshake, by closing: no CONNACK, `reason` stays empty
        while not self._event.wait(0.05) and not self.disconnected.is_set():
            pass

    def _connected(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.reason = str(reason)
        self._event.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def subscribe(self, topic_filter: str) -> None:
        self._event.clear()
        self._client.subscribe(topic_filter, 1)
        assert self._event.wait(10), "no SUBACK"

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, wait: bool = True) -> None:
        info = self._client.publish(topic, payload, 1, retain)
        if wait:
            info.wait_for_publish(20)
            assert info.is_published(), "no PUBACK"

    def next(self, timeout_s: float = 20.0) -> tuple[str, bytes, bool]:
        return self.received.get(timeout=timeout_s)
