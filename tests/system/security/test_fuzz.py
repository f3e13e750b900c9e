"""Mutated and random payloads at every topic, into what really opens them: learner and actor but for the network.

The attacker is a broker (it can say anything anywhere, but has no key), and an enrolled actor (its MAC is good, what it
says is not). Beyond what any attacker can do, the actor is also fed mutations that bear the learner's signature.
Nothing crashes; what was sent is what was taken plus what was counted as refused, to the message. FUZZ_PAYLOADS says
how many for each topic, of some a fraction: `make fuzz` says 100 000.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract import codec, errors, messages, signing, topics
from broker.contract.policies import policy_patch
from broker.fleet import identity
from broker.mqtt import link
from edge_actor import config
from edge_actor.environment import env
from edge_actor.run import build, sender
from learner import config as learner_config
from learner.experience import dead_letters, ledger, validate
from learner.fleet import roster, session
from learner.run import local_fleet
from tests.broker.contract.payloads import examples, mutations
from tests.edge_actor.policies.models import files
from tests.fakes import fake_learner, fleet_examples
from tests.system import at_work

pytestmark = [pytest.mark.system, pytest.mark.slow]
PAYLOADS = int(os.environ.get("FUZZ_PAYLOADS", "4000"))
LAB = topics.Topics("lab")
STRANGER = signing.ActorMac(b"s" * 32)


class Link:
    """Stands where the connection is: `deliver` is the broker."""

    made: list[Link] = []

    def __init__(self, brokers: Any, client_id: str, **options: Any) -> None:
        self.handlers: dict[str, link.Handler] = {}
        self.connected = True
        self.connections = 1
        self.bytes_sent = self.bytes_received = self.handler_errors = self.in_flight = 0
        self.address = "nowhere"
        self.on_connect = options.get("on_connect") or (lambda: None)
        self.said: dict[str, bytes] = {}
        Link.made.append(self)

    def subscribe(self, topic_filter: str, handler: link.Handler) -> None:
        self.handlers[topic_filter] = handler

    route = subscribe

    def start(self) -> None:
        self.on_connect()

    def retain(self, topic: str, payload: Any) -> None:
        self.said[topic] = payload() if callable(payload) else payload

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:  # what has no effect here: poll, rest, close, ...
        return lambda *args, **kwargs: None

    def deliver(self, topic: str, payload: bytes) -> None:
        actor = "/".join("+" if i == 3 else part for i, part in enumerate(topic.split("/")))
        (self.handlers.get(topic) or self.handlers[actor])(topic, payload, False)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    Link.made = []
    monkeypatch.setattr(link, "Link", Link)
    monkeypatch.setattr(sender, "IDLE_S", 0.0)  # nothing comes while it sleeps


def genuine(kind: str, **changes: Any) -> bytes:
    """A sound body of a kind, for the actor's boot and environment where it has to be."""
    return codec.encode(examples.EXAMPLES[kind]) if not changes else codec.encode(_changed(kind, changes))


def _changed(kind: str, changes: dict[str, Any]) -> messages.Message:
    message: messages.Message = dataclasses.replace(examples.EXAMPLES[kind], **changes)
    return message


# -- the learner ------------------------------------------------------------------------------------------------------


class Learner:
    """Session, roster and validator, as a run joins them."""

    def __init__(self, directory: Path) -> None:
        fleet = identity.Fleet.open("lab")
        self.macs = {name: signing.ActorMac(fleet.enroll(name).mac_key) for name in ("pi", "rogue")}
        self.session = session.Session.open(learner_config.TrainConfig(fleet="lab", env="CartPole-v1"))
        self.roster = roster.Roster(self.session.id, self.session.epoch, "CartPole-v1")
        self.ingest = validate.Validator(
            self.session.macs,
            fleet_examples.SPEC,
            (1, self.session.epoch),
            {},
            dead_letters.DeadLetters(directory / dead_letters.NAME),
            lambda steps, segments: steps <= 1000,
        )
        self.directory = directory
        self.taken: Counter[str] = Counter()

    def hear(self, topic: str, payload: bytes) -> None:
        Link.made[0].deliver(topic, payload)
        for arrival in self.session.drain(0.0):
            if isinstance(arrival.message, messages.ActorState):
                self.roster.observe(arrival.actor_id, arrival.message, retained=arrival.retained, now_s=1.0)
                self.roster.expire(2.0)
                self.taken["state"] += 1
            elif isinstance(arrival.message, messages.Report):
                self.taken["report"] += 1
            else:
                taken = self.ingest.validate(arrival.actor_id, arrival.topic, arrival.message, 5)
                if taken is not None:
                    self.ingest.note_committed([taken.entry])
                    self.taken["experience"] += taken.entry.verdict == ledger.OK
                list(self.ingest.receipts("ledger"))

    @property
    def refused(self) -> int:
        return self.ingest.refused.total() + self.session.refused.total()


