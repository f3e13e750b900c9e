"""An actor but for board and environment, for load: enrolment, TLS connection, MAC, numbering, window, receipts.

It checks every policy it is sent, as edge_actor does, unless others on this machine do so for it. What it records is
drawn once and sent again and again. It has no thread: whoever owns it serves its socket.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker.contract import address, codec, errors, messages, signing, specs, topics
from broker.fleet import identity
from broker.mqtt import attempts
from edge_actor import config
from edge_actor.orders import log_lines, order_log, runner
from edge_actor.policies import assembly
from tests.fakes.connections import light_connection

SPEC = specs.EnvSpec(specs.ObservationSpec((24,), "float32"), specs.ActionSpec("discrete", n=4))
BOOT = int(time.time())
_POLICY_LEAVES: dict[str, type[assembly.Message]] = {
    "whole": messages.Policy,
    "patch": messages.PolicyPatch,
    "piece": messages.PolicyPiece,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The load that each actor makes. `rate` in steps/s, 0 for as fast as receipts come; `messages` 0 for no end.

    Receipts of what is sent within `warm_s` of the last one's connecting do not count: the learner compiles then. Whose
    broker is lost goes to the next of its bundle, if it `fails_over`; else that is an error.
    """

    rate: float
    message_steps: int
    window: int
    messages: int
    warm_s: float
    fails_over: bool = False


@dataclasses.dataclass(slots=True)
class Tally:
    """The counts of all actors together; times in seconds on this machine's monotonic clock."""

    connected: int = 0
    warm_until_s: float = 0.0
    lost: int = 0
    sent: int = 0
    receipted: int = 0
    steps: int = 0
    bytes_sent: int = 0
    first_sent_s: float = 0.0
    last_receipt_s: float = 0.0
    warm_s: float = 0.0
    warm_steps: int = 0
    held_max: int = 0
    refused: int = 0
    receipt_s: list[float] = dataclasses.field(default_factory=list)
    sent_s: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)
    verified_s: dict[int, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))


