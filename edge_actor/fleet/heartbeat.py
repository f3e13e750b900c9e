"""Publishes the actor's state again and again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from edge_actor.environment import failure

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Heartbeat:
    """A thread that calls `beat` every `period_s`.

    A thread, so that a slow environment is not mistaken for a dead actor; that it stands still shows in its steps.
    Whatever goes wrong in a beat, the next one is made.

    Attributes:
        assigned_s: The learner of a large fleet asks for longer periods.
        failures: Things that went wrong.
    """

    def __init__(self, beat: Callable[[], None], period_s: float) -> None:
        self._beat = beat
        self._said = ""
        self.failures = 0
        self._period_s = period_s
        self.assigned_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the thread; the first beat comes after a period."""
        self._thread.start()

    def beat(self) -> None:
        """Beats in the caller's thread."""
        self.attempt(self._beat, None)

    def attempt(self, make: Callable[[], T], otherwise: T) -> T:
        """Returns what `make` makes, or `otherwise` if it fails, which is counted, and logged if it is news."""
        try:
            return make()
        except Exception as error:  # of a sensor, say; the learner must not take us for dead
            self.failures += 1
            if (text := failure.text(error)) != self._said:
                self._said = text
                _log.warning("heartbeat, trouble number %d: %s", self.failures, text)
            return otherwise

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closed.wait(max(self._period_s, self.assigned_s)):
            self.beat()
