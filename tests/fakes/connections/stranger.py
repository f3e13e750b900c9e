"""A stranger on a broker's port: whoever else may answer there, without the keys of the fleet's broker."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from broker.fleet import certificates, identity

ALERT = b"\x15\x03\x03\x00\x02\x02\x28"
"""A TLS alert: fatal, handshake_failure."""
NOT_AUTHORIZED = b"\x20\x02\x00\x05"


class Stranger:
    """A server that listens until it is closed; `manner` says how it answers, and may change.

    Args:
        fleet: Whose own broker it is in the manner "refuses the password", or at a date that is none.
        directory: For its certificates.
    """

    def __init__(self, fleet: identity.Fleet, directory: Path, manner: str) -> None:
        self.manner = manner
        self._own = _context(fleet.broker_credential(), directory / "own.pem")
        self._foreign = _context(certificates.Authority.create("elsewhere"), directory / "foreign.pem")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.address = f"mqtts://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):  # it was closed before
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10.0)

    def _serve(self) -> None:
        answers: dict[str, Callable[[socket.socket], None]] = {
            "self-signed": lambda raw: self._foreign.wrap_socket(raw, server_side=True).close(),
            "alert": lambda raw: _answer(raw, ALERT),
            "plain": lambda raw: _answer(raw, b"220 mail.example ESMTP\r\n"),
            "refuses the password": lambda raw: _answer(self._own.wrap_socket(raw, server_side=True), NOT_AUTHORIZED),
            "own": lambda raw: self._own.wrap_socket(raw, server_side=True).close(),
        }
        while True:
            try:
                raw, _ = self._listening.accept()
            except OSError:  # the test is over
                return
            with raw, contextlib.suppress(OSError):
                raw.settimeout(5.0)
                answers[self.manner](raw)


def _answer(to: socket.socket, answer: bytes) -> None:
    """Reads what the client says first, so that closing does not reset the connection, and waits until it goes."""
    with to:
        to.recv(4096)
        to.sendall(answer)
        while to.recv(4096):
            pass


def _context(credential: bytes, file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    file.write_bytes(credential)
    context.load_cert_chain(file)
    return context
