"""Sends receipts: an actor's says which of its messages are durable here, so that it may forget them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from broker.contract import messages
from learner.fleet import roster, session


class Receipts:
    """Sends what is owed, one receipt an actor, however many messages it covers.

    Args:
        fleet: Seals and retains them.
        actors: Knows how often the fleet's size allows receipts.
        owed: Returns them with their actors, once each.

    Attributes:
        spent_s: Seconds that sending took so far.
    """

    def __init__(
        self,
        fleet: session.Session,
        actors: roster.Roster,
        owed: Callable[[], Iterable[tuple[str, messages.Receipt]]],
    ) -> None:
        self._session, self._roster, self._owed = fleet, actors, owed
        self._sent_at = -math.inf
        self.spent_s = 0.0

    def send(self, *, at_once: bool) -> None:
        """Sends what is owed, if that is due or has to be `at_once`."""
        now = time.monotonic()
        if not at_once and now - self._sent_at < self._roster.receipt_s:
            return
        self._sent_at, topics = now, self._session.topics
        began = time.perf_counter()
        self._session.retain_all((topics.receipt(actor_id), receipt) for actor_id, receipt in self._owed())
        self.spent_s += time.perf_counter() - began
