"""Attacks on a learner at work: by the broker, and by an actor that is enrolled and lies.

Each is refused, counted in the summary, kept in the dead letters where it came as experience, and training goes on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker import codec, messages, signing
from learner import local_fleet
from tests.broker import plain_client
from tests.learner import fleet_examples
from tests.system import at_work

pytestmark = [pytest.mark.system, pytest.mark.mosquitto]


@pytest.fixture
def training(start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path) -> Iterator[at_work.Training]:
    made = at_work.Training(start_fleet("mosquitto"), run_root / "run")
    yield made
    made.attacker.__exit__(None, None, None)


def forgeries(genuine: bytes, topic: str, mac: signing.ActorMac, others: signing.ActorMac) -> list[bytes]:
    """What can be made of a genuine payload without its actor's key."""
    body = bytes(mac.open(topic, genuine))
    flipped = [bytes(byte ^ (i == at) for i, byte in enumerate(genuine)) for at in (0, 2, 3, 9, 40, len(genuine) - 1)]
    return [*flipped, genuine[:-1], genuine + b"\0", b"", b"AQ", body, others.seal(topic, body)]


def test_a_broker_that_alters_invents_moves_replays_and_delays(training: at_work.Training) -> None:
    """Experience, states and reports; and a rival learner that does not exist."""
    names, publish = training.names, training.attacker.publish
    expected: Counter[str] = Counter()
    for leaf, reason in (("experience", "signature"), ("state", "state.signature")):
        topic = names.actor("pi", leaf)
        genuine = training.capture(leaf, 3)
        for payload in genuine:
            bad = forgeries(payload, topic, training.pi, training.rogue)
            for forged in bad:
                publish(topic, forged)
            publish(names.actor("rogue", leaf), payload)  # moved to another actor's topic
            expected[reason] += len(bad) + 1
            publish(names.actor("nobody", leaf), payload)
            expected["unknown_actor" if leaf == "experience" else "state.unknown_actor"] += 1
    report = codec.encode(messages.Report("x-1", "evaluate", episode_return=np.full(20, 1e9, np.float32)))
    for payload in (report, training.rogue.seal(names.report("pi"), report)):
        publish(names.report("pi"), payload)
        expected["report.signature"] += 1
    rival = codec.encode(messages.LearnerState(True, "rival", 1 << 60, 1))
    for payload in (rival, training.pi.seal(names.learner_state, rival)):
        publish(names.learner_state, payload)  # it would make this learner give way
        expected["state.signature"] += 1
    replayed = training.capture("experience", 20)
    for payload in random.Random(3).sample(replayed * 2, 40):  # late, in no order, twice
        publish(names.experience("pi"), payload)
    training.await_refused(expected.total() + 40)
    training.goes_on()
    refused = training.end()
    assert {reason: refused[reason] for reason in expected} == expected
    assert refused["duplicate"] + refused["gap"] >= 40
    assert refused.keys() <= expected.keys() | {"duplicate", "gap"}
    assert training.book("SELECT 1 FROM messages GROUP BY actor, boot, seq HAVING count(*) > 1") == []
    assert {actor for (actor,) in training.book("SELECT DISTINCT actor FROM messages")} == {"pi"}
    kept = Counter(letter["reason"] for letter in training.letters)
    assert kept == {reason: expected[reason] for reason in ("signature", "unknown_actor")}


POISON: dict[str, tuple[str, dict[str, Any]]] = {
    "shape of the observations": ("shape", {"observation": np.zeros((5, 3), np.float32)}),
    "number of observations": ("shape", {"observation": np.zeros((4, 4), np.float32)}),
    "dtype of the observations": ("shape", {"observation": np.zeros((5, 4), np.uint8)}),
    "dtype of the actions": ("shape", {"action": np.zeros(3, np.float32)}),
    "lengths that do not add up": ("shape", {"length": np.array([1 << 30, 1 << 30], np.int32)}),
    "a length below nothing": ("shape", {"length": np.array([4, -1], np.int32)}),
    "no segments": ("shape", {name: np.zeros(0, np.int32) for name in ("length", "env_index", "episode_length")}),
    "NaN as an observation": ("value", {"observation": np.full((5, 4), np.nan, np.float32)}),
    "NaN as a reward": ("value", {"reward": np.array([1, np.nan, 1], np.float32)}),
    "an infinite return": ("value", {"episode_return": np.array([np.inf, 1], np.float32)}),
    "a flag that is none": ("value", {"truncated": np.array([7, 0], np.uint8)}),
    "an action out of bounds": ("action", {"action": np.array([0, 1, 2], np.int32)}),
    "an action below nothing": ("action", {"action": np.array([0, -1, 0], np.int32)}),
    "a policy never published": ("version", {"version": 1 << 40}),
    "a policy of an epoch to come": ("version", {"epoch": 1 << 40}),
    "another run": ("epoch", {"assigned_epoch": 1 << 40}),
    "another environment": ("fingerprint", {"fingerprint": "0" * 16}),
    "longer than replay": ("too_long", {"lengths": (600_000, 600_000)}),
}


