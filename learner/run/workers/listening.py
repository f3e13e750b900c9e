"""The connection of a worker: it hears its shard's actors, and retains their receipts, signed by the fleet's key.

It is the learner's user with a client id of its own, and says nothing else. A learner of a higher epoch silences it at
once, as it does the learner that started it.
"""

from __future__ import annotations

import contextlib
import ssl
from collections import Counter
from collections.abc import Iterable, Iterator

from broker.contract import address, codec, errors, messages, previous, signing, topics
from broker.fleet import identity
from broker.program import stopwatch
from learner import config
from learner.fleet import brokers, enrolment
from learner.fleet.arriving import floods, inbox, reader


class Listening:
    """Hears actors of one shard.

    Args:
        settings: Fleet, brokers and number of shards.
        shard: Which one.
        epoch: Of the learner's session.
        fleet: The fleet's keys.
        tls: For brokers that are reached over TLS.

    Attributes:
        macs: MAC of each enrolled actor.
        version: The newest policy version that the learner has announced.
        is_superseded: Whether a learner of a higher epoch is there.
        refused: Messages that were none of ours, or too many, by reason.
    """

    def __init__(
        self, settings: config.TrainConfig, shard: int, epoch: int, fleet: identity.Fleet, tls: ssl.SSLContext
    ) -> None:
        self.topics = topics.Topics(settings.fleet)
        self._shard, self._shards, self._epoch, self._fleet = shard, settings.ingest_workers, epoch, fleet
        self._verifier = signing.LearnerVerifier(fleet.sealer.public_key)
        self._enrolment = enrolment.Enrolment(fleet)
        self.macs = self._enrolment.macs
        self.version, self.is_superseded = 0, False
        self.refused: Counter[str] = Counter()
        addresses = settings.broker or fleet.brokers
        self._vouched = all(address.Address.parse(where).tls for where in addresses)
        self._inbox = inbox.Inbox(self._bucket_of if self._vouched else None, min(64, settings.message_steps))
        self._floods = floods.Floods()
        self._reader = reader.Reader(self._inbox, stopwatch.Stopwatch("receive"))
        self._followed: tuple[int, frozenset[str]] = (-1, frozenset())
        self.brokers = brokers.Brokers(
            addresses,
            f"actorq-{settings.fleet}-learner-{shard}",
            username=identity.LEARNER_USER,
            password=fleet.password,
            tls=tls,
            has_room=self._inbox.has_room,
        )
        self.brokers.subscribe(self.topics.learner_state, self._hear_learner)
        handle = self.brokers.route if self._vouched else self.brokers.subscribe
        for topic in self._of("+"):
            handle(topic, self._put)

    def _of(self, actor_id: str) -> tuple[str, ...]:
        """Returns an actor's topics that are heard here, in order: what was granted comes before what uses it."""
        return (
            self.topics.actor_state(actor_id),
            self.topics.assignment(actor_id),
            self.topics.ingest(self._shard, actor_id),
            *previous.experience(self.topics, actor_id),
        )

    def start(self) -> None:
        """Reads the keys of actors, and connects.

        Raises:
            BrokerUnreachable: No broker answered.
        """
        self._enrolment.read()
        self._follow()
        self.brokers.start()

    def drain(self, wait_s: float) -> Iterator[tuple[str, str, bytes, bool]]:
        """Yields actors, topics, payloads and whether they were retained; waits up to `wait_s` for the first one."""
        self._enrolment.follow()
        for (topic, leaf), count in self._inbox.pop_left_out().items():
            self.refused["rate" if leaf == "experience" else f"{leaf}.rate"] += count
            if "/" in topic:
                self._floods.count(self.topics.actor_id(topic), count)
        self._floods.stop_listening()
        self._follow()
        while (raw := self._reader.next(self.brokers, wait_s)) is not None:
            wait_s = 0.0
            topic, payload, retained = raw
            try:
                yield self.topics.actor_id(topic), topic, payload, retained
            except errors.MessageError as error:
                self.refused[error.reason] += 1

    def state(self, actor_id: str, topic: str, payload: bytes) -> messages.ActorState:
        """Opens an actor's state.

        Raises:
            MessageError: It is none.
        """
        return codec.decode(messages.ActorState, self._enrolment.mac(actor_id).open(topic, payload))

    def assignment(self, topic: str, payload: bytes) -> messages.Assignment:
        """Opens what the learner assigned to an actor.

        Raises:
            MessageError: It is none.
        """
        return codec.decode(messages.Assignment, self._verifier.open(topic, payload))

    def retain_all(self, tell: Iterable[tuple[str, messages.Message]]) -> None:
        """Signs messages and retains them, each at its topic."""
        sealed = [
            (topic, self._fleet.sealer.seal(topic, *codec.pieces(message, previous.VERSION))) for topic, message in tell
        ]
        if sealed:
            self.brokers.retain_all(sealed)

    def count_refused(self, reason: str) -> None:
        """Counts a message that does not count."""
        self.refused[reason] += 1

    def note_outcome(self, topic: str, size_bytes: int, steps: int | None) -> None:
        """Pays an actor its tokens back, or takes more (see Inbox.note_outcome)."""
        self._inbox.note_outcome(topic, size_bytes, steps)

    def wake(self) -> None:
        """Ends the wait of `drain`."""
        self._inbox.wake()

    def close(self) -> None:
        """Disconnects."""
        self.brokers.close()

    def _is_ours(self, actor_id: str) -> bool:
        return topics.shard_of(actor_id, self._shards) == self._shard

    def _put(self, topic: str, payload: bytes, retained: bool) -> None:
        """Queues, on a network thread, what is of this shard; of the others' states and grants there may be many."""
        with contextlib.suppress(errors.MessageError):
            if not self._is_ours(self.topics.actor_id(topic)):
                return
        self._inbox.put(topic, payload, retained)

    def _bucket_of(self, topic: str) -> tuple[str, str] | None:
        leaf = topic.rpartition("/")[2]
        if leaf == "assignment":
            return None  # the learner's: nobody else may write it
        leaf = "state" if leaf == "state" else "experience"
        with contextlib.suppress(errors.MessageError):
            if self.topics.actor_id(topic) in self.macs:
                return topic, leaf
        return leaf, leaf

    def _follow(self) -> None:
        if not self._vouched:
            return
        followed = self._enrolment.version, self._floods.unheard()
        if followed != self._followed:
            self._followed = followed
            heard = sorted(name for name in self.macs if self._is_ours(name) and name not in followed[1])
            self.brokers.follow([topic for name in heard for topic in self._of(name)])

    def _hear_learner(self, topic: str, payload: bytes, retained: bool) -> None:
        try:
            state = codec.decode(messages.LearnerState, self._verifier.open(topic, payload))
        except errors.MessageError as error:
            self.refused[f"state.{error.reason}"] += 1
            return
        if state.epoch == self._epoch:
            self.version = max(self.version, state.version)
        elif state.epoch > self._epoch and (state.online or state.heartbeat):
            self.is_superseded = True
            self.brokers.mute()
            self.wake()
