"""A learner without learning, over a real broker: publishes policies, assigns, grants, gives receipts, keeps messages.

As a program it serves one actor until it is killed: `python -m tests.fakes.fake_learner BROKER FLEET_DIR FLEET
ACTOR MODEL EPSILON MESSAGE_STEPS [HEAD]`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import queue
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import codec, messages, previous, signing, topics
from broker.contract.policies import policy_patch
from broker.fleet import identity
from broker.mqtt import link
from tests import conftest


def manifest(model: bytes, fingerprint: str, **changes: Any) -> messages.Manifest:
    """Returns a manifest that fits, but for `changes`."""
    fields: dict[str, Any] = {
        "epoch": 1,
        "version": 1,
        "channel": topics.MAIN_CHANNEL,
        "length": len(model),
        "sha256": hashlib.sha256(model).hexdigest(),
        "fingerprint": fingerprint,
        "head": "q_values",
        "precision": "int8",
        "created_s": time.time(),
    }
    return messages.Manifest(**(fields | changes))


def policy(model: bytes, fingerprint: str, **changes: Any) -> messages.Policy:
    return messages.Policy(manifest(model, fingerprint, **changes), np.frombuffer(model, np.uint8))


def patch(base: bytes, model: bytes, fingerprint: str, *, base_version: int, **changes: Any) -> messages.PolicyPatch:
    """A policy as a patch on the retained one."""
    about = manifest(model, fingerprint, **changes)
    difference = policy_patch.difference(base, model)
    return messages.PolicyPatch(*about.order, base_version, manifest_changes(about), difference)


def step(base: bytes, model: bytes, fingerprint: str, *, base_version: int, **changes: Any) -> messages.PolicyPiece:
    """A policy as one piece on the policy before it."""
    about = manifest(model, fingerprint, **changes)
    ends, difference = manifest_changes(about), policy_patch.difference(base, model)
    return messages.PolicyPiece(*about.order, base_version, about.version, 0, len(model), ends, difference)


def manifest_changes(about: messages.Manifest) -> messages.ManifestChanges:
    """Returns what a patch or a last piece says of its policy's manifest."""
    return messages.ManifestChanges(about.sha256, about.created_s, about.expires_s)


def assignment(boot: int, **changes: Any) -> messages.Assignment:
    """Returns an assignment that grants nothing and never explores, but for `changes`."""
    fields: dict[str, Any] = {
        "session": "learner-1",
        "epoch": 1,
        "boot": boot,
        "channel": topics.MAIN_CHANNEL,
        "slot": 0,
        "epsilon_start": 0.0,
        "epsilon_end": 0.0,
        "epsilon_decay_steps": 1,
        "epsilon_offset": 0,
        "seed": 0,
        "steps_granted": 0,
        "message_steps": 256,
        "message_period_s": 0.05,
    }
    return messages.Assignment(**(fields | changes))


