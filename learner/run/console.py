"""What a person sees while the learner works: one line that renews itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TextIO

KEYS = ("env_steps", "updates", "return_mean", "published_return_mean", "epsilon", "policy_version", "updates_per_s")
_PLAIN_PERIOD_S = 5.0


class Console:
    """Writes to a stream for people.

    Args:
        stream: None takes a copy of stderr, which stays readable while chatter.py holds the original back.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or os.fdopen(os.dup(sys.stderr.fileno()), "w")
        stream = self._stream
        self._live = stream.isatty()
        self._line_open = False
        self._shown_at = -math.inf

    def say(self, line: str) -> None:
        """A line that stays."""
        print(f"{chr(10) if self._line_open else ''}{printable(line)}", file=self._stream, flush=True)
        self._line_open = False

    def show(self, wall_s: float, row: dict[str, float | None]) -> None:
        """The state of progress, from a row of metrics."""
        now = time.monotonic()
        if not self._live and now - self._shown_at < _PLAIN_PERIOD_S:
            return
        self._shown_at = now
        cells = [f"{key} {_short(value)}" for key in KEYS if (value := row.get(key)) is not None]
        line = f"{wall_s:6.1f} s  " + "  ".join(cells)
        if self._live:
            print(f"\r\x1b[2K{line}", end="", file=self._stream, flush=True)
            self._line_open = True
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the line that renews itself."""
        if self._line_open:
            print(file=self._stream)
            self._line_open = False


def printable(line: str) -> str:
    """One line that a terminal only shows: actors name their environments, and may not clear a screen by that."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
