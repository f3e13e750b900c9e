"""Files of a run that training does not depend on: where the disk takes none of it, that is said, counted and survived.

The ledger is not among them: what it cannot write gets no receipt, and the learner ends.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

_SAY_S = 60.0


class Records:
    """Counts what could not be written, and says so, of each kind once a minute. From any thread.

    Args:
        say: Takes one line for people.
        now_s: A clock that never goes back.

    Attributes:
        failed: Writes that failed, by kind.
    """

    def __init__(self, say: Callable[[str], None], now_s: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._now_s = now_s
        self._said_at: dict[str, float] = {}
        self.failed: Counter[str] = Counter()

    @contextlib.contextmanager
    def attempt(self, kind: str) -> Iterator[None]:
        """What is written inside may fail.

        Args:
            kind: What it is, in the plural.
        """
        try:
            yield
        except OSError as error:
            self.note(kind, error)

    def note(self, kind: str, error: Exception) -> None:
        """One write failed."""
        self.failed[kind] += 1
        now_s = self._now_s()
        if now_s - self._said_at.get(kind, -math.inf) >= _SAY_S:
            self._said_at[kind] = now_s
            first = str(error).strip().partition("\n")[0]
            self._say(f"{kind} cannot be written ({self.failed[kind]} times now): {first}; training goes on without")
