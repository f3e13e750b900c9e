"""paho's client, driven by its public loop interface, with two private methods overridden. The only file with paho.

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
import time
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MessageType, MQTTErrorCode
from paho.mqtt.exception import MalformedPacket

from broker.contract import messages

KNOWN_PAHO = "2.2."
"""The releases whose private methods were read; setup.cfg has the same bound."""
TOO_LARGE = "it sends more than any policy has"
_AT_ONCE_BYTES = 1 << 16
_READS_AT_ONCE = 100
"""Of one packet; then what is to be sent has its turn."""
_LEAST_BYTES, _HEADER_BYTES = 2, 5
"""Of a packet's header: a byte for its kind, and its length in one to four."""
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
        self._buffer = bytearray(_AT_ONCE_BYTES)
        self._begin = self._end = 0  # of what was read, from the start of a packet on
        self._header, self._needed = 0, _LEAST_BYTES  # bytes of that packet's header, if known; and of all of it
        self._is_reading = False
        self._on_full, self._on_failure = on_full, on_failure

    @property
    def has_read(self) -> bool:
        """Returns whether there is more to read, though the socket may say that there is not."""
        sock = self.socket()
        return self._end - self._begin >= self._needed or (isinstance(sock, ssl.SSLSocket) and sock.pending() > 0)

    @property
    def is_amid_packet(self) -> bool:
        """Returns whether a packet has come in part."""
        return self._begin < self._end

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

    def _packet_read(self) -> MQTTErrorCode:
        """Reads ahead, and hands on a message with one copy of its payload, not four. Refuses what is too large."""
        try:
            is_whole = self._read_first()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            is_whole = False
        except OSError as error:
            self._on_failure(f"failed to receive on socket: {error}")
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        try:
            return self._handle_first() if is_whole else MQTTErrorCode.MQTT_ERR_AGAIN
        except MalformedPacket:
            return MQTTErrorCode.MQTT_ERR_PROTOCOL

    def _read_first(self) -> bool:
        """Reads until the first packet is whole, or for long enough; returns whether it is.

        Raises:
            BlockingIOError, SSLWantReadError, SSLWantWriteError: No more has come.
            OSError: The connection is over, or is to be.
        """
        for _ in range(_READS_AT_ONCE):
            if self._end - self._begin >= self._needed and self._is_whole():
                return True
            if self._begin + self._needed > len(self._buffer) or self._begin == self._end:
                self._make_room()
            sock: Any = self.socket()
            size = sock.recv_into(memoryview(self._buffer)[self._end :]) if sock is not None else 0
            if not size:
                raise ConnectionResetError("the broker has closed the connection")
            self._end += size
            with self._msgtime_mutex:
                self._last_bytes_received = time.monotonic()
        return False

    def _make_room(self) -> None:
        """Has the first packet begin where the buffer does, which is as large as it needs."""
        rest = self._buffer[self._begin : self._end]
        size = max(_AT_ONCE_BYTES, self._needed)
        if len(self._buffer) != size:
            self._buffer = bytearray(size)
        self._buffer[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)

    def _is_whole(self) -> bool:
        """Returns whether all of the first packet is here; notes how long its header is, and what it needs in all.

        Raises:
            ConnectionAbortedError: It is too large, or no packet.
        """
        if not self._header:
            size = 0
            for at, byte in enumerate(self._buffer[self._begin + 1 : min(self._begin + _HEADER_BYTES, self._end)]):
                size |= (byte & 0x7F) << 7 * at
                if byte < 0x80:
                    break
            else:
                self._needed = 1 + self._end - self._begin
                if self._needed > _HEADER_BYTES:
                    raise ConnectionAbortedError("it sends what is no MQTT")
                return False
            if size > messages.MAX_PACKET_BYTES:  # paho would take 268 MB
                raise ConnectionAbortedError(TOO_LARGE)
            self._header, self._needed = at + 2, at + 2 + size
        return self._end - self._begin >= self._needed

    def _handle_first(self) -> MQTTErrorCode:
        """Takes the first packet out of what was read; hands a message to its callback, and all else to paho."""
        command, message = self._buffer[self._begin], None
        packet = memoryview(self._buffer)[self._begin + self._header : self._begin + self._needed]
        qos, name_end = command >> 1 & 3, 2 + int.from_bytes(packet[:2], "big")
        start = name_end + 2 * qos
        if command & 0xF0 == MessageType.PUBLISH and qos < 2 and name_end > 2 and start <= len(packet):
            message = mqtt.MQTTMessage(int.from_bytes(packet[name_end:start], "big"), bytes(packet[2:name_end]))
            message.dup, message.qos, message.retain = bool(command & 8), qos, bool(command & 1)
            message.payload = bytes(packet[start:])
        else:
            whole: Any = {"command": command, "packet": bytearray(packet), "remaining_length": len(packet), "pos": 0}
            self._in_packet |= whole
        self._begin += self._needed
        self._header, self._needed = 0, _LEAST_BYTES
        if message is None:
            return self._packet_handle()
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
