"""A process that tries ordered settings: whatever becomes of it, the actor comes back, if need be with those before.

"Back" is said by the acting loop (`OrderRunner.poll`). A process that crashes, hangs or is refused does not say it:
the settings are then undone, at the time limit or at the next start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping

from edge_actor.orders import order_log

_log = logging.getLogger(__name__)
_END_S = 10.0
"""Seconds that the actor has to end in order."""


def start_again(environment: Mapping[str, str] = os.environ) -> None:
    """Runs this very program with its own arguments in the place of this process; it does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


class Trial:
    """Watches one process.

    Args:
        log: Knows the settings that are tried, if any are.
        again: Starts the program again.
    """

    def __init__(self, log: order_log.OrderLog, again: Callable[[], None] = start_again) -> None:
        self._log = log
        self._again = again
        self._ended = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self.is_undone = False

    def start(self, limit_s: float) -> None:
        """Watches, if there is something to try."""
        if self._log.begin():
            _log.info("trying the ordered settings for at most %g s", limit_s)
            threading.Thread(target=self._watch, args=(limit_s,), name="trial", daemon=True).start()

    def stops_by(self, stop: Callable[[], None]) -> None:
        """Takes the function that ends the actor in order."""
        self._stop = stop

    def failed(self, why: str) -> bool:
        """Undoes what is on trial; returns false if nothing is, and the failure has another cause."""
        if not self._log.is_on_trial:
            return False
        self.is_undone = True
        with contextlib.suppress(OSError):  # then the next start undoes it
            self._log.undo(why)
        return True

    def end(self) -> None:
        """Watches no longer: the process is about to end."""
        self._ended.set()

    def _watch(self, limit_s: float) -> None:
        if self._ended.wait(limit_s) or not self.failed(f"the actor was not back within {limit_s:g} s"):
            return
        self._stop()
        if not self._ended.wait(_END_S):
            self._again()  # it hangs
