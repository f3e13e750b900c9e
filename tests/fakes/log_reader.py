"""Reads what one logger says, line by line and as it comes: for what is logged on other threads."""

from __future__ import annotations

import logging
import time

import pytest


class LogReader:
    """The lines of a module or a folder, from now on.

    Args:
        caplog: Records them.
        name: Of the logger, or of a folder of loggers.
    """

    def __init__(self, caplog: pytest.LogCaptureFixture, name: str) -> None:
        caplog.set_level(logging.INFO, logger=name)
        self._caplog, self._name = caplog, name
        self._read = len(self.lines)

    @property
    def lines(self) -> list[str]:
        """All that were logged since the test began."""
        own = (self._name, f"{self._name}.")
        return [
            record.getMessage()
            for record in list(self._caplog.records)
            if record.name == own[0] or record.name.startswith(own[1])
        ]

    def get(self, timeout_s: float = 10.0) -> str:
        """Returns the next line; waits for it."""
        deadline = time.monotonic() + timeout_s
        while self.empty():
            assert time.monotonic() < deadline, f"{self._name} logged nothing within {timeout_s:g} s"
            time.sleep(0.01)
        self._read += 1
        return self.lines[self._read - 1]

    def empty(self) -> bool:
        """Returns whether all lines were read."""
        return len(self.lines) <= self._read
