"""Plays recorded messages to whoever subscribed, from memory: where a broker would take a third of what it feeds.

As much MQTT 3.1.1 as our links need: what is published is acknowledged, passed on and, if it asks for that, retained.
It trusts the processes that a benchmark has started.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from paho.mqtt import client as mqtt

from tests.fakes.connections import mqtt_packet

_CONNECT, _PUBLISH, _SUBSCRIBE, _UNSUBSCRIBE, _PING, _DISCONNECT = 0x10, 0x30, 0x82, 0xA2, 0xC0, 0xE0
_CONNACK, _PINGRESP = bytes((0x20, 2, 0, 0)), bytes((0xD0, 0))
_READ_BYTES = 1 << 16


def packet(topic: str, payload: bytes, number: int, *, retain: bool = False) -> bytes:
    """Returns a PUBLISH at QoS 1 as a broker passes it on; `number` counts what a connection gets."""
    return mqtt_packet.packet(0x32 | retain, mqtt_packet.text(topic) + struct.pack("!H", number % 65535 + 1) + payload)


class Player:
    """Serves on 127.0.0.1 at a port of its own, as `open` gives it.

    Args:
        listener: A socket that listens.
        note: Called for each message that is published, with topic and payload, on several threads.
    """

    @classmethod
    @contextlib.contextmanager
    def open(cls, note: Callable[[str, bytes], None]) -> Iterator[Player]:
        """Yields one that serves until the block ends."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            made = cls(listener, note)
            threading.Thread(target=made._accept, daemon=True).start()
            try:
                yield made
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                made._close()

    def __init__(self, listener: socket.socket, note: Callable[[str, bytes], None]) -> None:
        self._listener, self._note = listener, note
        self.port: int = listener.getsockname()[1]
        self._connections: list[_Connection] = []
        self._retained: dict[str, bytes] = {}

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Passes a message on to all who subscribed to it, now or, if it is retained, later."""
        if retain:
            self._retained[topic] = payload
        for one in self._hearing(topic):
            one.send(topic, payload, retain=False)

    def play(self, topic: str, recorded: Iterable[bytes]) -> None:
        """Sends packets as fast as the one takes them who subscribed to a topic of theirs; until all are out, or it is.

        What the socket had taken and it had not read is lost then, as with a broker.
        """
        (listening,) = self._hearing(topic)
        with contextlib.suppress(OSError):
            listening.play(recorded)

    def hears(self, topic: str) -> bool:
        """Returns whether somebody has subscribed to a topic."""
        return bool(self._hearing(topic))

    def _hearing(self, topic: str) -> list[_Connection]:
        return [one for one in list(self._connections) if one.wants(topic)]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = _Connection(self._listener.accept()[0], self._take, self._retained)
                self._connections.append(one)
                threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: _Connection) -> None:
        with contextlib.suppress(OSError):
            one.serve()
        self._connections.remove(one)
        one.close()

    def _take(self, topic: str, payload: bytes, retain: bool) -> None:
        self._note(topic, payload)
        self.publish(topic, payload, retain=retain)

    def _close(self) -> None:
        for one in list(self._connections):
            one.close()


class _Connection:
    """One client."""

    def __init__(
        self, sock: socket.socket, take: Callable[[str, bytes, bool], None], retained: dict[str, bytes]
    ) -> None:
        self._socket, self._take, self._retained = sock, take, retained
        self._filters: set[str] = set()
        self._lock = threading.Lock()
        self._playing, self._due, self._number = False, bytearray(), 0

    def wants(self, topic: str) -> bool:
        return any(mqtt.topic_matches_sub(one, topic) for one in list(self._filters))

    def send(self, topic: str, payload: bytes, *, retain: bool) -> None:
        self._number += 1
        self._write(packet(topic, payload, self._number, retain=retain))

    def play(self, recorded: Iterable[bytes]) -> None:
        """Sends packets; what else is due goes between them."""
        with self._lock:
            self._playing = True
        for one in recorded:
            with self._lock:
                due, self._due = bytes(self._due), bytearray()
            self._socket.sendall(due + one if due else one)
        with self._lock:
            self._playing = False
            self._socket.sendall(self._due)
            self._due.clear()

    def _write(self, data: bytes) -> None:
        with self._lock:
            if self._playing:
                self._due += data
            else:
                self._socket.sendall(data)

    def serve(self) -> None:
        """Reads until it hangs up."""
        read = bytearray()
        while piece := self._socket.recv(_READ_BYTES):
            read += piece
            at = 0
            while (found := mqtt_packet.find(read, at)) is not None:
                first, start, at = found
                self._answer(first, bytes(read[start:at]))
            del read[:at]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self, first: int, body: bytes) -> None:
        if first & 0xF0 == _PUBLISH:
            end = 2 + int.from_bytes(body[:2], "big")
            topic = body[2:end].decode()
            if first & 0x06:
                self._write(bytes((0x40, 2)) + body[end : end + 2])
                end += 2
            self._take(topic, body[end:], bool(first & 1))
        elif first == _CONNECT:
            self._write(_CONNACK)
        elif first in (_SUBSCRIBE, _UNSUBSCRIBE):
            wanted = list(_filters(body, has_qos=first == _SUBSCRIBE))
            if first == _UNSUBSCRIBE:
                self._filters -= set(wanted)
                self._write(bytes((0xB0, 2)) + body[:2])
                return
            self._filters |= set(wanted)
            self._write(mqtt_packet.packet(0x90, body[:2] + b"\1" * len(wanted)))
            for topic, payload in list(self._retained.items()):
                if payload and any(mqtt.topic_matches_sub(one, topic) for one in wanted):
                    self.send(topic, payload, retain=True)
        elif first == _PING:
            self._write(_PINGRESP)
        elif first == _DISCONNECT:
            raise ConnectionError("it says goodbye")


def _filters(body: bytes, *, has_qos: bool) -> Iterator[str]:
    at = 2
    while at < len(body):
        end = at + 2 + int.from_bytes(body[at : at + 2], "big")
        yield body[at + 2 : end].decode()
        at = end + has_qos


def wait(until: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Waits until something is so.

    Raises:
        TimeoutError: It was not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not until():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.05)
