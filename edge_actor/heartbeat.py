"""The actor's pulse: its state, published again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Heartbeat:
    """A thread that calls `beat` every `period_s`, and at once when asked.

    A thread, so that a slow environment is not mistaken for a dead actor; that it stands still shows in its steps.

    Attributes:
        assigned_s: The learner of a large fleet asks for longer periods.
    """

    def __init__(self, beat: Callable[[], None], period_s: float) -> None:
        self._beat = beat
        self._period_s = period_s
        self.assigned_s = 0.0
        self._now = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def now(self) -> None:
        """Beats at once."""
        self._now.set()

    def close(self) -> None:
        self._stopping = True
        self._now.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            self._now.wait(max(self._period_s, self.assigned_s))
            self._now.clear()
            if self._stopping:
                return
            self._beat()
