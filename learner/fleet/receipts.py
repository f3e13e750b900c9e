"""Sends receipts: an actor's says which of its messages are durable here, so that it may forget them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from broker.contract import messages, topics
from learner.fleet import roster, session


def send(
    retain_all: Callable[[Iterable[tuple[str, messages.Message]]], None],
    names: topics.Topics,
    owed: Iterable[tuple[str, messages.Receipt]],
) -> None:
    """Retains receipts, each for its actor.

    Args:
        retain_all: Seals and retains messages, each with its topic.
        names: The fleet's topics.
        owed: Receipts with their actors.
    """
    retain_all((names.receipt(actor_id), receipt) for actor_id, receipt in owed)


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
        self._sent_at = now
        began = time.perf_counter()
        send(self._session.retain_all, self._session.topics, self._owed())
        self.spent_s += time.perf_counter() - began
