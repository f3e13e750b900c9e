"""The actor's connection to its fleet: what the learner says comes in checked, what the actor says goes out sealed."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Sequence

from broker.contract import address, codec, messages, signing, topics
from broker.fleet import identity
from broker.mqtt import link
from edge_actor.board import clock
from edge_actor.environment import task
from edge_actor.fleet import inbox, state_sequence

_log = logging.getLogger(__name__)


class FleetConnection:
    """Everything of an actor that does not depend on its environment.

    Args:
        bundle: Who the actor is.
        brokers: Tried in turn.
        boot: The number of this process.
        tls: For brokers that are reached over TLS.

    Attributes:
        inbox: Messages that wait for the acting loop, and its `wake`.
        link: The connection itself.
        task: The environment that the learner names.
        experience_topic: Where this actor's experience goes.
        date: Returns Unix time, in seconds; None where this board cannot know it. A learner behind brokers of this
            machine has the same clock, right or wrong.
        states: Numbers this actor's states.
        on_announced: Called on the network thread with the order of the learner's newest policy.
    """

    def __init__(self, bundle: identity.Bundle, brokers: Sequence[str], boot: int, tls: ssl.SSLContext) -> None:
        self.actor_id, self.boot, self.topics = bundle.actor_id, boot, topics.Topics(bundle.fleet)
        self.verifier = signing.LearnerVerifier(bundle.learner_key)
        self._mac = signing.ActorMac(bundle.mac_key)
        self._reconnected = False
        self.experience_topic = self.topics.experience(self.actor_id)
        local = all(address.is_loopback(address.Address.parse(broker).host) for broker in brokers)
        self.date: Callable[[], float | None] = time.time if local else clock.now_s
        self.inbox = inbox.Inbox(self.verifier, boot)
        self.task = task.Task()
        self.states = state_sequence.StateSequence(boot, lambda state: self.seal(self.state_topic, state))
        self.on_announced: Callable[[messages.Order], None] = lambda newest: None
        self.link = link.Link(
            brokers,
            self.actor_id,
            username=self.actor_id,
            password=bundle.password,
            tls=tls,
            will=(self.state_topic, self.states.will),
            on_connect=self._on_connect,
        )
        opener, put = self.inbox.opener, self.inbox.put
        self.link.subscribe(self.topics.learner_state, opener(messages.LearnerState, self._on_learner))
        self.link.subscribe(self.topics.assignment(self.actor_id), opener(messages.Assignment, put))
        self.link.subscribe(self.topics.receipt(self.actor_id), opener(messages.Receipt, put))
        self.link.subscribe(self.topics.command(self.actor_id), opener(messages.Command, put))
        self.link.subscribe(self.topics.orders(self.actor_id), opener(messages.Orders, put))

    @property
    def state_topic(self) -> str:
        """The topic at which this actor's state is retained."""
        return self.topics.actor_state(self.actor_id)

    def seal(self, topic: str, message: messages.Message) -> bytes:
        """Returns a message as it is published there."""
        return self._mac.seal(topic, codec.encode(message))

    def seal_experience(self, body: bytes) -> bytes:
        """Returns an encoded message of experience as it is published."""
        return self._mac.seal(self.experience_topic, body)

    def publish_experience(self, sealed: bytes) -> bool:
        """Sends experience where it goes now; returns false if the link does not take it."""
        return self.link.publish(self.experience_topic, sealed)

    def follow_shard(self, shard: int) -> bool:
        """Sends experience to the worker of a shard from now on (-1: to the learner); returns whether that is new."""
        before, self.experience_topic = self.experience_topic, self.topics.experience(self.actor_id, shard)
        return self.experience_topic != before

    def has_reconnected(self) -> bool:
        """Returns whether a connection was made since the last call."""
        reconnected, self._reconnected = self._reconnected, False
        return reconnected

    def close(self) -> None:
        """Says goodbye, and disconnects."""
        self.link.close((self.state_topic, self.states.farewell), timeout_s=1.0)

    # -- on the network thread --------------------------------------------------------------------------------------

    def _on_connect(self) -> None:
        self._reconnected = True
        self.inbox.wake.set()

    def _on_learner(self, state: messages.LearnerState, sealed: bytes) -> None:
        self.task.observe(state)
        self.inbox.put(state)
        if state.version:
            self.on_announced(state.newest)  # of a state that is new: the inbox passes on no other
