"""Decides who serves a connection's socket: its caller, as long as that takes turns, or else its network thread."""

from __future__ import annotations

import threading
import time

PERIOD_S = 0.1


class Turns:
    """The turns of a caller, as its network thread sees them.

    Args:
        period_s: A caller that took no turn for so long is busy with something else.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._resting = threading.Event()
        self._resting.set()
        self._begun_at = -period_s

    def begin(self) -> None:
        """Takes note that the caller serves the socket now, and soon again."""
        self._begun_at = time.monotonic()
        self._resting.clear()

    def rest(self) -> None:
        """Leaves the socket to the network thread again, at once."""
        self._resting.set()

    def wait_for_rest(self) -> bool:
        """Waits until the caller rests or took no turn for a while; returns false if it does neither."""
        return self._resting.wait(self._period_s) or time.monotonic() - self._begun_at >= self._period_s