def test_an_enrolled_actor_that_sends_poison(training: at_work.Training) -> None:
    """Each is counted, a dead letter with its reason, receipted lest it come for ever, and never learned from."""
    topic = training.names.experience("rogue")
    expected = Counter(reason for reason, _ in POISON.values())
    with plain_client.PlainClient(int(training.fleet.broker["port"]), "rogue") as rogue:
        rogue.subscribe(training.names.receipt("rogue"))
        for seq, (_, changes) in enumerate(POISON.values(), 1):
            body = codec.encode(fleet_examples.experience(**({"seq": seq, "assigned_epoch": 1} | changes)))
            rogue.publish(topic, training.rogue.seal(topic, body))
        schema = codec.encode(fleet_examples.experience(seq=len(POISON) + 1))
        old = schema.replace(f'"schema":"{messages.SCHEMA_VERSION}"'.encode(), b'"schema":"0"')
        rogue.publish(topic, training.rogue.seal(topic, old))
        expected["schema"] += 1
        receipts: list[messages.Receipt] = []
        while not receipts or receipts[-1].seq < len(POISON) + 1:
            where, payload, _ = rogue.next()
            verifier = signing.LearnerVerifier(training.learner_key)
            receipts.append(codec.decode(messages.Receipt, verifier.open(where, payload)))
    # What says nothing of its place cannot be receipted: nobody knows what it was
    forged = codec.encode(fleet_examples.experience(seq=len(POISON) + 2))
    for payload in (forged, training.pi.seal(topic, forged)):
        training.attacker.publish(topic, payload)
        expected["signature"] += 1
    training.attacker.publish(topic, training.rogue.seal(topic, b"junk"))
    expected["size"] += 1
    training.await_refused(expected.total())
    training.goes_on()
    refused = training.end()
    assert {reason: refused[reason] for reason in expected} == expected
    assert Counter(letter["reason"] for letter in training.letters if letter["topic"] == topic) == expected
    verdicts = Counter(v for (v,) in training.book("SELECT verdict FROM messages WHERE actor = 'rogue'"))
    assert verdicts + Counter({"signature": 2, "size": 1}) == expected
    assert training.book("SELECT 1 FROM messages JOIN payloads USING (id) WHERE actor = 'rogue'") == []


def test_an_enrolled_actor_that_lies_about_itself_and_floods(training: at_work.Training) -> None:
    names, port = training.names, int(training.fleet.broker["port"])
    topic = names.actor_state("rogue")
    with plain_client.PlainClient(port, "rogue") as rogue:
        rogue.subscribe(names.assignment("rogue"))
        birth = fleet_examples.birth(spec=fleet_examples.OTHER_SPEC)
        for heartbeat in (1, 2):
            state = fleet_examples.state(birth=birth, boot=(1 << 63) - 1, heartbeat=heartbeat)
            rogue.publish(topic, training.rogue.seal(topic, codec.encode(state)))
        where, payload, _ = rogue.next()
        body = signing.LearnerVerifier(training.learner_key).open(where, payload)
        assert "the fleet trains on" in codec.decode(messages.Assignment, body).refused

        # It answers for others, as if their policies were the best there ever were
        topic = names.report("rogue")
        for number in range(200):
            score = messages.Report(
                f"{session_of(training)}-{number}", "evaluate", episode_return=np.full(20, 1e9, "f4")
            )
            rogue.publish(topic, training.rogue.seal(topic, codec.encode(score)))

        topic = names.experience("rogue")
        junk = training.rogue.seal(topic, bytes(2000))
        for index in range(5000):
            rogue.publish(topic, junk, wait=index % 500 == 499)
    oversize = plain_client.PlainClient(port, "oversize")
    oversize.publish(topic, bytes(messages.MAX_PACKET_BYTES + 1), wait=False)
    assert oversize.disconnected.wait(20.0), "the broker cuts it off"
    training.await_refused(5200)
    training.goes_on()
    refused = training.end()
    kept = Counter(letter["reason"] for letter in training.letters)
    assert 100 <= kept["header"] < 150, "enough to see what it was, and no file full of it"
    assert refused["report.unasked"] == 200
    assert refused["header"] == 5000
    assert {actor for (actor,) in training.book("SELECT DISTINCT actor FROM messages")} == {"pi"}


def session_of(training: at_work.Training) -> str:
    """The learner's session, which is no secret."""
    with plain_client.PlainClient(int(training.fleet.broker["port"]), "reader") as reader:
        reader.subscribe(training.names.learner_state)
        where, payload, _ = reader.next()
    return codec.decode(
        messages.LearnerState, signing.LearnerVerifier(training.learner_key).open(where, payload)
    ).session
