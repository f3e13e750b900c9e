"""How much experience may be on its way to the learner without a receipt, and when it is to be sent again.

As in TCP (RFC 5681): what has no receipt though the learner lives was lost, or the learner is behind; so one message is
sent again, and each receipt then opens the window further. A learner that says nothing is not sent anything again: it
stands still, and its broker would have to keep every copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT = 64
"""Messages."""
LIMIT_BYTES = 8_000_000
RESEND_S = 5.0
"""A learner that was heard so long after the last receipt has had its time: a broker may have dropped what it was sent
in silence (Mosquitto does, beyond its queue)."""


class Window:
    """Of one spool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit = LIMIT
        self._learner = ""
        self._heard_at = self._progress_at = clock()

    def has_room(self, messages: int, size_bytes: int) -> bool:
        """Whether one more may be sent, with so many on their way."""
        return messages == 0 or (messages < self._limit and size_bytes < LIMIT_BYTES)

    @property
    def is_overdue(self) -> bool:
        """What is on its way should have had its receipt."""
        return self._heard_at - self._progress_at > RESEND_S

    def hear(self, session: str) -> bool:
        """A learner that takes experience spoke; true if it is another one than before."""
        self._heard_at = self._clock()
        is_new, self._learner = self._learner not in ("", session), session
        return is_new

    def open(self) -> None:
        """A receipt came."""
        self._limit = min(LIMIT, self._limit + 1)
        self.restart()

    def narrow(self) -> None:
        """One message at a time, until receipts come."""
        self._limit = 1
        self.restart()

    def restart(self) -> None:
        """Time counts from now."""
        self._progress_at = self._clock()
