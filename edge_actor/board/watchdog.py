"""Tells systemd that the actor serves, and that its loop is alive (sd_notify(3), Type=notify and WatchdogSec=).

The acting loop itself says so, not a thread beside it: an environment that blocks for ever looks well from a thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

_SHARE = 4  # signs of life in one WatchdogSec; systemd's manual asks for at least 2


class Watchdog:
    """Speaks to systemd.

    Args:
        to: Sends to systemd; None (started by hand): it says nothing.
        address: Of the socket that systemd named.
        period_s: Between two signs of life; 0: none are asked for.
    """

    def __init__(self, to: socket.socket | None, address: str, period_s: float) -> None:
        self._socket = to
        self._address = address
        self._period_s = period_s
        self._next = 0.0
        self._ready = False

    @classmethod
    def open(cls) -> Watchdog:
        """Opens the socket that systemd's variables name, if they are there."""
        address = os.environ.pop("NOTIFY_SOCKET", "")  # popped: no child of ours is to speak for us
        limit_us = os.environ.pop("WATCHDOG_USEC", "0")
        meant = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        period_s = int(limit_us) / 1e6 / _SHARE if limit_us.isdecimal() and meant else 0.0
        if address[:1] not in ("/", "@"):
            return cls(None, "", period_s)
        to = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        to.setblocking(False)
        return cls(to, "\0" + address[1:] if address[0] == "@" else address, period_s)

    @property
    def supervised(self) -> bool:
        """Returns whether systemd started this process, and wants it to go on trying."""
        return self._socket is not None

    def alive(self) -> None:
        """Tells that its caller does not hang, if that is due; costs 0.1 us where it is not.

        The first call says that the actor is ready.
        """
        if self._socket is None:
            return
        now = time.monotonic()
        if not self._ready or (self._period_s and now >= self._next):
            # A systemd that takes nothing now is told at the next call.
            with contextlib.suppress(OSError):
                self._socket.sendto(b"WATCHDOG=1" if self._ready else b"READY=1", self._address)
                self._ready, self._next = True, now + self._period_s
