"""Orders that wait for actors that are away: a learner that trains leaves them again, since brokers may forget."""

from __future__ import annotations

import logging
import math
import sqlite3
import time

from broker.contract import errors
from learner.fleet import session
from learner.operate.orders import order_book

_log = logging.getLogger(__name__)
_PERIOD_S = 2.0
"""Between two looks whether somebody wrote into the book."""


class StandingOrders:
    """Keeps what waits on the brokers, by a session's connections, which send it anew whenever they are made.

    Args:
        book: Of the fleet's orders; None does nothing.
        fleet: The learner's session.
    """

    def __init__(self, book: order_book.OrderBook | None, fleet: session.Session) -> None:
        self._book = book
        self._session = fleet
        self._looked_at = -math.inf
        self._version = 0
        self._left: set[str] = set()

    @classmethod
    def of(cls, fleet: session.Session) -> StandingOrders:
        """Opens the fleet's book. That it cannot be used is said, and ends no training."""
        try:
            book = order_book.OrderBook.open(fleet.fleet.directory)
        except errors.StorageError as error:
            _log.warning("orders that wait are not left at the brokers again: %s", error.what)
            return cls(None, fleet)
        return cls(book, fleet)

    def leave(self, now_s: float) -> None:
        """Leaves what waits, if the book has changed, and takes back what no longer does. `now_s` is monotonic."""
        if self._book is None or now_s - self._looked_at < _PERIOD_S:
            return
        self._looked_at = now_s
        try:
            version = self._book.version
            if version == self._version:
                return
            waiting = self._book.waiting(time.time())
        except sqlite3.Error as error:
            _log.warning("the book of orders cannot be read: %s", error)
            return
        self._version = version
        names = self._session.topics
        for gone in self._left - waiting.keys():
            self._session.forget(names.orders(gone))
        self._session.retain_all((names.orders(name), orders) for name, orders in waiting.items())
        self._left = set(waiting)

    def close(self) -> None:
        """Closes the book."""
        if self._book is not None:
            self._book.close()
