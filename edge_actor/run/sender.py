"""Sends experience and reports."""

from __future__ import annotations

import collections
import functools
import time

from broker.contract import messages
from edge_actor.experience import spool
from edge_actor.run import fleet_connection, stopping

IDLE_S = 0.2
_UNSENT_IDLE_S = 0.005  # the link refuses while its window is full, and does not say when it opens
_HAND_OVER_S = 5.0  # for receipts of what a refused actor holds: under this name it may never start again


class Sender:
    """Sends what the spool holds and what commands were answered, as far as the link takes it.

    Args:
        connection: To the fleet.
        outbox: Holds the experience.
    """

    def __init__(self, connection: fleet_connection.FleetConnection, outbox: spool.Spool) -> None:
        self._connection = connection
        self._spool = outbox
        self._reports: collections.deque[messages.Report] = collections.deque()
        topic = connection.topics.experience(connection.actor_id)
        self._publish = functools.partial(connection.link.publish, topic)

    def respond(self, report: messages.Report | None) -> None:
        """Has a report sent soon, or says that there will be none; from any thread."""
        self._reports.extend([report] if report else ())
        self._connection.inbox.wake.set()

    def send(self) -> None:
        """Sends what waits, until the link refuses."""
        if self._connection.has_reconnected():
            self._spool.rewind()
        self._spool.pump(self._publish)
        while self._reports:
            topic = self._connection.topics.report(self._connection.actor_id)
            if not self._connection.link.publish(topic, self._connection.seal(topic, self._reports[0])):
                return
            self._reports.popleft()

    def wait(self) -> None:
        """Waits until something came in, or there is something to send again; not long."""
        self._wait(bool(self._spool.unsent or self._reports))

    def hand_over(self, told_to_stop: stopping.Stopping) -> None:
        """Sends what is held, until all of it has its receipt or time is up; the rest stays in the spool's files."""
        inbox = self._connection.inbox
        self._connection.link.rest()
        deadline = time.monotonic() + _HAND_OVER_S
        while len(self._spool) and time.monotonic() < deadline and not told_to_stop():
            self.send()
            self._wait(self._spool.unsent)
            while (message := inbox.get()) is not None:
                if isinstance(message, messages.Receipt):
                    self._spool.acknowledge(message)

    def _wait(self, is_unsent: bool) -> None:
        wake = self._connection.inbox.wake
        wake.wait(_UNSENT_IDLE_S if is_unsent else IDLE_S)
        wake.clear()