def test_the_learner(tmp_path: Path, no_network: None) -> None:
    learner, source = Learner(tmp_path), random.Random(1)
    bodies = {
        "state": codec.encode(fleet_examples.state()),
        "experience": codec.encode(fleet_examples.experience()),
        "report": genuine("report"),
    }
    sent = 0
    for leaf, body in bodies.items():
        for _ in range(PAYLOADS):
            mutated = mutations.any_of(body, source)
            topic = LAB.actor("rogue", leaf)
            learner.hear(topic, learner.macs["rogue"].seal(topic, mutated))  # enrolled
            topic = LAB.actor("pi", leaf)
            outside = (mutated, STRANGER.seal(topic, mutated), learner.macs["rogue"].seal(topic, mutated))
            learner.hear(topic, source.choice(outside))
            learner.hear(LAB.actor("nobody", leaf), source.choice(outside))
            learner.hear(topic, _unlike(learner.macs["pi"].seal(topic, body), source))
            sent += 4
    for _ in range(PAYLOADS):
        mutated = mutations.any_of(genuine("learner_state"), source)
        topic = LAB.learner_state
        learner.hear(
            topic, source.choice((mutated, STRANGER.seal(topic, mutated), examples.LEARNER.seal(topic, mutated)))
        )
        sent += 1
    assert learner.refused + learner.taken.total() == sent
    assert learner.taken["experience"] == learner.ingest.messages
    assert learner.ingest.refused["signature"] >= PAYLOADS
    assert learner.roster.actors.keys() == {"rogue"}, "nothing of what strangers say is kept"
    # It works as before
    topic = LAB.experience("pi")
    learner.hear(topic, learner.macs["pi"].seal(topic, codec.encode(fleet_examples.experience())))
    assert learner.refused + learner.taken.total() == sent + 1
    assert learner.taken["experience"] >= 1


# -- the actor --------------------------------------------------------------------------------------------------------


class Actor:
    """A whole actor, turned by hand."""

    def __init__(self, directory: Path) -> None:
        self.fleet = identity.Fleet.open("lab")
        settings = config.ActorConfig(
            env="CartPole-v1", state_dir=str(directory / "state"), spool_dir=str(directory / "spool"), heartbeat_s=60.0
        )
        self.actor = build.build(settings, self.fleet.enroll("pi"))
        loop = self.actor.start()
        assert loop is not None
        self.loop = loop
        self.mac = signing.ActorMac(self.fleet.bundle("pi").mac_key)
        self.link = Link.made[-1]
        self.boot = self.state.boot

    @property
    def state(self) -> messages.ActorState:
        topic = LAB.actor_state("pi")
        self.loop.status.publish()
        return codec.decode(messages.ActorState, self.mac.open(topic, self.link.said[topic]))

    @property
    def refused(self) -> int:
        return sum(n for reason, n in self.state.vitals.refused.items() if reason != "silence")

    def hears(self, topic: str, payload: bytes) -> None:
        self.link.deliver(topic, payload)

    def poll(self) -> None:
        with contextlib.suppress(errors.ActorRefused):  # as a learner may say, with a signature
            self.loop.run_once()


CARTPOLE = env.make("CartPole-v1").spec
MODEL = files.INT8.read_bytes()


