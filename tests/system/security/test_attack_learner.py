"""Attacks on a learner at work: by the broker, and by an actor that is enrolled and lies.

Each is refused, counted in the summary, kept in the dead letters where it came as experience, and training goes on.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.fakes import fleet_examples
from tests.fakes.connections import plain_client
from tests.system import at_work
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.system, pytest.mark.mosquitto]


@pytest.fixture
def training(start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path) -> Iterator[at_work.Training]:
    made = at_work.Training(start_fleet("mosquitto"), run_root / "run")
    yield made
    made.attacker.__exit__(None, None, None)


def forgeries(genuine: bytes, topic: str, mac: signing.ActorMac, others: signing.ActorMac) -> list[bytes]:
    """Returns what can be made of a genuine payload without its actor's key."""
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
    "no segments": (
        "shape",
        {name: np.zeros(0, np.int32) for name in ("length", "env_index", "row", "episode_length")},
    ),
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
        old = schema.replace(f'"schema":"{messages.SCHEMA_VERSION}"'.encode(), b'"schema":"00"')
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
    assert oversize.disconnected.wait(120.0), "the broker cuts it off"
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


def altered(message: messages.ActorState, **changes: Any) -> bytes:
    """With another birth certificate, which our own encoder would not make."""
    body = codec.encode(message)
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    birth = json.loads(header["__metadata__"]["birth"])
    header["__metadata__"]["birth"] = json.dumps(birth | changes)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body[8 + length :]


@pytest.mark.fault(14)
def test_who_comes_first_and_lies_about_its_environment_ends_nothing(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    """A learner that waits for its first actor hears a liar: of memory that nobody has, of a name that is no name."""
    fleet = start_fleet()
    names, run = topics.Topics(fleet.name), run_root / "run"
    keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
    mac, topic = signing.ActorMac(keys.enroll("liar").mac_key), names.actor_state("liar")
    budget = ["--max-env-steps", "5000", "--solved-return", "inf", "--evaluate-episodes", "0", "--json"]
    learner = fleet.start_learner([*QUICK, "--env", "CartPole-v1", "--run-dir", str(run), *budget])
    lies: list[dict[str, Any]] = [
        {
            "spec": {
                "observation": {"shape": [1 << 24], "dtype": "float32"},
                "action": dataclasses.asdict(fleet_examples.SPEC.action),
            }
        },
        {"env_id": "x" * 40_000},
        {"env_id": "Acrobot-v1", "spec": dataclasses.asdict(fleet_examples.OTHER_SPEC)},
    ]
    with plain_client.PlainClient(int(fleet.broker["port"]), "liar") as liar:
        liar.subscribe(names.learner_state)
        liar.next()  # it is there, and waits
        for number, lie in enumerate(lies, 1):
            for heartbeat in (1, 2):
                state = fleet_examples.state(boot=number, heartbeat=heartbeat)
                liar.publish(topic, mac.seal(topic, altered(state, **lie)))
        fleet.start_actor("pi", ["--env", "CartPole-v1"])
        output, _ = learner.communicate(timeout=240.0)
    assert learner.returncode == errors.EXIT_OK, fleet.log_tail("learner")
    summary = json.loads(output)
    assert summary["env_id"] == "CartPole-v1" and summary["env_steps"] >= 1000
    assert summary["messages_refused"]["state.field"] == 4
    assert fleet.children["pi"].poll() is None, fleet.log_tail("pi")


@pytest.mark.fault(13)
def test_what_an_actor_sends_beyond_its_grant_is_neither_learned_from_nor_counted(training: at_work.Training) -> None:
    """It is enrolled, has the right environment and says so, and sends as fast as it can."""
    names, mac = training.names, training.rogue
    with plain_client.PlainClient(int(training.fleet.broker["port"]), "rogue") as rogue:
        rogue.subscribe(names.assignment("rogue"))
        topic = names.actor_state("rogue")
        rogue.publish(topic, mac.seal(topic, codec.encode(fleet_examples.state())))
        topic, sent = names.experience("rogue"), 0
        where, payload, _ = rogue.next()
        for seq in range(1, 331):
            lies = fleet_examples.experience((500, 500), seq=seq, step=1000 * (seq - 1), epoch=0, version=0)
            sent += len(lies.reward)
            rogue.publish(topic, mac.seal(topic, codec.encode(lies)), wait=seq % 50 == 0)
        training.await_refused(50)
        conftest.wait_until(
            lambda: training.book("SELECT max(seq) FROM messages WHERE actor = 'rogue'") == [(330,)], "all came", 60.0
        )
        granted = 0
        verifier = signing.LearnerVerifier(training.learner_key)
        while True:
            body = verifier.open(where, payload)
            granted = max(granted, codec.decode(messages.Assignment, body).steps_granted)
            if rogue.received.empty():
                break
            where, payload, _ = rogue.next()
    training.goes_on()
    [(taken,)] = training.book("SELECT coalesce(sum(steps), 0) FROM messages WHERE actor = 'rogue' AND verdict = 'ok'")
    assert taken <= granted < sent
    assert training.end()["grant"] >= 50
