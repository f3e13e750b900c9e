"""paho's client, which takes from the socket all that is there, and acknowledges what it took together.

paho itself asks for the first bytes of a packet one by one, for its body in the pieces that TLS decrypts, and sends
each PUBACK by itself. Each of these calls lets go of Python's lock, and beside a thread that computes it then waits
for that thread. What is overridden is private to paho: a release without it is right as well, and slower.
"""

from __future__ import annotations

import random
import ssl

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MessageType, MQTTErrorCode

_AT_ONCE_BYTES = 1 << 16


class Client(mqtt.Client):
    """For one connection: clean session, and no window of its own.

    Args:
        client_id: A suffix is added, so that a late session cannot push out a new one.
        connect_timeout_s: For the TCP connection.
    """

    def __init__(self, client_id: str, connect_timeout_s: float) -> None:
        own_id = f"{client_id}-{random.getrandbits(32):08x}"
        super().__init__(CallbackAPIVersion.VERSION2, own_id, clean_session=True, protocol=mqtt.MQTTv311)
        self.connect_timeout = connect_timeout_s
        self.max_inflight_messages_set(0)  # the window is `Link.publish`'s
        self._ahead, self._at = b"", 0
        self._taken = bytearray()

    @property
    def has_read(self) -> bool:
        """There is more to read, though the socket may say that there is not."""
        sock = self.socket()
        return self._at < len(self._ahead) or (isinstance(sock, ssl.SSLSocket) and sock.pending() > 0)

    def acknowledge(self) -> MQTTErrorCode:
        """Sends what is due for all messages that were read since the last call."""
        if not self._taken or self.socket() is None:
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        due, self._taken = bytes(self._taken), bytearray()
        return self._packet_queue(MessageType.PUBACK, due, 0, 1)

    def _sock_recv(self, bufsize: int) -> bytes:
        if self._at == len(self._ahead):
            if bufsize >= _AT_ONCE_BYTES:
                return super()._sock_recv(bufsize)
            self._ahead, self._at = super()._sock_recv(_AT_ONCE_BYTES), 0
        taken = self._ahead[self._at : self._at + bufsize]
        self._at += len(taken)
        return taken

    def _send_puback(self, mid: int) -> MQTTErrorCode:
        self._taken += bytes((MessageType.PUBACK, 2, mid >> 8, mid & 0xFF))
        return MQTTErrorCode.MQTT_ERR_SUCCESS
