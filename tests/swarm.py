"""Many actors in one process, for benchmarks and tests of load: all of an actor but its board and environment.

Each has its own enrolment, TLS connection, MAC, numbering, window and receipts, and checks every policy it is sent, as
edge_actor does. What they record is drawn once and sent again and again. One thread serves all sockets: paho's threads
would deliver 340 of 500 (FACTS.md).

    python -m tests.swarm --bundles DIR --rate 50

prints one JSON line when all are connected, and one after SIGTERM or when --messages are sent.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import heapq
import json
import random
import resource
import select
import signal
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from broker import address, codec, errors, identity, messages, signing, specs, topics
from edge_actor import reassembly

SPEC = specs.EnvSpec(specs.ObservationSpec((24,), "float32"), specs.ActionSpec("discrete", n=4))
BOOT = int(time.time())
HEARTBEAT_S = 1.0
CONNECTS_AT_ONCE = 20
RECEIPTS_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What each actor sends. `rate` in steps/s, 0 for as fast as receipts come; `messages` 0 for no end.

    Receipts of what is sent within `warm_s` of the last one's connecting do not count: the learner compiles then.
    """

    rate: float
    message_steps: int
    window: int
    messages: int
    warm_s: float


@dataclasses.dataclass(slots=True)
class Tally:
    """Of all actors together; times in seconds on this machine's monotonic clock."""

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
    verified_s: dict[int, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))


class Pattern:
    """Experience of one segment, whose arrays are the same in every message."""

    def __init__(self, steps: int) -> None:
        rng = np.random.default_rng(0)
        self._arrays: dict[str, Any] = {
            "length": np.array([steps], np.int32),
            "env_index": np.zeros(1, np.int32),
            "terminated": np.ones(1, np.uint8),
            "truncated": np.zeros(1, np.uint8),
            "episode_return": np.ones(1, np.float32),
            "episode_length": np.array([steps], np.int32),
            "observation": rng.standard_normal((steps + 1, *SPEC.observation.shape), np.float32),
            "action": rng.integers(0, SPEC.action.n, steps).astype(np.int32),
            "reward": rng.standard_normal(steps, np.float32),
        }

    def message(self, seq: int, oldest: int, step: int, epoch: int) -> bytes:
        """The encoded message number `seq`, after `step` steps."""
        return codec.encode(
            messages.Experience(
                boot=BOOT,
                seq=seq,
                oldest=oldest,
                step=step,
                fingerprint=SPEC.fingerprint,
                assigned_epoch=epoch,
                epoch=0,
                version=0,
                **self._arrays,
            )
        )


_pattern = functools.lru_cache(maxsize=16)(Pattern)


