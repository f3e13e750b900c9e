"""The console of a learner: lines that are logged, and one that renews itself on a terminal."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import sys
import time
from typing import TextIO

KEYS = ("env_steps", "updates", "return_mean", "published_return_mean", "epsilon", "policy_version", "updates_per_s")
_PLAIN_PERIOD_S = 5.0


class Console(logging.Handler):
    """Shows what is logged, each line for good, and below it the state of progress, which renews itself.

    Where the stream is no terminal, progress is a plain line now and then.

    Args:
        stream: Where it is shown.
    """

    @classmethod
    def on_stderr(cls) -> Console:
        """Shows on a copy of stderr, which stays readable while stderr_filter.py holds the original back."""
        return cls(os.fdopen(os.dup(sys.stderr.fileno()), "w"))

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._live = self._stream.isatty()
        self._line_open = False
        self._shown_at = -math.inf

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line, whatever an actor wrote into it."""
        shown = copy.copy(record)
        shown.msg, shown.args = printable(record.getMessage()), None
        return super().format(shown)

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a line that stays; a stream that was closed loses it, and ends nothing."""
        with contextlib.suppress(OSError, ValueError):
            print(f"{chr(10) if self._line_open else ''}{self.format(record)}", file=self._stream, flush=True)
            self._line_open = False

    def show(self, wall_s: float, row: dict[str, float | None]) -> None:
        """Shows the state of progress, from a row of metrics."""
        now = time.monotonic()
        if not self._live and now - self._shown_at < _PLAIN_PERIOD_S:
            return
        self._shown_at = now
        cells = [f"{key} {_short(value)}" for key in KEYS if (value := row.get(key)) is not None]
        line = f"{wall_s:6.1f} s  " + "  ".join(cells)
        self.acquire()  # other threads log
        try:
            if self._live:
                print(f"\r\x1b[2K{line}", end="", file=self._stream, flush=True)
                self._line_open = True
            else:
                print(line, file=self._stream, flush=True)
        finally:
            self.release()

    def close(self) -> None:
        """Ends the line that renews itself."""
        with contextlib.suppress(OSError, ValueError):
            if self._line_open:
                print(file=self._stream, flush=True)
                self._line_open = False
        super().close()


def printable(line: str) -> str:
    """Returns a line that a terminal only shows: actors name their environments, and may not clear a screen by that."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
