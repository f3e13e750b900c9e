"""Words of a program to people: `logging` of the standard library, one logger a module, one handler a process.

A module has `_log = logging.getLogger(__name__)` and writes to it, as info what is good to know, as a warning what
people should look at, as an error what ended something. A program calls `configure`. Lines go to stderr as they are;
under systemd each has its priority before it (sd-daemon(3)), which `journalctl -p warning` goes by.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TextIO

PACKAGES = ("broker", "edge_actor", "learner")
_REMEMBERED = 4096  # keys; they may come from the network
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


def configure(handler: logging.Handler | None = None, level: int = logging.INFO) -> None:
    """Shows what our packages log, by this handler; None writes to stderr."""
    handler = handler or _Stderr()
    handler.addFilter(Once())
    handler.setFormatter(_Priority() if _is_journal(sys.stderr) else logging.Formatter("%(message)s"))
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False  # other libraries give the root logger a handler, which would say it all once more


def once(key: Hashable = None, again_s: float = math.inf) -> dict[str, Any]:
    """Returns `extra` of a line that is said once; a `Once` filter lets it pass.

    Args:
        key: What tells it from other lines of its logger; None takes the whole line.
        again_s: It may be said again after so long.
    """
    return {"once_key": key, "once_again_s": again_s}


class Once(logging.Filter):
    """Keeps back what has been said already, of lines that are to be said `once`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._said_at: dict[Hashable, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True for what is to be shown."""
        again_s = getattr(record, "once_again_s", None)
        if again_s is None:
            return True
        chosen = record.__dict__["once_key"]
        key = (record.name, record.getMessage() if chosen is None else chosen)
        with self._lock:
            now = self._clock()
            if now - self._said_at.get(key, -math.inf) < again_s:
                return False
            self._said_at[key] = now
            if len(self._said_at) > _REMEMBERED:
                del self._said_at[next(iter(self._said_at))]
        return True


class _Stderr(logging.Handler):
    """Writes to what is sys.stderr at that time; one that was closed loses the line and ends nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


class _Priority(logging.Formatter):
    """Begins each line as sd-daemon(3) says."""

    def format(self, record: logging.LogRecord) -> str:
        level = next((priority for at_least, priority in _PRIORITIES if record.levelno >= at_least), 7)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).splitlines())


def _is_journal(stream: TextIO) -> bool:
    """Returns whether a stream goes to journald, as systemd.exec(5) says under $JOURNAL_STREAM."""
    try:
        about = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{about.st_dev}:{about.st_ino}"