class SimulatedActor:
    """One connection. Everything runs on the swarm's thread."""

    def __init__(self, bundle: identity.Bundle, load: Load, tally: Tally) -> None:
        self._load, self._tally = load, tally
        self._topics = topics.Topics(bundle.fleet)
        self._id = bundle.actor_id
        self._mac = signing.ActorMac(bundle.mac_key)
        self._verifier = signing.LearnerVerifier(bundle.learner_key)
        self._policies = reassembly.Reassembly(SPEC)
        self._assignment: messages.Assignment | None = None
        self._held: collections.deque[tuple[int, int, float]] = collections.deque()  # seq, steps, and when it was sent
        self._told = False
        self._made = self._recorded = self._beats = 0
        self._ledger = ""
        where = address.Address.parse(bundle.brokers[0])
        self.client = client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=f"{self._id}-swarm")
        client.max_inflight_messages_set(0)
        client.username_pw_set(self._id, bundle.password)
        if where.tls:
            client.tls_set_context(bundle.tls())
        client.on_connect = self._connected
        client.on_subscribe = lambda *args: self.beat()
        client.on_message = self._message
        client.will_set(self._topics.actor_state(self._id), self._state(online=False), qos=1, retain=True)
        client.connect(where.host, where.port, keepalive=60)
        sock = client.socket()
        assert isinstance(sock, socket.socket)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock

    @property
    def done(self) -> bool:
        """All that it was told to send has its receipt."""
        return 0 < self._load.messages <= self._made and not self._held

    @property
    def starts(self) -> bool:
        """It has just been told for the first time what to send."""
        told, self._told = self._told, self._assignment is not None
        return self._told and not told

    @property
    def held(self) -> int:
        """Messages without a receipt."""
        return len(self._held)

    def close(self) -> None:
        """Says goodbye."""
        self._beats += 1  # the state with the highest number counts
        self.client.publish(self._topics.actor_state(self._id), self._state(online=False), qos=1, retain=True)
        self.client.disconnect()

    def beat(self) -> None:
        """Says that it is there."""
        if not self._beats:
            self._tally.connected += 1
        self._beats += 1
        self.client.publish(self._topics.actor_state(self._id), self._state(online=True), qos=1, retain=True)

    @property
    def period_s(self) -> float:
        """Between two messages, and two heartbeats, as the learner assigned it."""
        return self._assignment.message_period_s if self._assignment else 0.0

    @property
    def message_steps(self) -> int:
        """Steps of the next message: what is recorded in the assigned period, where there is a rate, and granted."""
        wanted = self._assignment
        if wanted is None or not self._load.rate:
            return self._load.message_steps
        recorded = max(1, min(wanted.message_steps, round(self._load.rate * wanted.message_period_s)))
        return min(recorded, wanted.steps_granted - self._recorded)

    def send(self) -> bool:
        """Sends the next message; false if window, grant or plan forbid it."""
        wanted, steps = self._assignment, self.message_steps
        if wanted is None or not 0 < steps <= wanted.steps_granted - self._recorded:
            return False
        if 0 < self._load.messages <= self._made:
            return False
        if len(self._held) >= self._load.window:
            return False
        self._made += 1
        oldest = self._held[0][0] if self._held else self._made
        topic = self._topics.experience(self._id)
        body = _pattern(steps).message(self._made, oldest, self._recorded, wanted.epoch)
        payload = self._mac.seal(topic, body)
        now = time.monotonic()
        self._recorded += steps
        self._held.append((self._made, steps, now))
        self._tally.first_sent_s = self._tally.first_sent_s or now
        self._tally.sent += 1
        self._tally.bytes_sent += len(payload)
        self._tally.held_max = max(self._tally.held_max, len(self._held))
        self.client.publish(topic, payload, qos=1)
        return True

    def _state(self, *, online: bool) -> bytes:
        birth = messages.Birth("Simulated-v0", SPEC, 1, "simulated", "", "none", "", 0.0)
        state = messages.ActorState(online, "swarm", BOOT, self._beats, birth)
        return self._mac.seal(self._topics.actor_state(self._id), codec.encode(state))

    def _connected(self, client: mqtt.Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.is_failure:
            raise ConnectionError(f"{self._id}: {reason}")
        names, channel = self._topics, topics.MAIN_CHANNEL
        wanted = (names.assignment(self._id), names.receipt(self._id), names.keyframe(channel), names.delta(channel))
        client.subscribe([(name, 1) for name in wanted])

    def _message(self, client: mqtt.Client, userdata: Any, message: mqtt.MQTTMessage) -> None:
        if not message.payload:
            return
        body = self._verifier.open(message.topic, message.payload)
        leaf = message.topic.rpartition("/")[2]
        if leaf == "receipt":
            self._acknowledge(codec.decode(messages.Receipt, body))
        elif leaf == "assignment":
            assignment = codec.decode(messages.Assignment, body)
            if assignment.boot == BOOT:
                self._assignment = assignment
        else:
            self._take_policy(leaf, body, message.payload)

    def _acknowledge(self, receipt: messages.Receipt) -> None:
        now = time.monotonic()
        while self._held and receipt.boot == BOOT and self._held[0][0] <= receipt.seq:
            _, steps, sent_s = self._held.popleft()
            if sent_s >= self._tally.warm_until_s:
                self._tally.receipt_s.append(now - sent_s)
            self._tally.receipted += 1
            self._tally.steps += steps
            if not self._tally.warm_s and self._made > self._load.messages // 10:  # by then the learner has compiled
                self._tally.warm_s, self._tally.warm_steps = now, self._tally.steps
                self._tally.receipt_s.clear()
            self._tally.last_receipt_s = now

    def _take_policy(self, leaf: str, body: memoryview, sealed: bytes) -> None:
        try:
            if leaf == "keyframe":
                self._policies.add_keyframe(codec.decode(messages.Policy, body), sealed, 0.0)
            else:
                self._policies.add_delta(codec.decode(messages.PolicyDelta, body), sealed, 0.0)
            waiting = self._policies.take_waiting()
            if waiting is not None:
                self._policies.add_delta(*waiting, 0.0)
        except errors.PolicyError:
            self._tally.refused += 1
            return
        newest = self._policies.newest
        if newest is not None:
            self._tally.verified_s[newest.manifest.version].append(time.monotonic())


class Swarm:
    """Simulated actors on one epoll loop."""

    def __init__(self, bundles: Sequence[identity.Bundle], load: Load) -> None:
        self.tally = Tally()
        self._load = load
        self._bundles = list(bundles)
        self._actors: dict[int, SimulatedActor] = {}
        self._poll = select.epoll()
        self._writing: set[int] = set()
        self._due: list[tuple[float, int, str]] = []
        self._stop = False

    def stop(self) -> None:
        """Ends `run` soon; safe in a signal handler."""
        self._stop = True

    def run(self) -> None:
        """Connects everybody, says so, and serves them until all are done or `stop`."""
        said = False
        while not (self._stop or (said and self._load.messages and all(a.done for a in self._actors.values()))):
            if self._bundles and len(self._actors) - self.tally.connected < CONNECTS_AT_ONCE:
                self._connect(self._bundles.pop())
            if not said and not self._bundles and self.tally.connected == len(self._actors):
                said = True
                self.tally.warm_until_s = time.monotonic() + self._load.warm_s
                print(json.dumps({"connected": self.tally.connected, "at_s": time.monotonic()}), flush=True)
            self._serve()
            self._run_due()
        deadline = time.monotonic() + RECEIPTS_TIMEOUT_S
        while any(actor.held for actor in self._actors.values()) and time.monotonic() < deadline:
            self._serve()
        for actor in self._actors.values():
            actor.close()

    def _connect(self, bundle: identity.Bundle) -> None:
        actor = SimulatedActor(bundle, self._load, self.tally)
        number = actor.socket.fileno()
        self._actors[number] = actor
        self._poll.register(number, select.EPOLLIN)
        now = time.monotonic()
        heapq.heappush(self._due, (now + HEARTBEAT_S * random.uniform(0.5, 1.0), number, "beat"))
        heapq.heappush(self._due, (now + random.random(), number, "send"))

    def _serve(self) -> None:
        wait_s = 0.0 if self._bundles else min(0.1, max(0.0, self._due[0][0] - time.monotonic()))
        for number, event in self._poll.poll(wait_s):
            actor = self._actors[number]
            if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._read(number, actor)
            if event & select.EPOLLOUT:
                actor.client.loop_write()
            if not self._load.rate:
                while not self._stop and actor.send():
                    pass
            self._watch(number, actor)

    def _read(self, number: int, actor: SimulatedActor) -> None:
        while True:
            actor.client.loop_read()
            if actor.client.socket() is None:
                self.tally.lost += 1
                raise ConnectionError("an actor lost its connection")
            if not (isinstance(actor.socket, ssl.SSLSocket) and actor.socket.pending()):
                return

    def _watch(self, number: int, actor: SimulatedActor) -> None:
        """Asks for the socket to be writable as long as paho has something to write."""
        wants = actor.client.want_write()
        if wants != (number in self._writing):
            self._poll.modify(number, select.EPOLLIN | (select.EPOLLOUT if wants else 0))
            (self._writing.add if wants else self._writing.discard)(number)

    def _run_due(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            at, number, what = heapq.heappop(self._due)
            actor = self._actors[number]
            if what == "beat":
                actor.beat()
                actor.client.loop_misc()
                after = max(HEARTBEAT_S, actor.period_s)
            else:
                steps = actor.message_steps
                if actor.starts and self._load.rate:  # as in edge_actor/recorder.py
                    after = random.random() * actor.period_s
                else:
                    after = steps / self._load.rate if actor.send() and self._load.rate else 0.05
            heapq.heappush(self._due, (max(now, at) + after, number, what))
            self._watch(number, actor)


def report(tally: Tally) -> dict[str, Any]:
    """The last line."""
    receipt_ms = np.array(tally.receipt_s or [np.nan]) * 1e3
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "connected": tally.connected,
        "lost": tally.lost,
        "sent": tally.sent,
        "receipted": tally.receipted,
        "steps": tally.steps,
        "bytes_sent": tally.bytes_sent,
        "first_sent_s": tally.first_sent_s,
        "last_receipt_s": tally.last_receipt_s,
        "warm_s": tally.warm_s,
        "warm_steps": tally.warm_steps,
        "receipt_ms": {p: round(float(np.percentile(receipt_ms, p)), 2) for p in (50, 99, 100)},
        "held_max": tally.held_max,
        "refused": tally.refused,
        "verified_s": {str(version): seen for version, seen in tally.verified_s.items()},
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "rss_mb": round(usage.ru_maxrss / 1024, 1),
    }


def main() -> None:
    """Runs a swarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, required=True, help="directory of enrolment bundles")
    parser.add_argument("--first", type=int, default=0, help="index of the first bundle to take")
    parser.add_argument("--count", type=int, default=1 << 30, help="how many")
    parser.add_argument("--rate", type=float, default=0.0, help="steps/s of each actor; 0: as fast as receipts come")
    parser.add_argument("--message-steps", type=int, default=256, help="of each message, where there is no rate")
    parser.add_argument("--window", type=int, default=64, help="messages without a receipt, at most")
    parser.add_argument("--messages", type=int, default=0, help="messages of each actor; 0: until SIGTERM")
    parser.add_argument("--warm-s", type=float, default=0.0, help="receipts of what is sent before do not count")
    args = parser.parse_args()
    files = sorted(args.bundles.glob("*.json"))[args.first : args.first + args.count]
    load = Load(args.rate, args.message_steps, args.window, args.messages, args.warm_s)
    swarm = Swarm([identity.Bundle.read(file) for file in files], load)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *args: swarm.stop())
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    swarm.run()
    print(json.dumps(report(swarm.tally)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
