"""A request that the actor end."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Stopping:
    """A request to end, made on any thread.

    The acting loop asks in every turn, and whatever a turn waits for asks meanwhile: so asking is its sign of life.

    Args:
        wake: Set with the request, so that the loop does not sleep on.
        on_alive: Called whenever the acting loop asks.

    Attributes:
        requested: Whether it is to end.
        then: What is to follow.
    """

    def __init__(self, wake: threading.Event, on_alive: Callable[[], None] = lambda: None) -> None:
        self.wake = wake
        self._on_alive = on_alive
        self.requested = False
        self.then = ""

    def request(self, then: str = "") -> None:
        """Ends the actor soon; then it starts again (`restart`), the board does (`reboot`), or nothing follows."""
        self.then = then
        self.requested = True
        self.wake.set()

    def __call__(self) -> bool:
        """Tells that the loop lives, and returns whether it is to end. For the acting loop's thread alone."""
        self._on_alive()
        return self.requested