@functools.cache
def _drawn(bits: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns observations, actions and rewards of 2 ** bits steps."""
    rng, steps = np.random.default_rng(0), 1 << bits
    observation = rng.standard_normal((steps, *SPEC.observation.shape), np.float32)
    return observation, rng.integers(0, SPEC.action.n, steps).astype(np.int32), rng.standard_normal(steps, np.float32)


class Pattern:
    """Experience of one segment, whose arrays are the same in every message."""

    def __init__(self, steps: int) -> None:
        observation, action, reward = _drawn(steps.bit_length())
        self._arrays: dict[str, Any] = {
            "length": np.array([steps], np.int32),
            "env_index": np.zeros(1, np.int32),
            "row": np.zeros(1, np.int32),
            "terminated": np.ones(1, np.uint8),
            "truncated": np.zeros(1, np.uint8),
            "episode_return": np.ones(1, np.float32),
            "episode_length": np.array([steps], np.int32),
            "observation": observation[: steps + 1],
            "action": action[:steps],
            "reward": reward[:steps],
        }

    def message(
        self, seq: int, oldest: int, step: int, epoch: int, created_ms: int | None = None
    ) -> list[bytes | memoryview]:
        """Returns the encoded message number `seq`, after `step` steps, in pieces; made now, unless it says when."""
        return codec.pieces(
            messages.Experience(
                boot=BOOT,
                seq=seq,
                oldest=oldest,
                step=step,
                fingerprint=SPEC.fingerprint,
                assigned_epoch=epoch,
                epoch=0,
                version=0,
                draw=0,
                created_ms=int(1e3 * time.time()) if created_ms is None else created_ms,
                **self._arrays,
            )
        )


_pattern = functools.lru_cache(maxsize=1024)(Pattern)


class _Held(NamedTuple):
    """A message without a receipt; sent again it says the same."""

    seq: int
    steps: int
    sent_s: float
    step: int
    epoch: int
    created_ms: int


class Policies:
    """The policies sent on a channel, verified: by one actor for itself, or once for all actors of a process."""

    def __init__(self, learner_key: bytes) -> None:
        self._verifier = signing.LearnerVerifier(learner_key)
        self._assembly = assembly.Assembly(SPEC)
        self._sealed: dict[str, bytes] = {}

    def take(self, topic: str, leaf: str, sealed: bytes) -> int:
        """Returns the version that an actor who was sent this has; 0 for none.

        Raises:
            PolicyError: It is none, or not one for this actor.
            SignatureError: It is not the learner's.
        """
        if sealed != self._sealed.get(leaf):
            body = self._verifier.open(topic, sealed)
            self._assembly.add(codec.decode(_POLICY_LEAVES[leaf], body), sealed, 0.0)
            waiting = self._assembly.pop_waiting()
            if waiting is not None:
                self._assembly.add(*waiting, 0.0)
            self._sealed[leaf] = sealed
        newest = self._assembly.newest
        return newest.manifest.version if newest is not None else 0


class SimulatedActor:
    """An actor on one connection at a time. Everything runs on the swarm's thread."""

    def __init__(
        self, bundle: identity.Bundle, load: Load, tally: Tally, policies: Policies, state: Path | None = None
    ) -> None:
        self._load, self._tally, self._policies = load, tally, policies
        self._topics = topics.Topics(bundle.fleet)
        self._id = bundle.actor_id
        self._mac = signing.ActorMac(bundle.mac_key)
        self._verifier = signing.LearnerVerifier(bundle.learner_key)
        self._assignment: messages.Assignment | None = None
        self._held: collections.deque[_Held] = collections.deque()
        self._told = False
        self._made = self._recorded = self._before = self._beats = 0  # before: recorded for earlier learners
        self._orders = self._follow_orders(bundle, state) if state else None
        self._tls, self._password, self._is_new = bundle.tls(), bundle.password, True
        self.tries = attempts.Attempts([address.Address.parse(where) for where in bundle.brokers], self._tls)
        self.connection = self._connect()

    def reconnect(self) -> None:
        """Connects to the next broker; what has no receipt is sent again once that listens."""
        self._is_new = True
        self.connection = self._connect()

    def _connect(self) -> light_connection.LightConnection:
        while True:
            self.where = self.tries.next()
            try:
                connection = light_connection.LightConnection(
                    (self.where.host, self.where.port),
                    self._tls if self.where.tls else None,
                    f"{self._id}-swarm",
                    (self._id, self._password),
                    (self._topics.actor_state(self._id), self._state(online=False)),
                )
            except OSError as error:
                if not self._load.fails_over:
                    raise
                self.tries.ended(self.where, str(error), was_connected=False, is_wanted=False)
                time.sleep(self.tries.delay_s / 10)  # of a process with many, which all wait meanwhile
                continue
            self.tries.made(self.where)
            break
        names, channel = self._topics, topics.MAIN_CHANNEL
        wanted = [names.assignment(self._id), names.receipt(self._id)]
        wanted += [names.orders(self._id)] if self._orders else []
        wanted += names.policies(channel)
        connection.subscribe(wanted)
        return connection

    @property
    def is_back(self) -> bool:
        """True if this connection is in use."""
        return not self._is_new

    @property
    def done(self) -> bool:
        """True if everything that it was told to send has its receipt."""
        return 0 < self._load.messages <= self._made and not self._held

    @property
    def starts(self) -> bool:
        """True if it has just been told for the first time what to send."""
        told, self._told = self._told, self._assignment is not None
        return self._told and not told

    @property
    def held(self) -> int:
        """The number of messages without a receipt."""
        return len(self._held)

    def close(self) -> None:
        """Sends a farewell and closes the connection."""
        self._beats += 1  # the state with the highest number counts
        self.connection.publish(self._topics.actor_state(self._id), self._state(online=False), retain=True)
        self.connection.close()

    def beat(self) -> None:
        """Sends a heartbeat."""
        if self._is_new:  # nobody would hear it
            return
        if not self._beats:
            self._tally.connected += 1
        self._beats += 1
        self.connection.publish(self._topics.actor_state(self._id), self._state(online=True), retain=True)

    @property
    def period_s(self) -> float:
        """Seconds between two messages, and two heartbeats, as the learner assigned it."""
        return self._assignment.message_period_s if self._assignment else 0.0

    @property
    def full_steps(self) -> int:
        """The steps of a message where all are granted: what the assigned period brings, where there is a rate."""
        wanted = self._assignment
        if wanted is None or not self._load.rate:
            return self._load.message_steps
        return max(1, min(wanted.message_steps, round(self._load.rate * wanted.message_period_s)))

    @property
    def message_steps(self) -> int:
        """The steps of the next message; fewer, where not all are granted (as edge_actor at a control rate)."""
        wanted = self._assignment
        if wanted is None or not self._load.rate:
            return self._load.message_steps
        return min(self.full_steps, self._left(wanted))

    def send(self) -> bool:
        """Sends the next message; returns false if window, grant or plan forbid it."""
        wanted, steps = self._assignment, self.message_steps
        if self._orders is not None and self._orders.paused:
            return False
        if self._is_new or wanted is None or not 0 < steps <= self._left(wanted):
            return False
        if 0 < self._load.messages <= self._made:
            return False
        if len(self._held) >= self._load.window:
            return False
        self._made += 1
        now = time.monotonic()
        self._held.append(_Held(self._made, steps, now, self._recorded, wanted.epoch, int(1e3 * time.time())))
        topic, payload = self._sealed(self._held[-1])
        self._recorded += steps
        self._tally.first_sent_s = self._tally.first_sent_s or now
        self._tally.sent += 1
        if now >= self._tally.warm_until_s:
            self._tally.sent_s.append((self._id, self._made, now))
        self._tally.bytes_sent += len(payload)
        self._tally.held_max = max(self._tally.held_max, len(self._held))
        self.connection.publish(topic, payload)
        return True

    def _left(self, wanted: messages.Assignment) -> int:
        """Returns the steps that its learner still lets it record; each one grants anew."""
        return wanted.steps_granted - (self._recorded - self._before)

    def _sealed(self, held: _Held) -> tuple[str, bytes]:
        """Returns the topic and the payload of a message."""
        assert self._assignment is not None
        topic = self._topics.experience(self._id, self._assignment.shard)
        body = _pattern(held.steps).message(held.seq, self._held[0].seq, held.step, held.epoch, held.created_ms)
        return topic, self._mac.seal(topic, *body)

    def _state(self, *, online: bool) -> bytes:
        birth = messages.Birth("Simulated-v0", SPEC, 1, "simulated", "", "none", "", 0.0)
        vitals = messages.Vitals(
            steps=self._recorded,
            messages_held=len(self._held),
            delegate="XNNPACK",
            created_s=time.time(),
            paused=self._orders is not None and self._orders.paused,
        )
        state = messages.ActorState(online, "swarm", BOOT, self._beats, birth, vitals)
        return self._mac.seal(self._topics.actor_state(self._id), codec.encode(state))

    def receive(self) -> None:
        """Handles what has arrived.

        Raises:
            ConnectionError: The broker hung up.
        """
        for topic, sealed in self.connection.receive():
            if not sealed:
                continue
            leaf = topic.rpartition("/")[2]
            if leaf in _POLICY_LEAVES:
                self._take_policy(topic, leaf, sealed)
                continue
            body = self._verifier.open(topic, sealed)
            if leaf == "receipt":
                self._acknowledge(codec.decode(messages.Receipt, body))
            elif leaf == "orders" and self._orders is not None:
                self._orders.run(codec.decode(messages.Orders, body))
                self.beat()
            else:
                self._assign(codec.decode(messages.Assignment, body))
        if self._is_new and self.connection.subscribed:
            self._is_new = False
            self.beat()
            self._send_again()

    def _assign(self, assignment: messages.Assignment) -> None:
        before = self._assignment
        if assignment.boot != BOOT or (before is not None and assignment.epoch < before.epoch):
            return
        self._assignment = assignment
        if before is not None and assignment.session != before.session:  # it never saw what was sent before it came
            self._before = self._recorded
            self._send_again()

    def _send_again(self) -> None:
        for held in self._held:
            self.connection.publish(*self._sealed(held))

    def _follow_orders(self, bundle: identity.Bundle, state: Path) -> runner.OrderRunner:
        """What the real actor does with orders, to the file; a directory for each."""
        log = order_log.OrderLog.open(state / self._id, bundle.learner_key)
        return runner.OrderRunner(log, config.ActorConfig(), log_lines.LogLines(), self._answer, lambda what: None)

    def _answer(self, answer: messages.Answer) -> None:
        topic = self._topics.answer(self._id)
        self.connection.publish(topic, self._mac.seal(topic, codec.encode(answer)))

    def _acknowledge(self, receipt: messages.Receipt) -> None:
        now = time.monotonic()
        while self._held and receipt.boot == BOOT and self._held[0].seq <= receipt.seq:
            held = self._held.popleft()
            if held.sent_s >= self._tally.warm_until_s:
                self._tally.receipt_s.append(now - held.sent_s)
            self._tally.receipted += 1
            self._tally.steps += held.steps
            if not self._tally.warm_s and self._made > self._load.messages // 10:  # all have begun
                self._tally.warm_s, self._tally.warm_steps = now, self._tally.steps
                self._tally.receipt_s.clear()
            self._tally.last_receipt_s = now

    def _take_policy(self, topic: str, leaf: str, sealed: bytes) -> None:
        try:
            version = self._policies.take(topic, leaf, sealed)
        except errors.PolicyError:
            self._tally.refused += 1
            return
        if version:
            self._tally.verified_s[version].append(time.monotonic())
