"""Follows a fleet's brokers as a member that may only read: whatever it said there, nobody would hear."""

from __future__ import annotations

import contextlib
import logging
import math
import ssl
import time
from collections.abc import Iterator, Mapping

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner.fleet import brokers, enrolment
from learner.operate.watch import fleet_view

_log = logging.getLogger(__name__)
READ_S = 0.08
"""Between two calls of `read`: what came meanwhile is read together, since most of what a message costs is that this
process wakes for it, and finds nothing of itself in the core's caches."""
_READING_S = 0.05
"""The most that a call reads: pages are served by the same thread."""
_ASKED_S = 10.0
"""Seconds after which an actor's assignment is asked for again: each grant is a new one, and what the page shows of it,
how often its actor speaks and whether it is refused, rarely changes."""
_ASKED_PER_S = 10
"""At most, of larger fleets: each one has a signature to verify."""
FOLLOW_S = 0.5
"""Between two calls of `follow`."""


class Watcher:
    """A connection to each broker of a fleet, whose states go into a view once their seals were checked.

    Args:
        fleet: Its keys: actors seal what they say with keys that they share with their fleet alone.
        addresses: Of the brokers; the fleet's own by default.
        view: Takes in what is heard.
        tls: For brokers that are reached over TLS.
    """

    def __init__(
        self, fleet: identity.Fleet, addresses: tuple[str, ...], view: fleet_view.FleetView, tls: ssl.SSLContext
    ) -> None:
        self._view, self._topics = view, topics.Topics(fleet.name)
        self._enrolment = enrolment.Enrolment(fleet)
        self._verifier = signing.LearnerVerifier(fleet.sealer.public_key)
        self.brokers = brokers.Brokers(
            addresses or fleet.brokers,
            f"actorq-{fleet.name}-watch",
            username=identity.WATCH_USER,
            password=fleet.watch_password,
            tls=tls,
            qos=0,  # the next state is soon here
            turn_s=4 * READ_S,
        )
        self._newest: dict[str, tuple[memoryview, bool]] = {}  # genuine states, by actor; decoded at the end of a read
        self._to_ask: list[str] = []  # of this round
        self._asked: set[str] = set()
        self.brokers.subscribe(self._topics.learner_state, self._hear_learner)
        self.brokers.subscribe(self._topics.every_actor("state"), self._hear_state)
        self.brokers.route(self._topics.every_actor("assignment"), self._hear_assignment)

    def start(self) -> None:
        """Connects.

        Raises:
            BrokerUnreachable: No broker answered, or none let us in.
        """
        self._enrolment.read()
        self.brokers.start()

    def read(self) -> bool:
        """Takes in what has come, in the caller's thread, without waiting; every READ_S.

        Of what an actor said more than once meanwhile, the newest: on a machine that has no time for this process, it
        is late by what it last waited, and not by all that it has missed.

        Returns:
            Whether there may be more, so that it should be called again at once.
        """
        ends, is_more = time.monotonic() + _READING_S, True
        while is_more and time.monotonic() < ends:
            before = self.brokers.bytes_received
            self.brokers.poll()
            is_more = self.brokers.bytes_received != before
        newest, self._newest = self._newest, {}
        for actor_id, (body, retained) in newest.items():
            with self._refusals_counted():
                self._view.hear_actor(actor_id, codec.decode(messages.ActorState, body), retained=retained)
        return is_more

    def follow(self) -> None:
        """Takes in who was enrolled, forgets who was revoked, and asks for some assignments; every FOLLOW_S.

        Raises:
            IdentityError: The fleet has another key by now.
        """
        self._enrolment.follow()
        enrolled = self._enrolment.macs
        self._view.keep(enrolled)
        self._to_ask = self._to_ask or sorted(enrolled)
        count = math.ceil(FOLLOW_S * min(_ASKED_PER_S, len(enrolled) / _ASKED_S))
        asked, self._to_ask = self._to_ask[:count], self._to_ask[count:]
        new = enrolled.keys() - self._asked
        self._asked = set(enrolled)
        self.brokers.follow([self._topics.assignment(name) for name in sorted(new.union(asked) & enrolled.keys())])

    @property
    def enrolled(self) -> Mapping[str, object]:
        """The actors that are enrolled, by name."""
        return self._enrolment.macs

    def close(self) -> None:
        """Disconnects."""
        self.brokers.close()

    def _hear_learner(self, topic: str, payload: bytes, retained: bool) -> None:
        if payload:  # else it was taken back
            with self._refusals_counted():
                body = self._verifier.open(topic, payload)
                self._view.hear_learner(codec.decode(messages.LearnerState, body), retained=retained)

    def _hear_state(self, topic: str, payload: bytes, retained: bool) -> None:
        if payload:
            with self._refusals_counted():
                actor_id = self._topics.actor_id(topic)
                self._newest[actor_id] = self._enrolment.mac(actor_id).open(topic, payload), retained

    def _hear_assignment(self, topic: str, payload: bytes, retained: bool) -> None:
        if payload:
            with self._refusals_counted():
                actor_id = self._topics.actor_id(topic)
                if actor_id in self._enrolment.macs:
                    body = self._verifier.open(topic, payload)
                    self._view.hear_assignment(actor_id, codec.decode(messages.Assignment, body))

    @contextlib.contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except errors.MessageError as error:
            self._view.count_refused(getattr(error, "reason", "") or "message")