class FakeLearner:
    """Serves one actor of a fleet.

    Attributes:
        experience: Every message of experience that came, in order; `ways`: the topic of each.
        states: Every state of the actor that came.
        reports: Every report.
        receipts: Whether experience is receipted.
        beats: Whether it says that it is alive, each time the actor does.
    """

    def __init__(self, broker: str, fleet: identity.Fleet, actor_id: str) -> None:
        self._actor_id = actor_id
        self._sealer = fleet.sealer
        self._mac = signing.ActorMac(fleet.bundle(actor_id).mac_key)
        self._boot = self._seq = 0
        self.topics = topics.Topics(fleet.name)
        self.experience: list[messages.Experience] = []
        self.ways: list[str] = []
        self.states: list[messages.ActorState] = []
        self.receipts = self.beats = True
        self.reports: queue.SimpleQueue[messages.Report] = queue.SimpleQueue()
        self.link = link.Link([broker], "learner", username=identity.LEARNER_USER, password=fleet.password)
        self.link.subscribe(self.topics.experience(actor_id), self._on_experience)
        self.link.subscribe(self.topics.ingest("+", actor_id), self._on_experience)
        self.link.subscribe(self.topics.actor_state(actor_id), self._on_state)
        self.link.subscribe(self.topics.report(actor_id), self._on_report)
        self.link.start()
        self.link.wait_connected(10.0)

    @property
    def state(self) -> messages.ActorState | None:
        """The newest state that the actor told of itself."""
        return self.states[-1] if self.states else None

    @property
    def steps(self) -> int:
        """The number of steps that arrived, duplicates not counted."""
        return sum({message.seq: len(message.reward) for message in self.experience}.values())

    def say(self, topic: str, message: messages.Message, *, retain: bool = True) -> None:
        sealed = self._sealer.seal(topic, codec.encode(message, previous.VERSION))  # as a learner does
        if retain:
            self.link.retain(topic, sealed)
        else:
            conftest.wait_until(lambda: self.link.publish(topic, sealed), "published")

    def assign(self, assigned: messages.Assignment) -> None:
        self.say(self.topics.assignment(self._actor_id), assigned)

    def publish(self, published: messages.Policy) -> None:
        self.say(self.topics.policy(topics.MAIN_CHANNEL), published)

    def publish_patch(self, published: messages.PolicyPatch) -> None:
        self.say(self.topics.policy_patch(topics.MAIN_CHANNEL), published)

    def publish_piece(self, published: messages.PolicyPiece) -> None:
        self.say(self.topics.policy_piece(topics.MAIN_CHANNEL), published, retain=False)

    def command(self, order: messages.Command) -> None:
        self.say(self.topics.command(self._actor_id), order, retain=False)

    def await_birth(self, timeout_s: float = 20.0) -> messages.ActorState:
        """Waits for an actor that lives; returns its state."""
        conftest.wait_until(lambda: self.state is not None and self.state.online, "the actor is born", timeout_s)
        assert self.state is not None
        return self.state

    def await_steps(self, steps: int, timeout_s: float = 20.0) -> None:
        conftest.wait_until(lambda: self.steps >= steps, f"{steps} steps arrived", timeout_s)

    def close(self) -> None:
        self.link.close()

    def _on_experience(self, topic: str, payload: bytes, retained: bool) -> None:
        message = codec.decode(messages.Experience, self._mac.open(topic, payload))
        receipted = self.receipts  # read before a test sees the message, and sets it for the next one
        self.ways.append(topic)
        self.experience.append(message)
        if message.boot != self._boot:
            self._boot, self._seq = message.boot, 0
        if message.seq == self._seq + 1:  # a receipt covers all before it, so it waits for what a broker lost
            self._seq = message.seq
        if receipted:
            self.say(self.topics.receipt(self._actor_id), messages.Receipt("ledger-1", self._boot, self._seq))

    def _on_state(self, topic: str, payload: bytes, retained: bool) -> None:
        self.states.append(codec.decode(messages.ActorState, self._mac.open(topic, payload)))
        if not self.beats:
            return
        alive = messages.LearnerState(True, "learner-1", 1, len(self.states), fingerprint="any")
        topic = self.topics.learner_state
        self.link.publish(topic, self._sealer.seal(topic, codec.encode(alive, previous.VERSION)))

    def _on_report(self, topic: str, payload: bytes, retained: bool) -> None:
        self.reports.put(codec.decode(messages.Report, self._mac.open(topic, payload)))


def main(
    broker: str,
    directory: str,
    name: str,
    actor_id: str,
    model: str,
    epsilon: str,
    message_steps: str,
    head: str = "q_values",
) -> None:
    """Grants without end, and forgets what it receives."""
    learner = FakeLearner(broker, identity.Fleet.open(name, Path(directory), create=False), actor_id)
    born = learner.await_birth(60.0)
    assert born.birth is not None
    learner.publish(policy(Path(model).read_bytes(), born.birth.spec.fingerprint, head=head))
    learner.assign(
        dataclasses.replace(
            assignment(born.boot, steps_granted=1 << 40, message_steps=int(message_steps), message_period_s=1.0),
            epsilon_start=float(epsilon),
            epsilon_end=float(epsilon),
        )
    )
    while True:
        time.sleep(0.5)
        learner.experience.clear()
        learner.states.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
