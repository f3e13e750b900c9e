"""Takes what arrives out of the inbox; where one message follows another, by reading in the thread that wants it.

A network thread would pass it Python's lock several times a message, which took a fifth of all that one costs.
"""

from __future__ import annotations

import time

from broker.program import stopwatch
from learner.fleet import brokers
from learner.fleet.arriving import inbox


class Reader:
    """Reads the sockets of all brokers as long as messages follow one another, and leaves them to their threads else.

    Args:
        waiting: Where messages wait that were read.
        times: Gets what reading takes as `receive`.

    Attributes:
        waited_s: How long `next` has waited for something to arrive.
    """

    def __init__(self, waiting: inbox.Inbox, times: stopwatch.Stopwatch) -> None:
        self._inbox, self._times = waiting, times
        self._came = False  # a message, the last time we looked
        self.waited_s = 0.0

    def next(self, links: brokers.Brokers, wait_s: float) -> inbox.Arrived | None:
        """Returns what came first; waits for it up to `wait_s`; None if nothing came, or if woken."""
        raw = self._inbox.get(0.0)
        if raw is None and self._came:
            with self._times.time("receive", 0):
                links.poll()
            raw = self._inbox.get(0.0)
        if raw is None:
            links.rest()  # the caller may compute now: what a full socket did not take must go out meanwhile
            began = time.perf_counter()
            raw = self._inbox.get(wait_s)
            self.waited_s += time.perf_counter() - began
        self._came = raw is not None
        return raw
