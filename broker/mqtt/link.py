"""One MQTT connection that keeps itself up.

A network thread (network_thread.py) owns connecting, reading, keep-alive and reconnecting; a lock makes `publish` safe
from any other thread. `publish` writes to the socket inline, and nothing in it waits for the network. A loop that
computes all the time may serve the socket itself (`poll`), because a network thread beside it costs more than the
network.

On each connect: subscribe, wait for every SUBACK, then send all that is retained, the will's topic last: that one is
the birth, which promises that its sender listens. Each connection is a new paho client with a clean session, so that
paho never holds messages of its own over a reconnect; what must survive is held by the caller (spool) or in `retain`.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from broker.contract import address, errors
from broker.mqtt import attempts, connect_errors, network_thread, outbox, paho_client, socket_loop, subscriptions, turns

LOCK_WAIT_S = 0.001  # the most that `publish` waits for the network thread, where the caller says nothing else

Handler = subscriptions.Handler
_Address = address.Address


class Link:
    """A connection to one broker of a list.

    Args:
        brokers: `host[:port]`, tried in turn.
        client_id: MQTT client id; a suffix per connection is added, so that a late session cannot push out a new one.
        username: With `password`, for brokers that want them.
        tls: For brokers that are reached over TLS.
        will: Topic and payload (a function: made for each connection) that the broker retains when this side vanishes.
        listens_first: Send what is retained only after hearing what is retained at the topics subscribed to.
        has_room: While it is false, what the broker sends is left in the socket, so that TCP holds the broker back.
        qos: At which it is sent what it subscribes to: 1, or 0 where it can do without some of it.
        turn_s: The network thread serves the socket again where for so long nobody has called `poll`.
        on_connect: Called on the network thread after everything retained was sent.

    Raises:
        ConfigError: The list is empty.
        IdentityError: A broker is to be reached over TLS, and there is no `tls`.
    """

    def __init__(
        self,
        brokers: Sequence[str],
        client_id: str,
        *,
        username: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
        will: tuple[str, outbox.Payload] | None = None,
        listens_first: bool = False,
        has_room: Callable[[], bool] = lambda: True,
        qos: int = 1,
        turn_s: float = turns.PERIOD_S,
        on_connect: Callable[[], None] = lambda: None,
    ) -> None:
        addresses = _parsed(brokers, has_tls=tls is not None)
        self._client_id, self._credentials, self._tls, self._will = client_id, (username, password), tls, will
        self._lock, self._ready = threading.RLock(), threading.Event()
        self._attempts = attempts.Attempts(addresses, tls)
        self._subscriptions = subscriptions.Subscriptions(qos)
        self._outbox = outbox.Outbox(self._lock, last=will[0] if will else "")
        self._loop = socket_loop.SocketLoop(self._lock, self._ready, self._outbox, has_room, turn_s)
        self._network = network_thread.NetworkThread(
            self._new_client,
            self._attempts,
            self._subscriptions,
            self._outbox,
            self._loop,
            self._lock,
            self._ready,
            listens_first=listens_first,
            on_connect=on_connect,
        )

    # -- its state --------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Returns whether it is connected and subscribed, and everything retained was sent."""
        return self._ready.is_set()

    @property
    def address(self) -> str:
        """The broker that it was connected to last."""
        return self._network.address

    @property
    def connections(self) -> int:
        """The number of connections that were made."""
        return self._network.connections

    @property
    def refusals(self) -> Mapping[str, connect_errors.Refusal]:
        """The outcome of the last attempt, by address."""
        return self._attempts.refusals

    @property
    def in_flight(self) -> int:
        """QoS 1 messages that the broker has not acknowledged yet."""
        return len(self._outbox.in_flight)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of all messages sent."""
        return self._outbox.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Payload bytes of all messages received."""
        return self._subscriptions.bytes_received

    @property
    def handler_errors(self) -> int:
        """Exceptions that handlers raised, or that ended a connection; each is logged."""
        return self._subscriptions.failures + self._network.failures

    @property
    def gather_s(self) -> float:
        """The time for which the network thread leaves the socket alone when there is nothing to read.

        What comes meanwhile is read together. Each time it wakes it takes Python's lock, and a core, from who computes.
        """
        return self._loop.gather_s

    @gather_s.setter
    def gather_s(self, seconds: float) -> None:
        self._loop.gather_s = seconds

    # -- connecting -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the network thread and its watchdog."""
        self._network.start()

    def wait_connected(self, timeout_s: float) -> None:
        """Waits for the first connection.

        Raises:
            BrokerUnreachable: None was made in time: nobody answered, or who did let us not in.
        """
        if not self._ready.wait(timeout_s):
            raise connect_errors.as_error(self.refusals, timeout_s)

    def close(self, farewell: tuple[str, outbox.Payload] | None = None, timeout_s: float = 2.0) -> None:
        """Sends a last retained message, waits until all is acknowledged, and disconnects."""
        deadline = time.monotonic() + timeout_s
        self.rest()
        with self._lock:
            if farewell is not None:
                self.retain(*farewell)
            self._outbox.drain(deadline)
            self._network.stop()
        self._network.join(max(0.1, deadline - time.monotonic()))

    # -- receiving --------------------------------------------------------------------------------------------------

    def subscribe(self, topic_filter: str, handler: Handler) -> None:
        """Hands every message of a filter to `handler(topic, payload, retained)`, on the network thread."""
        with self._lock:
            self._subscriptions.add(topic_filter, handler)

    def unsubscribe(self, topic_filter: str) -> None:
        """Hears no more of a filter that was subscribed to."""
        with self._lock:
            self._subscriptions.remove(topic_filter)

    def route(self, topic_filter: str, handler: Handler) -> None:
        """Hands messages to a handler as `subscribe` does, of those topics alone that `follow` names."""
        with self._lock:
            self._subscriptions.add(topic_filter, handler, is_subscribed=False)

    def follow(self, topics: Iterable[str], group: str = "") -> None:
        """Subscribes to these topics, and no longer to those that this group named before; for what `route` has.

        Whoever shares a link with others has a group of its own.
        """
        with self._lock:
            self._subscriptions.follow(topics, group)

    # -- sending ----------------------------------------------------------------------------------------------------

    def retain(self, topic: str, payload: outbox.Payload) -> None:
        """Publishes a retained message, and again on every connect.

        At once, if connected; or as soon as less is in flight, and then what is retained there by that time.
        """
        self.retain_all([(topic, payload)])

    def retain_all(self, retained: Iterable[tuple[str, outbox.Payload]]) -> None:
        """Retains several messages. They take the lock once, which the network thread often holds."""
        with self._lock:
            for topic, payload in retained:
                self._outbox.retain(topic, payload)
            self._outbox.send_overdue()

    def repeat(self) -> None:
        """Publishes all that is retained once more: somebody else may have overwritten it."""
        with self._lock:
            self._outbox.repeat()

    def mute(self) -> None:
        """Retains nothing from now on: it is somebody else's. Takes no lock, so that handlers may call it."""
        self._outbox.is_muted = True

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, wait_s: float = LOCK_WAIT_S) -> bool:
        """Sends once at QoS 1, and waits for the network thread for `wait_s` at most.

        Returns:
            False when not connected, busy, or with too much in flight: the caller keeps the message.
        """
        if not self._ready.is_set() or self._outbox.is_full:
            return False
        if not self._lock.acquire(timeout=wait_s):
            return False
        try:
            return self._ready.is_set() and self._outbox.publish(topic, payload, retain=retain)
        finally:
            self._lock.release()

    # -- turns ------------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Serves the socket in the caller's thread, without waiting; true if a message has come in part.

        For a loop that computes all the time; handlers run in it. As long as it calls this often, the network thread
        leaves the socket alone: each time that woke up for a message, the two would pass Python's lock to and fro, for
        milliseconds (measured: 2 of the 45 that 4096 steps take). Call `rest` before the loop waits for something.
        """
        return self._loop.poll()

    def rest(self) -> None:
        """Leaves the socket to the network thread again, at once."""
        self._loop.rest()

    def _new_client(self, where: _Address) -> paho_client.Client:
        client = paho_client.Client(
            self._client_id,
            network_thread.CONNECT_TIMEOUT_S,
            tls=self._tls if where.tls else None,
            credentials=self._credentials,
            will=self._will and (self._will[0], outbox.made(self._will[1])),
            on_full=self._network.wake,
            on_failure=self._network.note,
        )
        client.on_message, client.on_publish = self._subscriptions.on_message, self._outbox.on_publish
        return client


def _parsed(brokers: Sequence[str], *, has_tls: bool) -> list[address.Address]:
    if not brokers:
        raise errors.ConfigError("the list of brokers is empty", todo="name at least one: --broker HOST")
    addresses = [address.Address.parse(text) for text in brokers]
    if not has_tls and any(one.tls for one in addresses):
        raise errors.IdentityError(
            "a broker that is reached over TLS asks for a certificate", todo="join with a bundle or a fleet's keys"
        )
    return addresses
