"""A paho client for questions to a broker: each step awaited, with will and keep-alive, and ways to die."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from broker.contract import address
from broker.fleet import identity

ANSWER_S = 20.0


class Unmet(Exception):
    """The broker does not do what the contract needs; says what it did."""


@dataclass
class Site:
    """A broker, and with which keys it is asked.

    Attributes:
        where: Its address.
        fleet: Of the topics; its directory has the learner's keys.
        actors: Bundles of two enrolled actors, for a broker that asks who is there; none for one that lets in all.
    """

    where: address.Address
    fleet: identity.Fleet
    actors: list[identity.Bundle] = field(default_factory=list)

    @contextlib.contextmanager
    def client(self, name: str, *, actor: int | None = None, **options: Any) -> Iterator[Client]:
        """Connects as the learner, or as one of the actors; disconnects at the end."""
        made = Client(self, name, actor, **options)
        try:
            yield made
        finally:
            made.close()


class Client:
    """A connection, made when it is constructed.

    Args:
        site: The broker.
        name: MQTT client id.
        actor: Which of the site's actors it is; None for the learner.
        will: Topic and payload, retained at QoS 1.
        keepalive_s: Of the connection.

    Attributes:
        received: Topic, payload and retain flag of what arrives.
    """

    def __init__(
        self,
        site: Site,
        name: str,
        actor: int | None = None,
        will: tuple[str, bytes] | None = None,
        keepalive_s: int = 60,
    ) -> None:
        self.received: queue.Queue[tuple[str, bytes, bool]] = queue.Queue()
        self.may_receive = threading.Event()
        self.may_receive.set()
        self._answers: queue.Queue[Any] = queue.Queue()
        self._lost = threading.Event()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=name, reconnect_on_failure=False)
        self._client.on_connect = lambda c, u, flags, reason, p: self._answers.put(reason)
        self._client.on_disconnect = lambda *_: self._lost.set()
        self._client.on_subscribe = lambda c, u, mid, codes, p: self._answers.put([code.value for code in codes])
        self._client.on_unsubscribe = lambda *_: self._answers.put("unsubscribed")
        self._client.on_message = self._on_message
        if site.actors:
            bundle = None if actor is None else site.actors[actor]
            user, password = (
                (bundle.actor_id, bundle.password) if bundle else (identity.LEARNER_USER, site.fleet.password)
            )
            self._client.username_pw_set(user, password)
            if site.where.tls:
                self._client.tls_set_context(bundle.tls() if bundle else site.fleet.tls())
        if will is not None:
            self._client.will_set(*will, 1, True)
        self._client.connect(site.where.host, site.where.port, keepalive_s)
        self._client.loop_start()
        if (reason := self._answer("CONNECT")) != "Success":
            raise Unmet(f"it refuses the connection: {reason}")

    def close(self) -> None:
        """Disconnects, if it is connected."""
        self.may_receive.set()
        self._client.disconnect()
        self._client.loop_stop()

    def cut(self) -> None:
        """Dies: the connection ends without a goodbye."""
        sock = self._client.socket()
        assert isinstance(sock, socket.socket)
        sock.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        """Says nothing any more, as a machine without power."""
        self._client.loop_stop()

    def subscribe(self, *filters: str) -> list[int]:
        """Subscribes at QoS 1; returns the codes of the SUBACK."""
        self._client.subscribe([(one, 1) for one in filters])
        codes = self._answer("SUBSCRIBE")
        assert isinstance(codes, list)
        return codes

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribes, and waits for the answer."""
        self._client.unsubscribe(topic_filter)
        self._answer("UNSUBSCRIBE")

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, timeout_s: float = ANSWER_S) -> None:
        """Publishes at QoS 1, and waits for the acknowledgement."""
        info = self._client.publish(topic, payload, 1, retain)
        with contextlib.suppress(RuntimeError, ValueError):
            info.wait_for_publish(0.001 if self._lost.is_set() else timeout_s)
        if self._lost.is_set():
            raise Unmet(f"it ends the connection at a message of {len(payload)} bytes")
        if not info.is_published():
            raise Unmet(f"no PUBACK within {timeout_s:g} s for {len(payload)} bytes")

    def publish_many(self, topic: str, payloads: list[bytes]) -> None:
        """Publishes at QoS 1, and waits for the last acknowledgement."""
        infos = [self._client.publish(topic, payload, 1) for payload in payloads]
        for info in infos:
            info.wait_for_publish(3 * ANSWER_S)
            if not info.is_published():
                raise Unmet(f"no PUBACK for one of {len(payloads)} messages")

    def next(self, timeout_s: float = 0.0) -> tuple[str, bytes, bool]:
        """Returns what arrives next, within `ANSWER_S` if nothing else is said."""
        timeout_s = timeout_s or ANSWER_S
        try:
            return self.received.get(timeout=timeout_s)
        except queue.Empty:
            raise Unmet(f"nothing arrived within {timeout_s:g} s") from None

    def _on_message(self, client: Any, userdata: Any, message: Any) -> None:
        self.may_receive.wait()
        self.received.put((message.topic, bytes(message.payload), bool(message.retain)))

    def _answer(self, to: str) -> Any:
        try:
            return self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise Unmet(f"no answer to {to} within {ANSWER_S:g} s") from None
