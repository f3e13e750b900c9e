"""A MQTT 3.1.1 connection for simulated actors: TLS, QoS 1, no thread, and a third of what paho takes for a message.

A load generator shares its machine with what it loads, so each of its microseconds is missing there. It trusts the
broker that a benchmark has started.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterator

from tests.fakes.connections import mqtt_packet

_CONNECT, _CONNACK, _PUBLISH, _PUBACK = 0x10, 0x20, 0x30, 0x40
_SUBSCRIBE, _SUBACK, _DISCONNECT = 0x82, 0x90, 0xE0
_QOS_1, _RETAIN = 0x02, 0x01
KEEPALIVE_S = 60
"""Seconds of keep-alive: more than between two heartbeats, so that nobody has to ping."""
_READ_BYTES = 1 << 16
_RECORD_BYTES = 1 << 14
"""TLS hands over one record at a time; behind a shorter one there is rarely another."""


class LightConnection:
    """A connection to a broker, made when it is constructed.

    Args:
        where: Host and port.
        tls: For a broker that asks for certificates.
        client_id: MQTT client id.
        credentials: User name and password.
        will: Topic and payload, retained at QoS 1.

    Attributes:
        socket: Not blocking; for whoever polls many of them.
        subscribed: The broker has answered a SUBSCRIBE.
    """

    def __init__(
        self,
        where: tuple[str, int],
        tls: ssl.SSLContext | None,
        client_id: str,
        credentials: tuple[str, str],
        will: tuple[str, bytes],
    ) -> None:
        plain = socket.create_connection(where, timeout=30.0)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = tls.wrap_socket(plain, server_hostname=where[0]) if tls else plain
        self.subscribed = False
        self._unsent = bytearray()
        self._read = bytearray()
        self._due = bytearray()
        self._packet_id = 0
        flags = 0x80 | 0x40 | 0x20 | _QOS_1 << 2 | 0x04 | 0x02  # user, password, will retained, QoS 1, will, clean
        body = mqtt_packet.text("MQTT") + struct.pack("!BBH", 4, flags, KEEPALIVE_S)
        body += (
            mqtt_packet.text(client_id)
            + mqtt_packet.text(will[0])
            + mqtt_packet.data(will[1])
            + b"".join(map(mqtt_packet.text, credentials))
        )
        self.socket.sendall(mqtt_packet.packet(_CONNECT, body))
        answer = self.socket.recv(4)
        if answer != bytes((_CONNACK, 2, 0, 0)):
            raise ConnectionError(f"{client_id}: the broker answered {answer!r}")
        self.socket.setblocking(False)

    @property
    def wants_write(self) -> bool:
        """True if not everything that was published is in the socket."""
        return bool(self._unsent)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Sends at QoS 1, as far as the socket takes it."""
        name = mqtt_packet.text(topic)
        self._packet_id = self._packet_id % 65535 + 1
        flags = _PUBLISH | _QOS_1 | (_RETAIN if retain else 0)
        length = mqtt_packet.length(len(name) + 2 + len(payload))
        self._send(b"".join((bytes((flags,)), length, name, self._packet_id.to_bytes(2, "big"), payload)))

    def subscribe(self, topics: list[str]) -> None:
        """Subscribes to topics, at QoS 1."""
        self._packet_id = self._packet_id % 65535 + 1
        body = struct.pack("!H", self._packet_id) + b"".join(mqtt_packet.text(topic) + b"\1" for topic in topics)
        self._send(mqtt_packet.packet(_SUBSCRIBE, body))

    def close(self) -> None:
        """Withdraws the will, and closes the socket."""
        self.socket.setblocking(True)
        self.flush()
        with contextlib.suppress(OSError):
            self.socket.sendall(mqtt_packet.packet(_DISCONNECT, b""))
        self.socket.close()

    def flush(self) -> None:
        """Sends what the socket did not take before."""
        rest, self._unsent = bytes(self._unsent), bytearray()
        self._send(rest)

    def receive(self) -> Iterator[tuple[str, bytes]]:
        """Yields topics and payloads that have arrived; `acknowledge` them.

        Raises:
            ConnectionError: The broker hung up.
        """
        while True:
            try:
                piece = self.socket.recv(_READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                break
            if not piece:
                raise ConnectionError("the broker hung up")
            self._read += piece
            if len(piece) < _RECORD_BYTES:
                break
        at = 0
        while (found := mqtt_packet.find(self._read, at)) is not None:
            first, start, at = found
            if first & 0xF0 == _PUBLISH:
                end = start + 2 + int.from_bytes(self._read[start : start + 2], "big")
                topic = self._read[start + 2 : end].decode()
                if first & 0x06:
                    self._due += bytes((_PUBACK, 2)) + self._read[end : end + 2]
                    end += 2
                yield topic, bytes(self._read[end:at])
            elif first == _SUBACK:
                assert 0x80 not in self._read[start + 2 : at], "a subscription was refused"
                self.subscribed = True
        del self._read[:at]

    def acknowledge(self) -> None:
        """Sends the acknowledgements of what was received."""
        if self._due:
            due, self._due = self._due, bytearray()
            self._send(due)

    def _send(self, data: bytes | bytearray) -> None:
        if self._unsent:
            self._unsent += data
            return
        sent = 0
        with contextlib.suppress(BlockingIOError, ssl.SSLError, ConnectionError):  # of a lost one, whoever reads hears
            while sent < len(data):
                sent += self.socket.send(memoryview(data)[sent:] if sent else data)
        self._unsent += memoryview(data)[sent:]
