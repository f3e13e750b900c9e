"""The learner's presence on the fleet: claims it, announces itself, seals what goes out, opens what comes in.

Network threads only put payloads into a queue. `drain` hands them on in the caller's thread, one after the other; what
is not a genuine message of the fleet is counted in `refused` and goes no further.

One learner to a fleet: the one with the highest epoch. One that hears of a higher epoch than its own says nothing any
more that a broker would retain, from that moment on, and ends. It hears of it before it speaks: whenever it connects,
what is retained comes first. One that hears of a lower epoch repeats what it has said, for that may be overwritten.

Epochs come from a file beside the keys. Where that is lost, or older than what was said since, a learner hears a higher
epoch than its own that nobody live has; actors would take nothing of it. It then takes one above that before it claims.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from broker.contract import address, codec, errors, messages, previous, signing, topics
from broker.fleet import identity
from broker.program import logs, stopwatch
from learner import config
from learner.fleet import brokers, enrolment
from learner.fleet.arriving import floods, inbox, reader

_log = logging.getLogger(__name__)
HEARTBEAT_S = 2.0
_RETAINED_S = 0.3  # retained messages follow the SUBACK at once
_LEAVES = ("state", "experience", "report")
SILENCE_S = 2.5 * HEARTBEAT_S  # after this, a retained "online" of another learner counts as left over


class Arrival(NamedTuple):
    """One message from an actor. Experience comes sealed: ingest opens and validates it, and keeps its own counts."""

    actor_id: str
    topic: str
    message: messages.ActorState | messages.Report | bytes
    retained: bool


class Session:
    """One learner process on one fleet; it connects when it joins.

    Args:
        settings: Fleet, brokers and task.
        fleet: The fleet's keys.
        epoch: This session's epoch.
        tls: For brokers that are reached over TLS.
        take_over: Claim the fleet though another learner is live; that one ends.

    Attributes:
        times: `receive`: reading the sockets between two messages, and opening states and reports; `sign`: encoding and
            signing what goes out; `publish`: handing that to the sockets.
    """

    @classmethod
    def open(cls, settings: config.TrainConfig, *, take_over: bool = False) -> Session:
        """Reads the fleet's keys, and takes the next epoch.

        Args:
            settings: Fleet, brokers and task.
            take_over: Claim the fleet though another learner is live; that one ends.

        Raises:
            IdentityError: The keys or the epoch cannot be used.
        """
        fleet = identity.Fleet.open(settings.fleet)
        made = cls(settings, fleet, fleet.next_epoch(), fleet.tls(), take_over=take_over)
        made._enrolment.read()
        made._follow()
        return made

    def __init__(
        self,
        settings: config.TrainConfig,
        fleet: identity.Fleet,
        epoch: int,
        tls: ssl.SSLContext,
        *,
        take_over: bool = False,
    ) -> None:
        self.fleet = fleet
        self.id = secrets.token_hex(8)
        self.epoch = epoch
        self.topics = topics.Topics(settings.fleet)
        self._enrolment = enrolment.Enrolment(fleet)
        self.macs = self._enrolment.macs
        self.refused: Counter[str] = Counter()
        self.times = stopwatch.Stopwatch("receive", "sign", "publish")
        self._settings, self._tls = settings, tls
        self._verifier = signing.LearnerVerifier(self.fleet.sealer.public_key)
        self._addresses = settings.broker or self.fleet.brokers
        # Without TLS whoever is on this machine may write at any topic: nobody shall pay for that
        vouched = all(address.Address.parse(where).tls for where in self._addresses)
        self._inbox = inbox.Inbox(self._bucket_of if vouched else None, min(64, settings.message_steps))
        self._vouched = vouched
        self._floods = floods.Floods()
        self._followed: tuple[int, frozenset[str]] = (-1, frozenset())  # of the enrolled, and whom of them not
        self._reader = reader.Reader(self._inbox, self.times)
        self._claimed = False
        self._leaves = [leaf for leaf in _LEAVES if leaf != "experience" or not settings.ingest_workers]
        self._take_over = take_over
        self._left_over = self._contested = False
        self._rival: messages.LearnerState | None = None
        self._heard_epoch = 0  # the highest that our key has signed
        self._fingerprint = ""
        self._version = 0
        self._heartbeat = 0
        self._announced_at = 0.0
        self._echoes = brokers.Echoes()
        self.brokers = self._make_brokers()

    def join(self) -> list[Arrival]:
        """Connects and claims the fleet; returns what arrived meanwhile.

        Raises:
            BrokerUnreachable: No broker answered.
            FleetBusy: Another learner is alive on the fleet.
        """
        self.brokers.start()
        arrivals: list[Arrival] = []
        deadline = time.monotonic() + _RETAINED_S
        while (left := deadline - time.monotonic()) > 0:
            arrivals += self.drain(left)
            if self._left_over and not self._take_over:  # someone said "online": if alive, it will say so again
                self._left_over = False
                deadline = time.monotonic() + SILENCE_S
        if self._heard_epoch >= self.epoch:  # the same one: of a copy of our keys' directory
            self._go_above()
        self._claimed = True
        self.announce(self._fingerprint, 0)
        return arrivals

    def _make_brokers(self) -> brokers.Brokers:
        """Makes the links, which are not connected yet; their will has our epoch."""
        settings, state_topic = self._settings, self.topics.learner_state
        made = brokers.Brokers(
            self._addresses,
            f"actorq-{settings.fleet}-learner",
            username=identity.LEARNER_USER,
            password=self.fleet.password,
            tls=self._tls,
            will=(state_topic, self._sealed(state_topic, self._state(online=False))),
            listens_first=True,
            has_room=self._inbox.has_room,
        )
        made.subscribe_each(state_topic, lambda where: functools.partial(self._hear_learner, where))
        handle = made.route if self._vouched else made.subscribe
        for leaf in self._leaves:
            handle(self.topics.every_actor(leaf), self._inbox.put)
        return made

    def _go_above(self) -> None:
        """Takes an epoch above what was heard, and connects anew, since a will cannot be changed."""
        lost, self.epoch = self.epoch, self.fleet.next_epoch(above=self._heard_epoch)
        _log.warning(
            "the fleet has heard epoch %d of this key, and %s had %d: it was lost, or put back; "
            "this learner is epoch %d",
            self._heard_epoch,
            self.fleet.directory / "epoch",
            lost,
            self.epoch,
        )
        self.brokers.close()
        self.brokers, self._followed = self._make_brokers(), (-1, frozenset())
        self._follow()
        self.brokers.start()

    def compare_epochs(self, actor_id: str, policy_epoch: int) -> None:
        """Logs, once an actor, that it has a policy which is newer than any of ours can be.

        Nothing more: what an actor says of epochs is its word only, and epochs must not be used up by a lie.
        """
        if policy_epoch > self.epoch:
            _log.warning(
                "actor %s has a policy of epoch %d and takes none of ours, of epoch %d. If %s was lost or put back: "
                "end this learner, write %d into it, and go on with --resume",
                actor_id,
                policy_epoch,
                self.epoch,
                self.fleet.directory / "epoch",
                policy_epoch,
                extra=logs.once(("epoch", actor_id)),
            )

    def count_refused(self, reason: str) -> None:
        """Counts a message that is genuine, and refused all the same."""
        self.refused[reason] += 1

    def metrics(self) -> dict[str, float]:
        """Returns the counts of messages refused, of our own errors and of bytes, for a row of metrics."""
        return {
            "messages_refused": sum(self.refused.values()),
            "handler_errors": self.brokers.handler_errors,
            "bytes_received": self.brokers.bytes_received,
            "bytes_sent": self.brokers.bytes_sent,
        }

    def summary(self) -> dict[str, Any]:
        """Returns the same for the summary; messages refused by reason."""
        return {**self.metrics(), "messages_refused": dict(self.refused)}

    def announce(self, fingerprint: str, version: int) -> None:
        """Says (retained) which spec this learner trains on and which policy version is the newest."""
        self._fingerprint, self._version = fingerprint, version
        self._heartbeat += 1
        self._announced_at = time.monotonic()
        self._echoes.say(self._heartbeat, self._announced_at)
        self.retain(self.topics.learner_state, self._state(online=True))

    def beat(self) -> None:
        """Announces again when the heartbeat is due; and all the rest, if another learner may have overwritten it."""
        if self._contested:
            self._contested = False
            self.brokers.repeat()
        if time.monotonic() - self._announced_at > HEARTBEAT_S:
            self.announce(self._fingerprint, self._version)

    @property
    def is_local(self) -> bool:
        """Returns whether the brokers serve this machine only: they are spoken to without TLS."""
        return self.brokers.is_local

    def retain(self, topic: str, message: messages.Message) -> int:
        """Signs and publishes a retained message, now and on every connect; returns its size in bytes."""
        sealed = self._sealed(topic, message)
        self._retain([(topic, sealed)])
        return len(sealed)

    def retain_all(self, outgoing: Iterable[tuple[str, messages.Message]]) -> None:
        """Signs and publishes several retained messages together."""
        if sealed := [(topic, self._sealed(topic, message)) for topic, message in outgoing]:
            self._retain(sealed)

    def tell(self, topic: str, message: messages.Message) -> int:
        """Signs and sends a message once; returns its size in bytes, or 0 if it cannot go out now."""
        sealed = self._sealed(topic, message)
        with self.times.time("publish"):
            is_taken = self.brokers.publish(topic, sealed)
        return len(sealed) if is_taken else 0

    def forget(self, topic: str) -> None:
        """Takes back what is retained at a topic."""
        self._retain([(topic, b"")])

    def _retain(self, sealed: list[tuple[str, bytes]]) -> None:
        with self.times.time("publish", len(sealed)):
            self.brokers.retain_all(sealed)

    def command(self, actor_id: str, command: messages.Command) -> bool:
        """Signs and sends a command; returns false if it cannot go out now."""
        return self.tell(self.topics.command(actor_id), command) > 0

    def drain(self, wait_s: float) -> Iterator[Arrival]:
        """Yields what has arrived; waits up to `wait_s` for the first message, or until woken.

        Raises:
            FleetBusy: Another learner is alive on the fleet, or has taken it over.
        """
        if self._rival is not None:
            raise self._busy(self._rival)
        self._count_left_out()
        while (raw := self._reader.next(self.brokers, wait_s)) is not None:
            wait_s = 0.0
            with self.times.time("receive"):
                arrival = self._open(*raw)
            if arrival is not None:
                yield arrival
        if self._rival is not None:
            raise self._busy(self._rival)

    def note_outcome(self, topic: str, size_bytes: int, steps: int | None) -> None:
        """Pays an actor its tokens back, or takes more (see Inbox.note_outcome)."""
        self._inbox.note_outcome(topic, size_bytes, steps)

    def _bucket_of(self, topic: str) -> tuple[str, str] | None:
        """Returns the bucket that pays for a topic: its own, if its actor is enrolled; others share one."""
        leaf = topic.rpartition("/")[2]
        if leaf not in inbox.RATES or (leaf == "state" and topic == self.topics.learner_state):
            return None
        with contextlib.suppress(errors.MessageError):
            if self.topics.actor_id(topic) in self.macs:
                return topic, leaf
        return leaf, leaf

    def _count_left_out(self) -> None:
        for (topic, leaf), count in self._inbox.pop_left_out().items():
            self.refused["rate" if leaf == "experience" else f"{leaf}.rate"] += count
            if "/" in topic:
                self._floods.count(self.topics.actor_id(topic), count)
        self._floods.stop_listening()
        self._follow()

    def _follow(self) -> None:
        """Listens to each enrolled actor by itself, where the broker vouches for topics; to who floods not at all."""
        if not self._vouched:
            return
        self._enrolment.follow()  # nothing comes of who has just been enrolled, to look for its key
        followed = self._enrolment.version, self._floods.unheard()
        if followed != self._followed:
            self._followed = followed
            heard = self.macs.keys() - followed[1]
            self.brokers.follow([self.topics.actor(name, leaf) for name in sorted(heard) for leaf in self._leaves])

    @property
    def waited_s(self) -> float:
        """How long `drain` has waited for something to arrive."""
        return self._reader.waited_s

    @property
    def waiting(self) -> int:
        """The number of messages that have arrived and were not drained yet."""
        return len(self._inbox)

    def broker_delays_s(self) -> dict[str, float]:
        """Returns the seconds that our heartbeat takes through each broker that is connected and back, by address."""
        return self._echoes.delays_s(self.brokers.connected_to, time.monotonic())

    def wake(self) -> None:
        """Ends the wait of `drain`, now or the next one. From any thread."""
        self._inbox.wake()

    def close(self) -> None:
        """Says goodbye, if the fleet was ours, and disconnects."""
        topic = self.topics.learner_state
        self.brokers.close((topic, self._sealed(topic, self._state(online=False))) if self._claimed else None)

    def _open(self, topic: str, payload: bytes, retained: bool) -> Arrival | None:
        self._enrolment.follow()
        leaf = topic.rpartition("/")[2]
        try:
            if leaf == "state" and topic == self.topics.learner_state:
                self._learner(topic, payload)  # raises: `_hear_learner` has kept the good ones
            actor_id = self.topics.actor_id(topic)
            if leaf == "experience":
                return Arrival(actor_id, topic, payload, retained)
            body = self._enrolment.mac(actor_id).open(topic, payload)
            if leaf == "state":
                return Arrival(actor_id, topic, self._state_of(actor_id, body, retained), retained)
            return Arrival(actor_id, topic, codec.decode(messages.Report, body), retained)
        except errors.MessageError as error:
            self.refused[f"{leaf}.{error.reason}"] += 1
            self._inbox.note_outcome(topic, len(payload), None)
            return None

    def _state_of(self, actor_id: str, body: bytes | memoryview, retained: bool) -> messages.ActorState:
        """Decodes an actor's state. One of another schema is named, and told if it can be: if it is the newer side."""
        try:
            return codec.decode(messages.ActorState, body)
        except errors.DecodeError as error:
            if error.reason == "schema":
                told = f"{error.what}; {error.todo}"
                _log.warning("actor %s is refused: %s", actor_id, told, extra=logs.once(("schema", actor_id)))
                found = codec.metadata(body)
                schema = found.get("schema", "")
                is_newer = schema.isdecimal() and len(schema) < 9 and int(schema) > messages.SCHEMA_VERSION
                if self._claimed and is_newer and not retained:
                    self._refuse(actor_id, found.get("boot", ""), told)
            raise

    def _refuse(self, actor_id: str, boot: str, told: str) -> None:
        """Ends an actor whose states we cannot read, if it can read ours."""
        if not (boot.isascii() and boot.isdigit() and len(boot) < 19):
            return
        zero = {"slot": 0, "epsilon_start": 0.0, "epsilon_end": 0.0, "epsilon_decay_steps": 1, "epsilon_offset": 0}
        own = {"session": self.id, "epoch": self.epoch, "boot": int(boot), "channel": topics.MAIN_CHANNEL}
        values: dict[str, Any] = {**own, **zero, "seed": 0, "steps_granted": 0, "refused": told}
        topic = self.topics.assignment(actor_id)
        self.brokers.publish(topic, self.fleet.sealer.seal(topic, codec.encode(messages.Assignment(**values))))

    def _learner(self, topic: str, payload: bytes) -> messages.LearnerState:
        return codec.decode(messages.LearnerState, self._verifier.open(topic, payload))

    def _hear_learner(self, where: str, topic: str, payload: bytes, retained: bool) -> None:
        """Before any queue, so that nothing more goes out once another learner has the fleet."""
        try:
            state = self._learner(topic, payload)
        except errors.MessageError:
            self._inbox.put(topic, payload, retained)  # to be counted
            return
        if state.session == self.id:
            if not retained:
                self._echoes.hear(where, state.heartbeat, time.monotonic())
            return
        self._heard_epoch = max(self._heard_epoch, state.epoch)
        if self._claimed and state.epoch < self.epoch:
            self._contested = True
        elif not state.online:
            # A goodbye, not the will of one that never had the fleet: somebody had it after us, and left
            if self._claimed and state.epoch > self.epoch and state.heartbeat:
                self._rival = state
                self.brokers.mute()
        elif self._claimed or (state.epoch > self.epoch and not retained):
            self._rival = state
            self.brokers.mute()
        elif retained:
            self._left_over = True
        elif not self._take_over:
            self._rival = state

    def _busy(self, rival: messages.LearnerState) -> errors.FleetBusy:
        where = f"fleet {self.topics.fleet!r} at {self.brokers.address}"
        if rival.epoch > self.epoch:
            self.fleet.next_epoch(above=rival.epoch - 1)  # whoever starts next is above it, whatever became of the file
        if not self._claimed:
            return errors.FleetBusy(
                "another learner is live on this fleet",
                where=where,
                todo="stop it; or take its actors with --take-over; or give this one a fleet of its own with --fleet",
            )
        # Not retained. It is the last that we say, so that our successor repeats whatever we may have overwritten
        self.tell(self.topics.learner_state, messages.LearnerState(False, self.id, self.epoch, self._heartbeat + 1))
        return errors.FleetBusy(
            "another learner has taken this fleet over",
            where=f"{where}, epoch {rival.epoch} after our {self.epoch}",
            todo="what was trained is saved; go on with --resume RUN, when that learner is gone or with --take-over",
        )

    def _state(self, *, online: bool) -> messages.LearnerState:
        return messages.LearnerState(
            online=online,
            session=self.id,
            epoch=self.epoch,
            heartbeat=self._heartbeat,
            env_id=self._settings.env,
            fingerprint=self._fingerprint,
            version=self._version,
        )

    def _sealed(self, topic: str, message: messages.Message) -> bytes:
        with self.times.time("sign"):
            return self.fleet.sealer.seal(topic, *codec.pieces(message, previous.VERSION))
