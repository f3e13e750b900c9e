"""Junk, forgeries and misdirected messages on every topic: nobody crashes, everything is counted, training goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner.run import local_fleet
from tests.broker.contract.payloads import examples
from tests.fakes import fleet_examples
from tests.fakes.connections import plain_client
from tests.system.conftest import QUICK, STICK

pytestmark = pytest.mark.system
ACTOR = "pi"


def all_topics(names: topics.Topics) -> list[str]:
    leaves = ("state", "assignment", "experience", "receipt", "command", "report")
    shared = [names.learner_state, names.policy("main"), names.policy_patch("main"), names.policy_piece("main")]
    return shared + [names.actor(who, leaf) for who in (ACTOR, "stranger") for leaf in leaves]


def test_nothing_that_a_stranger_sends_stops_training(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet = start_fleet()
    names = topics.Topics(fleet.name)
    fleet.start_actor(ACTOR, ["--env", f"{STICK}:Stick", "--heartbeat-s", "0.5"])
    fleet.start_learner([*QUICK, "--run-dir", str(run_root / "run"), "--max-env-steps", "20000", "--json"])
    forger = signing.ActorMac(b"f" * 32)
    rng = random.Random(0)
    with plain_client.PlainClient(int(fleet.broker["port"]), "stranger") as client:
        deadline = time.monotonic() + 60.0
        while not list((run_root / "run").glob("policies/*.tflite")):
            assert time.monotonic() < deadline, "training never began"
            for topic in all_topics(names):
                client.publish(topic, rng.randbytes(rng.randrange(200)), retain=rng.random() < 0.5)
        for topic in all_topics(names):
            for message in examples.EXAMPLES.values():
                body = codec.encode(message)
                client.publish(topic, body)  # unsigned
                client.publish(topic, forger.seal(topic, body))
                client.publish(topic, examples.LEARNER.seal(topic, body))  # another fleet's learner
    output, _ = fleet.children["learner"].communicate(timeout=240.0)
    assert fleet.children["learner"].returncode == errors.EXIT_OK
    assert fleet.children[ACTOR].poll() is None, fleet.log_tail(ACTOR)
    summary = json.loads(output)
    assert summary["env_steps"] >= 20000
    refused = summary["messages_refused"]
    assert refused["signature"] > 0, "experience"
    assert refused["unknown_actor"] > 0
    assert refused["state.signature"] > 0
    assert refused["report.signature"] > 0
    assert summary["steps_refused"] == 0, "no step of the real actor was lost to it"


def test_a_genuine_policy_for_another_spec_is_refused_by_the_actor(
    start_fleet: Callable[..., local_fleet.LocalFleet],
) -> None:
    fleet = start_fleet()
    names = topics.Topics(fleet.name)
    fleet.start_actor(ACTOR, ["--env", "CartPole-v1", "--heartbeat-s", "0.2"])
    keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
    mac = signing.ActorMac(keys.bundle(ACTOR).mac_key)
    model = b"never parsed"
    manifest = dataclasses.replace(
        examples.MANIFEST, length=len(model), sha256=hashlib.sha256(model).hexdigest(), fingerprint="0" * 16
    )
    topic = names.policy("main")
    with plain_client.PlainClient(int(fleet.broker["port"]), "observer") as client:
        client.subscribe(names.actor_state(ACTOR))
        state_topic, payload, _ = client.next()
        birth = codec.decode(messages.ActorState, mac.open(state_topic, payload)).birth
        assert birth is not None
        wrong = {
            "fingerprint": manifest,
            "sha256": dataclasses.replace(manifest, version=42, fingerprint=birth.spec.fingerprint, sha256="0" * 64),
            "length": dataclasses.replace(manifest, version=43, length=1),
        }
        for changed in wrong.values():
            policy = messages.Policy(changed, np.frombuffer(model, np.uint8))
            client.publish(topic, keys.sealer.seal(topic, codec.encode(policy)))
        refused: dict[str, int] = {}
        while not wrong.keys() <= refused.keys():
            state_topic, payload, _ = client.next()
            refused = codec.decode(messages.ActorState, mac.open(state_topic, payload)).vitals.refused
    assert fleet.children[ACTOR].poll() is None


def test_experience_longer_than_replay_is_counted(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet = start_fleet()
    names = topics.Topics(fleet.name)
    keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
    mac = signing.ActorMac(keys.enroll("rogue").mac_key)
    fleet.start_actor(ACTOR, ["--env", "CartPole-v1"])
    fleet.start_learner(
        [*QUICK, "--run-dir", str(run_root / "run"), "--replay-capacity", "1200", "--solved-return", "inf"]
        + ["--max-env-steps", "10000", "--json"]
    )
    long = fleet_examples.experience((1500,), version=0)
    topic = names.experience("rogue")
    with plain_client.PlainClient(int(fleet.broker["port"]), "rogue") as client:
        client.subscribe(names.receipt("rogue"))
        while client.received.empty():
            client.publish(topic, mac.seal(topic, codec.encode(long)))
            time.sleep(0.1)  # until the learner listens; it has no birth of this actor, and needs none
    output, _ = fleet.children["learner"].communicate(timeout=240.0)
    assert fleet.children["learner"].returncode == errors.EXIT_OK
    summary = json.loads(output)
    assert summary["messages_refused"]["too_long"] == 1
    assert summary["steps_refused"] == 1500
