"""A socket that lets MQTT clients in as a broker does, and then sends them whatever a test likes."""

from __future__ import annotations

import queue
import socket
import threading

import numpy as np

GARBAGE = {
    # A PUBLISH of 268 MB, the largest that MQTT has; and then more and more
    "endless data": b"\x30\xff\xff\xff\x7f\x00\x01t" + bytes(1 << 20),
    "a topic that is no text": b"\x30\x04\x00\x02\xff\xff",
    "a length that is none": b"\x30\xff\xff\xff\xff\xff",
    "a packet too short": b"\x32\x01\x00",
    "a topic longer than its packet": b"\x30\x03\xff\xff\x00",
    "no such packet": b"\xf5\x02\x00\x00",
    "random": np.random.default_rng(7).bytes(4096),
}


class RawBroker:
    """Serves one client after the other: CONNACK, SUBACK, then `payload` until it goes.

    Attributes:
        clients: One entry for each that left.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.clients: queue.Queue[OSError] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> RawBroker:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10.0)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:  # the test is over
                return
            with client:
                client.settimeout(10.0)
                try:
                    client.recv(4096)
                    client.sendall(b"\x20\x02\x00\x00")
                    subscribe = client.recv(4096)
                    filters = max(1, subscribe.count(b"actorq/"))
                    client.sendall(bytes([0x90, 2 + filters]) + subscribe[2:4] + b"\1" * filters)
                    while True:
                        client.sendall(self._payload)
                except OSError as error:
                    self.clients.put(error)
