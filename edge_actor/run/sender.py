"""Sends experience, reports, and answers to orders."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from broker.contract import messages
from edge_actor.experience import spool
from edge_actor.run import fleet_connection

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
        self._answers: collections.deque[tuple[str, messages.Message]] = collections.deque()

    def respond(self, report: messages.Report | None) -> None:
        """Has a report sent soon, or says that there will be none; from any thread."""
        if report is not None:
            self._answers.append((self._connection.topics.report(self._connection.actor_id), report))
        self._connection.inbox.wake.set()

    def answer(self, answer: messages.Answer) -> None:
        """Has the answer to an order sent soon."""
        one = self._connection.topics.answer(self._connection.actor_id), answer
        if one not in self._answers:  # a broker may repeat orders, and take no answer
            self._answers.append(one)
        self._connection.inbox.wake.set()

    def send(self) -> None:
        """Sends what waits, until the link refuses."""
        if self._connection.has_reconnected():
            self._spool.rewind()
        self._spool.pump(self._connection.publish_experience)
        while self._answers:
            topic, message = self._answers[0]
            if not self._connection.link.publish(topic, self._connection.seal(topic, message)):
                return
            self._answers.popleft()

    def wait(self) -> None:
        """Waits until something came in, or there is something to send again; not long."""
        self._wait(bool(self._spool.unsent or self._answers))

    def hand_over(self, told_to_stop: Callable[[], bool]) -> None:
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
