"""paho's client, driven by its public loop interface, with three private methods overridden. The only file with paho.

paho itself asks for the first bytes of a packet one by one, for its body in the pieces that TLS decrypts, copies a
payload three times more than it takes, and writes each packet by itself. Each call lets go of Python's lock, and beside
a thread that computes it then waits for that thread. The figures below are the CPU time per message that an override
saves its receiver; how they were measured, and what was dropped, is in docs/decisions.md.
"""

from __future__ import annotations

import functools
import logging
import random
import select
import ssl
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MessageType, MQTTErrorCode

from broker.contract import messages

KNOWN_PAHO = "2.2."
"""The releases whose private methods were read; setup.cfg has the same bound."""
TOO_LARGE = "it sends more than any policy has"
_AT_ONCE_BYTES = 1 << 16
matches = functools.lru_cache(4096)(mqtt.topic_matches_sub)
"""Returns whether a topic filter and a topic match; paho builds a tree at each call."""


class Client(mqtt.Client):
    """The client of one connection: clean session, and no window of its own. What it is told to send waits for `flush`.

    Args:
        client_id: A suffix is added, so that a late session cannot push out a new one.
        connect_timeout_s: For the TCP connection.
        tls: For a broker that is reached over TLS.
        credentials: User name and password; an empty name for neither.
        will: Topic and payload, retained.
        on_full: Called when the socket did not take all.
        on_failure: Takes what paho logs as an error: that alone says that a certificate is refused, or a packet.

    Attributes:
        is_amid_packet: A packet has come in part.
    """

    def __init__(
        self,
        client_id: str,
        connect_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        credentials: tuple[str, str] = ("", ""),
        will: tuple[str, bytes] | None = None,
        on_full: Callable[[], None] = lambda: None,
        on_failure: Callable[[str], None] = lambda text: None,
    ) -> None:
        own_id = f"{client_id}-{random.getrandbits(32):08x}"
        super().__init__(CallbackAPIVersion.VERSION2, own_id, clean_session=True, protocol=mqtt.MQTTv311)
        self.connect_timeout = connect_timeout_s
        if tls is not None:
            self.tls_set_context(tls)
        if credentials[0]:
            self.username_pw_set(*credentials)
        if will is not None:
            self.will_set(*will, qos=1, retain=True)
        self.max_inflight_messages_set(0)  # the window is `Outbox`'s
        self.enable_logger(_Failures(on_failure))
        self.on_socket_register_write = lambda *_: None  # thus paho queues what it is to send, and `flush` writes it
        self._ahead, self._at = b"", 0
        self._is_reading = self.is_amid_packet = False
        self._on_full = on_full

    @property
    def has_read(self) -> bool:
        """Returns whether there is more to read, though the socket may say that there is not."""
        sock = self.socket()
        return self._at < len(self._ahead) or (isinstance(sock, ssl.SSLSocket) and sock.pending() > 0)

    def can_read(self) -> bool:
        """Returns whether there is more to read, from the socket or before."""
        if self.has_read or (sock := self.socket()) is None:
            return self.has_read
        ready = select.poll()  # not select(): that fails past descriptor 1023
        ready.register(sock, select.POLLIN)
        return bool(ready.poll(0))

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Reads a packet, and hands it to its callback; what that publishes waits for the next `flush`."""
        self._is_reading = True
        try:
            return super().loop_read(max_packets)
        finally:
            self._is_reading = False

    def flush(self) -> MQTTErrorCode:
        """Writes what waits, as far as the socket takes it; from a callback, nothing."""
        if self._is_reading or not self.want_write():
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        code = self.loop_write()
        if self.want_write():
            self._on_full()
        return code

    def _sock_recv(self, bufsize: int) -> bytes:
        """Refuses packets that are too large, and reads ahead: 13 % of 400 kB."""
        if bufsize > messages.MAX_PACKET_BYTES:  # what is left of a packet; paho would take 268 MB
            raise ConnectionAbortedError(TOO_LARGE)
        self.is_amid_packet = bufsize > 1  # of its header paho asks for one at a time
        if self._at == len(self._ahead):
            if bufsize >= _AT_ONCE_BYTES:
                taken = super()._sock_recv(bufsize)
                self.is_amid_packet = len(taken) < bufsize
                return taken
            self._ahead, self._at = super()._sock_recv(_AT_ONCE_BYTES), 0
        taken = self._ahead[self._at : self._at + bufsize]
        self._at += len(taken)
        self.is_amid_packet = len(taken) < bufsize
        return taken

    def _handle_publish(self) -> MQTTErrorCode:
        """Gives a message to its callback with one copy of its payload, not four: 22 % of 400 kB, 19 % of 4 MB."""
        command, packet = self._in_packet["command"], memoryview(self._in_packet["packet"])
        qos, name_end = command >> 1 & 3, 2 + int.from_bytes(packet[:2], "big")
        start = name_end + 2 * qos
        if qos > 1 or name_end == 2 or start > len(packet):
            return super()._handle_publish()
        message = mqtt.MQTTMessage(int.from_bytes(packet[name_end:start], "big"), bytes(packet[2:name_end]))
        message.dup, message.qos, message.retain = bool(command & 8), qos, bool(command & 1)
        message.payload = bytes(packet[start:])
        self._handle_on_message(message)
        return self._send_puback(message.mid) if qos else MQTTErrorCode.MQTT_ERR_SUCCESS

    def _packet_write(self) -> MQTTErrorCode:
        """Makes one of the small packets that wait, and cuts it without a copy: 13 % of 200 B. DISCONNECT is paho's."""
        waiting, pieces, size = self._out_packet, [], 0
        while waiting and size < _AT_ONCE_BYTES and waiting[0]["command"] & 0xF0 != MessageType.DISCONNECT:
            packet = waiting.popleft()
            pieces.append(packet["packet"][packet["pos"] :])
            size += len(pieces[-1])
        if pieces:
            whole: Any = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            packet |= {"command": MessageType.PUBLISH, "qos": 1, "pos": 0, "to_process": size, "packet": whole}
            waiting.appendleft(packet)
        return super()._packet_write()


class _Failures(logging.Logger):
    """Takes paho's errors. By its `on_log` paho would format a line for each packet."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        super().__init__("paho", logging.ERROR)
        self._on_failure = on_failure

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        if level >= logging.ERROR:
            self._on_failure(str(msg) % args)
