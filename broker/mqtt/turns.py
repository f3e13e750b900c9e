"""Who serves a connection's socket: its caller, as long as that takes turns, or else its network thread."""

from __future__ import annotations

import threading
import time

PERIOD_S = 0.1  # a caller that took no turn for so long is busy with something else


class Turns:
    """Turns of the caller, as its network thread sees them."""

    def __init__(self) -> None:
        self._resting = threading.Event()
        self._resting.set()
        self._taken_at = -PERIOD_S

    def take(self) -> None:
        """The caller serves the socket now, and soon again."""
        self._taken_at = time.monotonic()
        self._resting.clear()

    def rest(self) -> None:
        """The network thread shall serve it again, at once."""
        self._resting.set()

    def go_on(self) -> bool:
        """Waits until the caller rests or took no turn for a while; true if it goes on."""
        return not self._resting.wait(PERIOD_S) and time.monotonic() - self._taken_at < PERIOD_S
