"""Ends the wait of a thread that polls a socket."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """A pair of sockets, by which whoever polls `fileno` wakes up when somebody calls."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self._read.fileno()

    def call(self) -> None:
        """Wakes the thread."""
        with contextlib.suppress(BlockingIOError):  # it is about to wake up
            self._write.send(b"\0")

    def clear(self) -> None:
        """Forgets the calls so far."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)
