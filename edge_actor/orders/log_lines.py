"""The last lines that this process logged, for who asks from afar."""

from __future__ import annotations

import collections
import logging
import time

from broker.contract import messages
from broker.program import logs

KEPT = 1000
_LEVELS = {logging.WARNING: " warning:", logging.ERROR: " error:"}


class LogLines(logging.Handler):
    """Keeps lines, each with its time and number."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: collections.deque[str] = collections.deque(maxlen=KEPT)
        self.count = 0
        self.addFilter(logs.Once())

    @classmethod
    def attached(cls) -> LogLines:
        """Returns one that hears all that our packages log from now on, beside whatever shows it."""
        made = cls()
        for name in logs.PACKAGES:
            logging.getLogger(name).addHandler(made)
        return made

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(record.created))
        for line in logging.Formatter("%(message)s").format(record).splitlines():
            self._kept.append(f"{at}{_LEVELS.get(record.levelno, '')} {line}"[: messages.MAX_NAME_CHARS])
            self.count += 1

    def last(self, lines: int) -> list[str]:
        """Returns the last lines, at most so many as are kept."""
        kept = list(self._kept)
        return kept[max(0, len(kept) - lines) :]

    def since(self, count: int) -> list[str]:
        """Returns the lines after the first `count`; says how many of them are no longer kept."""
        missing = self.count - count
        lost = missing - len(self._kept)
        return ([f"... {lost} lines were not kept"] if lost > 0 else []) + self.last(missing)
