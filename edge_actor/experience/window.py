"""The window of experience that may be on its way to the learner without a receipt, and when it is to be sent again.

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
    """Decides what one spool may send."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit = LIMIT
        self._learner = ""
        self._heard_at = self._progress_at = clock()

    def has_room(self, messages: int, size_bytes: int) -> bool:
        """Returns whether one more may be sent, with so many on their way."""
        return messages == 0 or (messages < self._limit and size_bytes < LIMIT_BYTES)

    @property
    def is_overdue(self) -> bool:
        """Returns whether what is on its way should have had its receipt."""
        return self._heard_at - self._progress_at > RESEND_S

    def follow_learner(self, session: str) -> bool:
        """Takes note of a learner that takes experience; returns whether it is another one than before."""
        self._heard_at = self._clock()
        is_new, self._learner = self._learner not in ("", session), session
        return is_new

    def widen(self) -> None:
        """Lets one message more be on its way: a receipt came."""
        self._limit = min(LIMIT, self._limit + 1)
        self.restart()

    def narrow(self) -> None:
        """Lets one message at a time be on its way, until receipts come."""
        self._limit = 1
        self.restart()

    def restart(self) -> None:
        """Counts the time without a receipt from now."""
        self._progress_at = self._clock()