def test_the_actor_and_a_broker(tmp_path: Path, no_network: None) -> None:
    """Without the learner's key: not one gets through."""
    fuzzed, source = Actor(tmp_path), random.Random(2)
    try:
        policy = fake_learner.policy(MODEL, CARTPOLE.fingerprint)
        bodies = {
            LAB.learner_state: genuine("learner_state"),
            LAB.policy("main"): codec.encode(policy),
            LAB.policy_patch("main"): genuine("policy_patch"),
            LAB.policy_piece("main"): genuine("policy_piece"),
            LAB.assignment("pi"): codec.encode(fake_learner.assignment(fuzzed.boot, steps_granted=100)),
            LAB.receipt("pi"): genuine("receipt", boot=fuzzed.boot),
            LAB.command("pi"): genuine("command", boot=fuzzed.boot),
        }
        sealer, sent = fuzzed.fleet.sealer, 0
        for topic, body in bodies.items():
            sealed = sealer.seal(topic, body)
            for _ in range(PAYLOADS // 2):
                mutated = mutations.any_of(body, source) or b"\0"  # an empty one only says that nothing is retained
                outside = (mutated, fuzzed.mac.seal(topic, mutated), examples.LEARNER.seal(topic, mutated))
                fuzzed.hears(topic, source.choice(outside))
                fuzzed.hears(topic, _unlike(sealed, source))
                sent += 2
            fuzzed.poll()
        fuzzed.poll()
        assert fuzzed.refused == sent
        assert fuzzed.state.vitals.refused.keys() <= {"signature", "silence"}
        assert fuzzed.state.vitals.policy_version == 0
        fuzzed.hears(LAB.policy("main"), sealer.seal(LAB.policy("main"), bodies[LAB.policy("main")]))
        fuzzed.poll()
        assert fuzzed.state.vitals.policy_version == 1, "it works as before"
    finally:
        fuzzed.actor.close()


def _unlike(sealed: bytes, source: random.Random) -> bytes:
    """Damaged, and not by chance what it was; an empty payload would be no message."""
    while True:
        payload = mutations.damaged(sealed, source)
        if payload not in (sealed, b""):
            return payload


def test_the_actor_and_a_learner_gone_mad(tmp_path: Path, no_network: None, caplog: pytest.LogCaptureFixture) -> None:
    """With the learner's signature: what can be obeyed is, the rest is refused, and none of it ends the actor."""
    fuzzed, source = Actor(tmp_path), random.Random(3)
    try:
        policy = fake_learner.policy(MODEL, CARTPOLE.fingerprint)
        onto = fake_learner.patch(MODEL, MODEL, CARTPOLE.fingerprint, base_version=1, version=2)
        patch = policy_patch.difference(MODEL, MODEL)
        piece = messages.PolicyPiece(1, 2, 1, 1, 0, len(MODEL), None, patch)
        order = messages.Command("c", "evaluate", fuzzed.boot, 1, 0, policy.manifest, policy.model)
        bodies = {
            LAB.learner_state: genuine("learner_state"),
            LAB.policy("main"): codec.encode(policy),
            LAB.policy_patch("main"): codec.encode(onto),
            LAB.policy_piece("main"): codec.encode(piece),
            LAB.assignment("pi"): codec.encode(fake_learner.assignment(fuzzed.boot, steps_granted=100)),
            LAB.receipt("pi"): genuine("receipt", boot=fuzzed.boot),
            LAB.command("pi"): codec.encode(order),
        }
        for index in range(PAYLOADS // 4):
            for topic, body in bodies.items():
                fuzzed.hears(topic, fuzzed.fleet.sealer.seal(topic, mutations.any_of(body, source)))
            if index % 10 == 0:
                fuzzed.poll()
        assert not [line for line in caplog.messages if "failed" in line]
        assert "fault" not in fuzzed.state.vitals.refused, caplog.text
        assert fuzzed.refused >= PAYLOADS // 4
    finally:
        fuzzed.actor.close()


# -- both, at work ----------------------------------------------------------------------------------------------------


def test_a_fleet_at_work(start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path) -> None:
    """Through a real Mosquitto into real processes, at all topics at once, while they learn and act."""
    training, source = at_work.Training(start_fleet("mosquitto"), run_root / "run"), random.Random(4)
    names, sent = training.names, 0
    heard = {kind: examples.golden(kind) for kind in ("learner_state", "actor_state", "experience", "report")}
    kinds = ("policy", "policy_patch", "policy_piece", "assignment", "receipt", "command")
    unheard = {kind: examples.golden(kind) for kind in kinds}
    where = {
        "learner_state": [names.learner_state],
        "policy": [names.policy("main")],
        "policy_patch": [names.policy_patch("main")],
        "policy_piece": [names.policy_piece("main")],
        "actor_state": [names.actor_state("pi"), names.actor_state("nobody")],
    }
    for index in range(PAYLOADS // 8):
        for kind, body in (heard | unheard).items():
            for topic in where.get(kind) or [names.actor("pi", kind), names.actor("nobody", kind)]:
                mutated = mutations.any_of(body, source) or b"\0"
                outside = (mutated, STRANGER.seal(topic, mutated), examples.LEARNER.seal(topic, mutated))
                training.attacker.publish(topic, source.choice(outside), wait=index % 20 == 19)
                sent += kind in heard
    training.await_refused(sent)
    training.goes_on()
    refused = training.end()
    assert sum(n for reason, n in refused.items() if reason not in ("duplicate", "gap")) == sent
    training.attacker.__exit__(None, None, None)
