"""A sender that signs and sends to a process that only reads: what publishing costs, without a broker's work."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import codec, messages, signing

_READ = """
import socket, sys
here = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while here.recv(1 << 20): pass
"""


class Sink:
    """Takes a policy's messages, as a session does.

    Args:
        out: Where sealed bytes go.
        is_local: What `policy_channel.Sender` says of it.

    Attributes:
        sent: Topic and message of all that was sent since `begin`.
        sent_bytes: Their bytes, seals included.
    """

    def __init__(self, out: socket.socket, *, is_local: bool) -> None:
        self._out = out
        self._sealer = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())
        self.is_local = is_local
        self.begin()

    def begin(self) -> None:
        """Forgets what was sent."""
        self.sent: list[tuple[str, messages.Message]] = []
        self.sent_bytes = 0

    def send(self, topic: str, message: messages.Message) -> int:
        """Encodes, signs and sends; returns the bytes."""
        sealed = self._sealer.seal(topic, *codec.pieces(message))
        self._out.sendall(sealed)
        return len(sealed)

    def send_all(self, outgoing: Sequence[tuple[str, messages.Message]]) -> None:
        """Sends messages that were sent before."""
        for topic, message in outgoing:
            self.send(topic, message)

    def tell(self, topic: str, message: messages.Message) -> int:
        size = self.send(topic, message)
        self.sent.append((topic, message))
        self.sent_bytes += size
        return size

    def retain(self, topic: str, message: messages.Message) -> int:
        return self.tell(topic, message)

    def forget(self, topic: str) -> None:
        pass


@contextlib.contextmanager
def opened(*, is_local: bool) -> Iterator[Sink]:
    """Starts the process that reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen([sys.executable, "-c", _READ, str(server.getsockname()[1])])
        try:
            out, _ = server.accept()
            with out:
                yield Sink(out, is_local=is_local)
        finally:
            process.wait(10.0)
