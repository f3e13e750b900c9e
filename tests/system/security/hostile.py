"""A broker in an attacker's hands: a real Mosquitto on which the attacker says and hears what it likes.

With it a real actor process, and a learner that says what the test wants it to say.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from broker.contract import codec, messages, signing, topics
from broker.fleet import identity
from edge_actor.environment import env
from tests import conftest
from tests.edge_actor.policies.models import files
from tests.fakes import fake_learner
from tests.fakes.connections import plain_client

SPEC = env.make("CartPole-v1").spec


def variant(version: int) -> bytes:
    """A sound model, a little different for each version below 256."""
    data = bytearray(files.INT8.read_bytes())
    data[len(data) // 5] = version
    return bytes(data)


class Stage:
    """Actor `pi` of fleet `lab`; `other` is enrolled too, and its keys are the attacker's.

    Attributes:
        attacker: May publish anything anywhere, and reads everything.
    """

    def __init__(self, broker: conftest.BrokerProcess, directory: Path) -> None:
        self.directory = directory
        self.names = topics.Topics("lab")
        self.fleet = identity.Fleet.open("lab", directory / "fleet")
        self.fleet.enroll("pi", [broker.address]).write(directory / "pi.json")
        self.other = signing.ActorMac(self.fleet.enroll("other").mac_key)
        self.mac = signing.ActorMac(self.fleet.bundle("pi").mac_key)
        self.learner = fake_learner.FakeLearner(broker.address, self.fleet, "pi")
        self.attacker = plain_client.PlainClient(broker.port, "attacker")
        self.attacker.subscribe("actorq/#")
        self.actor: subprocess.Popen[str] | None = None
        self.boot = 0

    def start(self, *arguments: str) -> None:
        """Starts the actor, and waits until it is born."""
        command = [sys.executable, "-m", "edge_actor", "run", "--bundle", str(self.directory / "pi.json")]
        command += ["--env", "CartPole-v1", "--heartbeat-s", "0.1", "--state-dir", str(self.directory / "state")]
        command += ["--spool-dir", str(self.directory / "spool"), *arguments]
        log = (self.directory / "actor.log").open("a")
        self.actor = subprocess.Popen(command, stderr=log, text=True)
        log.close()
        before = self.boot
        conftest.wait_until(lambda: self.learner.state and self.learner.state.boot > before, "it is born", 30.0)
        self.boot = self.learner.await_birth().boot

    def kill(self) -> None:
        if self.actor is not None:
            self.actor.kill()
            self.actor.wait()

    def close(self) -> None:
        self.kill()
        self.attacker.__exit__(None, None, None)
        self.learner.close()

    @property
    def log(self) -> str:
        return (self.directory / "actor.log").read_text()

    @property
    def vitals(self) -> messages.Vitals:
        """Returns the vitals that the actor last told."""
        assert self.learner.state is not None
        return self.learner.state.vitals

    def sealed(self, topic: str, message: messages.Message) -> bytes:
        """Returns a message sealed as only the learner can."""
        return self.fleet.sealer.seal(topic, codec.encode(message))

    def policy(self, version: int, **changes: object) -> messages.Policy:
        return fake_learner.policy(variant(version % 256), SPEC.fingerprint, version=version, **changes)

    def publish(self, version: int, **changes: object) -> bytes:
        """The learner publishes a keyframe; its sealed bytes, once it acts."""
        policy = self.policy(version, **changes)
        self.learner.publish(policy)
        self.await_acting(version)
        return self.sealed(self.names.policy("main"), policy)

    def await_acting(self, version: int) -> None:
        conftest.wait_until(lambda: self.vitals.policy_version == version, f"policy {version} acts", 20.0)

    def await_refused(self, **expected: int) -> None:
        """Waits until these refusals are counted: exactly so many."""
        reached = lambda: all(self.vitals.refused.get(reason, 0) >= n for reason, n in expected.items())  # noqa: E731
        try:
            conftest.wait_until(reached, "counted", 20.0)
        finally:
            counted = {reason: self.vitals.refused.get(reason, 0) for reason in expected}
            assert counted == expected, (self.vitals.refused, self.log)

    def goes_on(self) -> None:
        """It lives, and it acts."""
        assert self.actor is not None and self.actor.poll() is None, self.log
        before = self.vitals.steps
        conftest.wait_until(lambda: self.vitals.steps > before, "it acts on", 20.0)


def forgeries(stage: Stage, topic: str, genuine: bytes) -> list[bytes]:
    """Returns what a broker can make of a genuine payload, or invent, without the learner's key: all to be refused."""
    body = codec.encode(messages.Receipt("x", 1, 1))
    stranger = identity.Fleet.open("lab", stage.directory / "another-fleet").sealer
    flipped = [bytes(byte ^ (i == at) for i, byte in enumerate(genuine)) for at in (0, 2, 3, 5, 70, len(genuine) - 1)]
    opened = signing.LearnerVerifier(stage.fleet.sealer.public_key).open(topic, genuine)
    return [
        *flipped,
        genuine[:-1],
        genuine + b"\0",
        b"AQ",
        bytes(opened),  # unsigned
        stage.mac.seal(topic, bytes(opened)),  # the actor's own key: shared, and for the other direction
        stage.other.seal(topic, bytes(opened)),
        stranger.seal(topic, bytes(opened)),
        genuine[:68] + body,  # a genuine signature over something else
        stage.sealed(stage.names.receipt("pi") + "x", messages.Receipt("x", 1, 1)),  # at another topic
    ]
