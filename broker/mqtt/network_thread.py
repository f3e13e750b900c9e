"""The thread that keeps a link connected, and the watchdog that replaces it."""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Callable

from broker.contract import address
from broker.mqtt import attempts, handshake, outbox, paho_client, socket_loop, subscriptions

KEEPALIVE_S = 10  # a will fires 1.5 of these after a machine vanished
CONNECT_TIMEOUT_S = 5.0
LOOK_S = 5.0
"""Between two looks of the watchdog: at the thread, and whether it is time to go back to another broker."""
_PROBE_TIMEOUT_S = 2.0
WATCHDOG_S = 30.0  # a network thread that did not turn for so long is declared dead

_log = logging.getLogger(__name__)


class NetworkThread:
    """Connects to one broker after the other, and serves each connection until it is lost.

    Args:
        make_client: Makes the client of one connection, with its will and its credentials.
        tries: Says which broker comes next, and keeps what became of each attempt.
        wanted: What to subscribe to on each connect.
        owed: What to send on each connect.
        loop: Serves the socket.
        lock: The link's.
        ready: Set while a connection is in use.
        listens_first: See `Link`.
        on_connect: See `Link`.

    Attributes:
        client: The client of this connection, or None.
        address: The broker that it was connected to last.
        connections: How many were made.
        failures: How many connections ended by a bug.
    """

    def __init__(
        self,
        make_client: Callable[[address.Address], paho_client.Client],
        tries: attempts.Attempts,
        wanted: subscriptions.Subscriptions,
        owed: outbox.Outbox,
        loop: socket_loop.SocketLoop,
        lock: threading.RLock,
        ready: threading.Event,
        *,
        listens_first: bool,
        on_connect: Callable[[], None],
    ) -> None:
        self._make_client, self._tries, self._wanted, self._owed, self._loop = make_client, tries, wanted, owed, loop
        self._lock, self._ready, self._stopping = lock, ready, threading.Event()
        self._listens_first, self._on_connect = listens_first, on_connect
        self._thread: threading.Thread | None = None
        self._generation, self._turned_at_s = 0, 0.0
        self._failure = ""  # of this attempt to connect
        self.client: paho_client.Client | None = None
        self.address = ""
        self.connections = self.failures = 0

    @property
    def is_alive(self) -> bool:
        """Returns whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread and its watchdog."""
        self._spawn()
        threading.Thread(target=self._watch, name="mqtt-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Has the thread say goodbye and end. The caller holds the lock."""
        self._stopping.set()
        if self.client is not None:
            self.client.disconnect()  # a clean DISCONNECT withdraws the will
            self.client.flush()

    def join(self, timeout_s: float) -> None:
        """Waits until the thread has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """Has the thread send what the socket did not take from another thread."""
        if threading.current_thread() is not self._thread:
            self._loop.wake()

    def _spawn(self) -> None:
        self._generation += 1
        self._turned_at_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(self._generation,), name="mqtt", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Replaces a thread that died or hangs, lest publishes be refused for ever; and looks whether home is back."""
        while not self._stopping.wait(min(LOOK_S, WATCHDOG_S / 6)):
            if not self.is_alive or time.monotonic() - self._turned_at_s > WATCHDOG_S:
                _log.warning("the network thread stopped turning; starting another")
                self._ready.clear()
                self._spawn()
            elif (
                self._ready.is_set()
                and (home := self._tries.home) is not None
                and self._tries.go_home(is_there=_answers(home))
            ):
                self._leave()

    def _leave(self) -> None:
        """Says goodbye to the broker, without the will; the thread connects anew."""
        with self._lock:
            if self.client is not None:
                self.client.disconnect()
                self.client.flush()

    def _run(self, generation: int) -> None:
        while not self._stopping.is_set() and generation == self._generation:
            where, before = self._tries.next(), self.connections
            self._failure = ""
            try:
                self._serve(where, generation)
            except OSError as error:
                self._failure = str(error)
            except Exception as error:  # a bug of ours or paho's must not end the thread; it is counted and shown
                self.failures += 1
                self._failure = f"{type(error).__name__}: {error}"
            with self._lock:
                if generation != self._generation:  # it stood still: the connection is another thread's by now
                    return
                self._let_go()
            was_connected, is_wanted = self.connections > before, not self._stopping.is_set()
            self._tries.ended(where, self._failure, was_connected=was_connected, is_wanted=is_wanted)
            self._turned_at_s = time.monotonic()
            self._stopping.wait(self._tries.delay_s)

    def _serve(self, where: address.Address, generation: int) -> None:
        """Connects and serves the socket until it is lost."""
        client = self._make_client(where)
        greeting = handshake.Handshake(
            client, self._wanted, functools.partial(self._use, where), listens_first=self._listens_first
        )
        client.connect(where.host, where.port, keepalive=KEEPALIVE_S)  # blocks this thread alone: no lock held
        sock = client.socket()
        if not isinstance(sock, socket.socket):
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if generation != self._generation:  # to look a name up may take longer than the watchdog waits
                client.disconnect()
                client.flush()
                return
            self._let_go()  # of what a thread that stands still has left
            self.client, self.address = client, str(where)
            self._loop.open(client)
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while generation == self._generation and (self._ready.is_set() or not self._stopping.is_set()):
            self._turned_at_s = time.monotonic()
            if not self._ready.is_set() and time.monotonic() > deadline:
                raise OSError(greeting.failure or self._failure or "no answer to CONNECT or SUBSCRIBE")
            if not self._loop.serve(client):
                self._failure = greeting.failure or self._failure
                return

    def _let_go(self) -> None:
        """Takes note that there is no connection. The caller holds the lock."""
        self._ready.clear()
        self.client = None
        for part in (self._loop, self._wanted, self._owed):
            part.close()

    def _use(self, where: address.Address, client: paho_client.Client) -> None:
        """Sends everything that is retained, the birth last, now that all subscriptions stand."""
        if self._stopping.is_set():
            return
        self._ready.set()
        self.connections += 1
        self._owed.open(client)
        self._tries.made(where)
        self._on_connect()

    def note(self, text: str) -> None:
        """Keeps what paho says of a failure, where that is why the connection ends."""
        if "SSL" in text or paho_client.TOO_LARGE in text:
            self._failure = text


def _answers(where: address.Address) -> bool:
    """Returns whether somebody listens there."""
    try:
        socket.create_connection((where.host, where.port), _PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True
