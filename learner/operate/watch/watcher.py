"""Follows a fleet's brokers as a member that may only read: whatever it said there, nobody would hear."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner.fleet import brokers, enrolment
from learner.operate.watch import fleet_view

_log = logging.getLogger(__name__)


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
        )
        self.brokers.subscribe(self._topics.learner_state, self._hear)
        self.brokers.subscribe(self._topics.every_actor("state"), self._hear)
        self.brokers.subscribe(self._topics.every_actor("assignment"), self._hear)

    def start(self) -> None:
        """Connects.

        Raises:
            BrokerUnreachable: No broker answered, or none let us in.
        """
        self._enrolment.read()
        self.brokers.start()

    def follow(self) -> None:
        """Takes in who was enrolled, and forgets who was revoked.

        Raises:
            IdentityError: The fleet has another key by now.
        """
        self._enrolment.follow()
        self._view.keep(self._enrolment.macs)

    @property
    def enrolled(self) -> Mapping[str, object]:
        """The actors that are enrolled, by name."""
        return self._enrolment.macs

    def close(self) -> None:
        """Disconnects."""
        self.brokers.close()

    def _hear(self, topic: str, payload: bytes, retained: bool) -> None:
        if not payload:
            return  # taken back
        try:
            if topic == self._topics.learner_state:
                body = self._verifier.open(topic, payload)
                self._view.hear_learner(codec.decode(messages.LearnerState, body), retained=retained)
                return
            actor_id = self._topics.actor_id(topic)
            if topic.endswith("/state"):
                body = self._enrolment.mac(actor_id).open(topic, payload)
                self._view.hear_actor(actor_id, codec.decode(messages.ActorState, body), retained=retained)
            elif actor_id in self._enrolment.macs:
                body = self._verifier.open(topic, payload)
                self._view.hear_assignment(actor_id, codec.decode(messages.Assignment, body))
        except errors.MessageError as error:
            self._view.count_refused(getattr(error, "reason", "") or "message")
