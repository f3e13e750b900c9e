"""A connection to the fleet's brokers for people: it leaves orders, and hears what actors say of themselves and answer.

It is no learner: it claims no fleet, has no epoch, and may be there beside one that trains, and beside others like it.
"""

from __future__ import annotations

import queue
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from broker.contract import codec, errors, messages, previous, topics
from broker.fleet import identity
from learner.fleet import brokers, enrolment
from learner.operate.orders import order_book

_SEPARATE = 50
"""Actors up to which each is listened to by itself; of more, to all at once."""
_QUEUED = 20_000


@dataclass(slots=True)
class Heard:
    """The newest state of an actor; `is_live` if it was said since we are connected, and not what a broker kept."""

    state: messages.ActorState
    is_live: bool


class Courier:
    """Sends what is in the book, and hears answers.

    Args:
        fleet: The fleet's keys.
        book: Of its orders.
        addresses: Of its brokers.
        actors: Whom to listen to.
        tls: For brokers that are reached over TLS.

    Attributes:
        heard: The newest state of each actor.
        refused: Messages that were none of a member's, by reason.
    """

    def __init__(
        self,
        fleet: identity.Fleet,
        book: order_book.OrderBook,
        addresses: Sequence[str],
        actors: Sequence[str],
        tls: ssl.SSLContext,
    ) -> None:
        self._fleet = fleet
        self._book = book
        self._topics = topics.Topics(fleet.name)
        self._enrolment = enrolment.Enrolment(fleet)
        # Not a BoundedQueue: `drain` waits for this one, and while it is full the links read no more
        self._arrived: queue.Queue[tuple[str, bytes, bool]] = queue.Queue(_QUEUED)
        self.heard: dict[str, Heard] = {}
        self.refused: Counter[str] = Counter()
        self._brokers = brokers.Brokers(
            addresses or fleet.brokers,
            f"actorq-{fleet.name}-orders",
            username=identity.LEARNER_USER,
            password=fleet.password,
            tls=tls,
            has_room=lambda: not self._arrived.full(),
        )
        everybody = self._topics.every_actor
        for leaf in ("state", "answer"):
            few = [self._topics.actor(name, leaf) for name in actors] if len(actors) <= _SEPARATE else [everybody(leaf)]
            for topic in few:
                self._brokers.subscribe(topic, self._put)

    def start(self) -> None:
        """Connects.

        Raises:
            BrokerUnreachable: No broker answered, or let us in.
        """
        self._enrolment.read()
        self._brokers.start()

    def close(self) -> None:
        """Disconnects when all that was left is with the brokers."""
        self._brokers.close()

    def deliver(self, actors: Iterable[str]) -> None:
        """Leaves for each actor what it has to answer; takes back what it has answered, or what has expired."""
        waiting, outgoing = self._book.waiting(time.time()), []
        for name in actors:
            topic, orders = self._topics.orders(name), waiting.get(name)
            outgoing.append(
                (topic, self._fleet.sealer.seal(topic, codec.encode(orders, previous.VERSION)) if orders else b"")
            )
        self._brokers.retain_all(outgoing)

    def leave(self, retained: Sequence[tuple[str, bytes]]) -> None:
        """Leaves messages for whoever asks for them; an empty one takes back what was left there."""
        self._brokers.retain_all(retained)

    def drain(self, wait_s: float) -> Iterator[tuple[str, messages.Answer]]:
        """Yields the answers that arrive within `wait_s`, each with its actor's name; notes states."""
        deadline = time.monotonic() + wait_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                topic, payload, retained = self._arrived.get(timeout=left)
            except queue.Empty:
                return
            try:
                name = self._topics.actor_id(topic)
                body = self._enrolment.mac(name).open(topic, payload)
                if topic.endswith("/state"):
                    self._observe(name, codec.decode(messages.ActorState, body), retained=retained)
                else:
                    yield name, codec.decode(messages.Answer, body)
            except errors.MessageError as error:
                self.refused[error.reason] += 1

    def _observe(self, name: str, state: messages.ActorState, *, retained: bool) -> None:
        before = self.heard.get(name)
        if before is None or (state.boot, state.heartbeat) > (before.state.boot, before.state.heartbeat):
            self.heard[name] = Heard(state, not retained or (before is not None and before.is_live))

    def _put(self, topic: str, payload: bytes, retained: bool) -> None:
        if payload:
            self._arrived.put((topic, payload, retained))
