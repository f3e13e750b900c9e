"""Reads and writes what a connection's socket is ready for."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

from broker.mqtt import outbox, paho_client, turns, wakeup

MISC_PERIOD_S = 0.5  # between two looks at keep-alive
PACKETS_AT_ONCE = 16  # are read and acknowledged together; then others get the lock
ROOM_PERIOD_MS = 20  # between two looks whether there is room again
WAIT_MS = 200


class SocketLoop:
    """Serves the socket of one connection after the other, on the network thread or in its caller's turns.

    Args:
        lock: The link's.
        ready: Set while the connection is in use.
        owed: What waits to be sent.
        has_room: While it is false, what the broker sends is left in the socket.
        turn_s: See `turns.Turns`.

    Attributes:
        gather_s: See `Link.gather_s`.
    """

    def __init__(
        self,
        lock: threading.RLock,
        ready: threading.Event,
        owed: outbox.Outbox,
        has_room: Callable[[], bool],
        turn_s: float,
    ) -> None:
        self._lock, self._ready, self._owed, self._has_room = lock, ready, owed, has_room
        self._wakeup, self._turns = wakeup.Wakeup(), turns.Turns(turn_s)
        self._client: paho_client.Client | None = None
        self._poll, self._turn_poll = select.poll(), select.poll()
        self._looked_at_s = 0.0
        self.gather_s = 0.0

    def open(self, client: paho_client.Client) -> None:
        """Takes the socket of a new connection. The caller holds the lock."""
        self._poll, self._turn_poll = select.poll(), select.poll()  # not select(): that fails past descriptor 1023
        self._poll.register(self._wakeup, select.POLLIN)  # and two, as a poll serves one thread
        self._client = client

    def close(self) -> None:
        """Takes note that the connection is gone. The caller holds the lock."""
        self._client = None

    def wake(self) -> None:
        """Ends the wait of the network thread: there is something to send."""
        self._wakeup.call()

    def serve(self, client: paho_client.Client) -> bool:
        """Serves the socket for 0.2 s at most, or leaves that to the caller who takes turns.

        Returns:
            False when the connection is over.
        """
        if self._ready.is_set() and not self._turns.wait_for_rest():
            return True
        return self._exchange(client, self._poll, WAIT_MS)

    def poll(self) -> bool:
        """Serves the socket without waiting; see `Link.poll`."""
        self._turns.begin()
        client = self._client
        try:
            if client is not None and self._ready.is_set() and not self._exchange(client, self._turn_poll, wait_ms=0):
                self._turns.rest()
        except Exception:  # bytes that are no MQTT: the network thread meets them again, says so, and reconnects
            self._turns.rest()
        return client is not None and client.is_amid_packet

    def rest(self) -> None:
        """Leaves the socket to the network thread again, at once."""
        self._turns.rest()

    def _exchange(self, client: paho_client.Client, poll: select.poll, wait_ms: int) -> bool:
        """Reads and writes what the socket is ready for; false when the connection is over."""
        with self._lock:
            sock = client.socket()
            if sock is None:  # the thread that published last noticed the loss
                return False
            reads = not self._ready.is_set() or self._has_room()
            poll.register(sock, select.POLLIN * reads | select.POLLOUT * client.want_write())
            has_read = reads and client.has_read  # from the socket already: poll cannot tell
            urgent = has_read or client.want_write() or self._owed.is_overdue or not self._ready.is_set()
        if wait_ms and self.gather_s and not urgent and not poll.poll(0):
            time.sleep(self.gather_s)
        events = poll.poll(0 if has_read else wait_ms if reads else min(wait_ms, ROOM_PERIOD_MS))
        if not events and not has_read and time.monotonic() - self._looked_at_s < MISC_PERIOD_S:
            return True
        self._looked_at_s = time.monotonic()
        with self._lock:
            code = self._read(client) if has_read else 0
            for descriptor, event in events:
                if descriptor == self._wakeup.fileno():
                    self._wakeup.clear()
                    continue
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    code = self._read(client) or code
                if event & select.POLLOUT and client.socket() is not None:
                    code = client.loop_write() or code
            code = code or client.loop_misc() or client.flush()
            return not code and client.socket() is not None

    def _read(self, client: paho_client.Client) -> int:
        """Reads some of the packets that are there: a look whether there are more costs less than a turn for each."""
        for _ in range(PACKETS_AT_ONCE):
            if (code := client.loop_read()) or not self._has_room() or not client.can_read():
                break
        return code or client.flush()
