"""One MQTT connection that keeps itself up. With `client`, the only file that imports paho.

A network thread owns connecting, reading, keep-alive and reconnecting; a lock makes `publish` safe from any other
thread. `publish` writes to the socket inline, and nothing in it waits for the network. A loop that computes all the
time may serve the socket itself (`turn`), because a network thread beside it costs more than the network.

On each connect: subscribe, wait for every SUBACK, then send all that is retained, the will's topic last: that one is
the birth, which promises that its sender listens. Each connection is a new paho client with a clean session, so that
paho never holds messages of its own over a reconnect; what must survive is held by the caller (spool) or in `retain`.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import MQTTErrorCode

from broker.contract import address, errors
from broker.mqtt import backoff, connect_errors, handlers, outbox, turns, wakeup
from broker.mqtt import paho_client as paho

KEEPALIVE_S = 10  # a will fires 1.5 of these after a machine vanished
CONNECT_TIMEOUT_S = 5.0
WATCHDOG_S = 30.0  # a network thread that did not turn for so long is declared dead
MISC_PERIOD_S = 0.5  # between two looks at keep-alive
LOCK_WAIT_S = 0.001  # the most that `publish` waits for the network thread, where the caller says nothing else
PACKETS_AT_ONCE = 16  # are read and acknowledged together; then others get the lock
ROOM_PERIOD_MS = 20  # between two looks whether there is room again
IN_FLIGHT_LIMIT = 20  # more is slower with paho, and delays what is urgent

_log = logging.getLogger(__name__)

Handler = handlers.Handler


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
        on_connect: Called on the network thread after everything retained was sent.

    Attributes:
        refusals: By address, what came of the last attempt there.
        gather_s: With nothing to read, the network thread leaves the socket alone for so long, so that what comes
            meanwhile is read together. Each time it wakes it takes Python's lock, and a core, from who computes.
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
        on_connect: Callable[[], None] | None = None,
    ) -> None:
        if not brokers:
            raise errors.ConfigError("the list of brokers is empty", todo="name at least one: --broker HOST")
        self._addresses = [address.Address.parse(text) for text in brokers]
        if tls is None and any(one.tls for one in self._addresses):
            raise errors.IdentityError(
                "a broker that is reached over TLS asks for a certificate", todo="join with a bundle or a fleet's keys"
            )
        self._tls, self._client_id = tls, client_id
        self._credentials, self._will = (username, password), will
        self._listens_first, self._has_room = listens_first, has_room
        self._on_connect = on_connect or (lambda: None)
        self._handlers = handlers.Handlers()
        self._outbox = outbox.Outbox(last=will[0] if will else "")
        self._muted = self._subscribes = False
        self._followed: frozenset[str] = frozenset()
        self.refusals = {str(one): connect_errors.SILENCE for one in self._addresses}
        self._said: dict[str, str] = {}  # by address, the kind of refusal that was logged since the last connection
        self._lock = threading.RLock()
        self._client: paho.Client | None = None
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._drained = threading.Condition(self._lock)
        self._awaited_subacks: set[int] = set()
        self._refusal = ""  # of this attempt to connect
        self._turned_at, self._generation = time.monotonic(), 0
        self._wakeup, self._turns = wakeup.Wakeup(), turns.Turns()
        self._misc_at, self.gather_s, self._turn_poll = 0.0, 0.0, select.poll()
        self.bytes_sent = self.bytes_received = self.connections = self.handler_errors = 0
        self.address = ""

    # -- what callers use -------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Connected, subscribed, and everything retained sent."""
        return self._ready.is_set()

    @property
    def in_flight(self) -> int:
        """QoS 1 messages that the broker has not acknowledged yet."""
        return len(self._outbox.in_flight)

    def subscribe(self, topic_filter: str, handler: Handler) -> None:
        """Hands every message of a filter to `handler(topic, payload, retained)`, on the network thread."""
        with self._lock:
            self._handlers.add(topic_filter, handler)
            if self._client is not None and self._ready.is_set():
                self._client.subscribe(topic_filter, qos=1)

    def route(self, topic_filter: str, handler: Handler) -> None:
        """As `subscribe`, of those topics alone that `follow` names."""
        with self._lock:
            self._handlers.add(topic_filter, handler, subscribed=False)

    def follow(self, wanted: Iterable[str]) -> None:
        """Subscribes to these topics, and no longer to those named before; for filters that `route` has."""
        with self._lock:
            before, self._followed = self._followed, frozenset(wanted)
            if self._client is None or not self._subscribes:
                return
            if new := [(topic, 1) for topic in sorted(self._followed - before)]:
                self._client.subscribe(new)
            if gone := sorted(before - self._followed):
                self._client.unsubscribe(gone)

    def start(self) -> None:
        """Starts the network thread and its watchdog."""
        self._spawn()
        threading.Thread(target=self._watch, name="mqtt-watchdog", daemon=True).start()

    def wait_connected(self, timeout_s: float) -> None:
        """Waits for the first connection.

        Raises:
            BrokerUnreachable: None was made in time: nobody answered, or who did let us not in.
        """
        if not self._ready.wait(timeout_s):
            raise connect_errors.as_error(self.refusals, timeout_s)

    def retain(self, topic: str, payload: outbox.Payload) -> None:
        """Publishes a retained message, and again on every connect.

        At once, if connected; or as soon as less is in flight, and then what is retained there by that time.
        """
        self.retain_all([(topic, payload)])

    def retain_all(self, those: Iterable[tuple[str, outbox.Payload]]) -> None:
        """As `retain`, of several. They take the lock once, which the network thread often holds."""
        with self._lock:
            for topic, payload in those:
                self._outbox.retain(topic, payload)
            self._send_overdue()

    def repeat(self) -> None:
        """Publishes all that is retained once more: somebody else may have overwritten it."""
        with self._lock:
            self._outbox.repeat()
            self._send_overdue()

    def mute(self) -> None:
        """Retains nothing from now on: it is somebody else's. Takes no lock, so that handlers may call it."""
        self._muted = True

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, wait_s: float = LOCK_WAIT_S) -> bool:
        """Sends once at QoS 1, and waits for the network thread for `wait_s` at most.

        Returns:
            False when not connected, busy, or with too much in flight: the caller keeps the message.
        """
        if not self._ready.is_set() or len(self._outbox.in_flight) >= IN_FLIGHT_LIMIT:
            return False
        if not self._lock.acquire(timeout=wait_s):
            return False
        try:
            return self._ready.is_set() and self._send(topic, payload, retain=retain)
        finally:
            self._lock.release()

    def turn(self) -> bool:
        """Serves the socket in the caller's thread, without waiting; true if a message has come in part.

        For a loop that computes all the time; handlers run in it. As long as it calls this often, the network thread
        leaves the socket alone: each time that woke up for a message, the two would pass Python's lock to and fro, for
        milliseconds (measured: 2 of the 45 that 4096 steps take). Call `rest` before the loop waits for something.
        """
        self._turns.take()
        client = self._client
        try:
            if client is not None and self._ready.is_set() and not self._exchange(client, self._turn_poll, wait_ms=0):
                self._turns.rest()
        except Exception:  # bytes that are no MQTT: the network thread meets them again, says so, and reconnects
            self._turns.rest()
        return client is not None and client._in_packet["to_process"] > 0

    def rest(self) -> None:
        """The network thread shall serve the socket again, at once."""
        self._turns.rest()

    def close(self, farewell: tuple[str, outbox.Payload] | None = None, timeout_s: float = 2.0) -> None:
        """Sends a last retained message, waits until all is acknowledged, and disconnects."""
        deadline = time.monotonic() + timeout_s
        self.rest()
        with self._lock:
            if farewell is not None:
                self.retain(*farewell)
            while self._outbox.pending and self._ready.is_set() and (left := deadline - time.monotonic()) > 0:
                self._drained.wait(left)
            self._stopping.set()
            if self._client is not None:
                self._client.disconnect()  # a clean DISCONNECT withdraws the will
        self._thread.join(max(0.1, deadline - time.monotonic()))

    # -- network thread ---------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._generation += 1
        self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(self._generation,), name="mqtt", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Replaces a network thread that died or hangs; without this, publishes would be refused for ever."""
        while not self._stopping.wait(WATCHDOG_S / 6):
            if not self._thread.is_alive() or time.monotonic() - self._turned_at > WATCHDOG_S:
                _log.warning("the network thread stopped turning; starting another")
                self._ready.clear()
                self._spawn()

    def _run(self, generation: int) -> None:
        turn = failures = 0
        while not self._stopping.is_set() and generation == self._generation:
            where = self._addresses[turn % len(self._addresses)]
            before = self.connections
            try:
                self._serve(where, generation)
            except OSError as error:
                self._refusal = str(error)
            except Exception as error:  # a bug of ours or paho's must not end the thread; it is counted and shown
                self.handler_errors += 1
                self._refusal = f"{type(error).__name__}: {error}"
            lost = self.connections > before
            self._refusal = self._refusal or (connect_errors.HUNG_UP if where.tls and not lost else "")
            self._lose(where, lost=lost)
            turn += 1
            failures = 0 if lost else failures + 1
            delay = backoff.delay_s(failures // len(self._addresses))
            self._turned_at = time.monotonic()
            self._stopping.wait(delay)

    def _lose(self, where: address.Address, *, lost: bool) -> None:
        if lost:  # it had let us in: how its end looks to OpenSSL says nothing about who it is
            line, found = f"connection to {where} lost", connect_errors.SILENCE._replace(what=self._refusal)
        else:
            line, found = (
                f"cannot reach {where}",
                connect_errors.understood(self._refusal, self._tls if where.tls else None),
            )
        with self._lock:
            self._ready.clear()
            self._client, self.refusals[str(where)] = None, found
            self._subscribes = False
            self._outbox.lose()
            self._drained.notify_all()
        if not self._stopping.is_set() and self._said.get(str(where)) != found.kind:
            self._said[str(where)] = found.kind  # what fails is said once, until it is something else; its end once
            _log.warning("%s%s; trying again", line, f": {found.what}" if found.what else "")

    def _serve(self, where: address.Address, generation: int) -> None:
        """Connects and serves the socket until it is lost."""
        client = self._new_client(where)
        self._refusal = ""
        client.connect(where.host, where.port, keepalive=KEEPALIVE_S)  # blocks this thread alone: no lock held
        sock = client.socket()
        if not isinstance(sock, socket.socket):
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll = select.poll()  # not select(): that fails past descriptor 1023
        poll.register(self._wakeup, select.POLLIN)
        with self._lock:
            self._client, self._turn_poll, self.address = client, select.poll(), str(where)  # a poll serves one thread
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while generation == self._generation and (self._ready.is_set() or not self._stopping.is_set()):
            self._turned_at = time.monotonic()
            if not self._ready.is_set() and time.monotonic() > deadline:
                raise OSError(self._refusal or "no answer to CONNECT or SUBSCRIBE")
            callers_turn = self._ready.is_set() and self._turns.go_on()
            if not callers_turn and not self._exchange(client, poll, wait_ms=200):
                return

    def _exchange(self, client: paho.Client, poll: select.poll, wait_ms: int) -> bool:
        """Reads and writes what the socket is ready for; false when the connection is over."""
        with self._lock:
            sock = client.socket()
            if sock is None:  # the thread that published last noticed the loss
                return False
            reads = not self._ready.is_set() or self._has_room()
            poll.register(sock, select.POLLIN * reads | select.POLLOUT * client.want_write())
            has_read = reads and client.has_read  # from the socket already: poll cannot tell
            urgent = has_read or client.want_write() or self._outbox.is_overdue or not self._ready.is_set()
        if wait_ms and self.gather_s and not urgent and not poll.poll(0):
            time.sleep(self.gather_s)
        events = poll.poll(0 if has_read else wait_ms if reads else min(wait_ms, ROOM_PERIOD_MS))
        if not events and not has_read and time.monotonic() - self._misc_at < MISC_PERIOD_S:
            return True
        self._misc_at = time.monotonic()
        with self._lock:
            code = self._read(client) if has_read else MQTTErrorCode.MQTT_ERR_SUCCESS
            for descriptor, event in events:
                if descriptor == self._wakeup.fileno():
                    self._wakeup.clear()
                    continue
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    code = self._read(client) or code
                if event & select.POLLOUT and client.socket() is not None:
                    code = client.loop_write() or code
            code = code or client.loop_misc()
            return not code and client.socket() is not None

    def _read(self, client: paho.Client) -> MQTTErrorCode:
        """Some of the packets that are there: a look whether there are more costs less than a turn for each."""
        for _ in range(PACKETS_AT_ONCE):
            if (code := client.loop_read()) or not self._has_room() or not client.can_read():
                break
        return code or client.acknowledge()

    def _new_client(self, where: address.Address) -> paho.Client:
        will = self._will and (self._will[0], outbox.made(self._will[1]))
        tls = self._tls if where.tls else None
        client = paho.Client(self._client_id, CONNECT_TIMEOUT_S, tls, self._credentials, will, self._full)
        client.on_log = self._heard  # paho's log alone says that a certificate is refused, or a packet
        client.on_connect = self._connected
        client.on_subscribe = self._subscribed
        client.on_unsubscribe = lambda *_: None if self._ready.is_set() else self._bear()
        client.on_publish = self._published
        client.on_message = self._message
        return client

    def _heard(self, client: mqtt.Client, userdata: Any, level: int, text: str) -> None:
        if "SSL" in text or paho.TOO_LARGE in text:
            self._refusal = text

    def _connected(self, client: mqtt.Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.is_failure:
            self._refusal = f"refused: {reason}"
            client.disconnect()
            return
        self._subscribes = True
        filters = [(topic_filter, 1) for topic_filter in (*self._handlers.filters, *sorted(self._followed))]
        if not filters:
            self._bear()
            return
        _, mid = client.subscribe(filters)
        self._awaited_subacks = {mid} if mid is not None else set()

    def _subscribed(self, client: mqtt.Client, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        if any(reason.is_failure for reason in reasons):
            self._refusal = "a subscription was refused"
            client.disconnect()
            return
        self._awaited_subacks.discard(mid)
        if self._awaited_subacks or self._ready.is_set():
            return
        if self._listens_first:  # a broker answers in order: what is retained comes before this UNSUBACK
            client.unsubscribe("actorq/nothing")
        else:
            self._bear()

    def _bear(self) -> None:
        """All subscriptions stand: send what is retained, the birth last."""
        if self._stopping.is_set():
            return
        self._ready.set()
        self.connections += 1
        self._outbox.repeat()
        self._send_overdue(limit=math.inf)
        if self._said:
            self._said = {}
            _log.info("connected to %s again", self.address)
        self._on_connect()

    def _published(self, client: mqtt.Client, userdata: Any, mid: int, reason: Any, properties: Any) -> None:
        self._outbox.in_flight.discard(mid)
        self._send_overdue()
        self._drained.notify_all()

    def _message(self, client: mqtt.Client, userdata: Any, message: mqtt.MQTTMessage) -> None:
        self.bytes_received += len(message.payload)
        for failure in self._handlers.handle(message.topic, bytes(message.payload), message.retain):
            self.handler_errors += 1
            _log.warning("%s", failure)

    def _send_overdue(self, limit: float = IN_FLIGHT_LIMIT) -> None:
        if self._client is None or not self._ready.is_set():
            return
        with self._client.gathered():
            while len(self._outbox.in_flight) < limit and (due := self._outbox.take()) is not None:
                self._send(*due, retain=True)

    def _send(self, topic: str, payload: bytes, *, retain: bool) -> bool:
        if self._client is None or (retain and self._muted):
            return False
        info = self._client.publish(topic, payload, qos=1, retain=retain)
        if info.rc != mqtt.MQTT_ERR_SUCCESS:
            return False
        self._outbox.in_flight.add(info.mid)
        self.bytes_sent += len(payload)
        return True

    def _full(self) -> None:
        if threading.current_thread() is not self._thread:
            self._wakeup.call()  # the socket is full: the network thread must send the rest
