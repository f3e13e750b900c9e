"""Attacks on an actor, by a broker that is the attacker's: TUF's list, and what else a broker could try.

Each is refused, counted in the actor's state, and the actor acts on. What TLS and ACLs keep from the network is in
tests/broker/serve/test_tls.py and mosquitto/test_mosquitto.py; attacks on the learner in test_attack_learner.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from broker.contract import codec, messages
from broker.contract.policies import policy_patch
from edge_actor.board import clock
from edge_actor.fleet import replay_guard
from tests import conftest
from tests.fakes import fake_learner
from tests.fakes.connections import raw_broker
from tests.system.security import hostile

pytestmark = [pytest.mark.system, pytest.mark.mosquitto]
AT_A_RATE = ("--rate-hz", "100")
HUGE = 1 << 62


@pytest.fixture
def stage(mosquitto: conftest.BrokerProcess, tmp_path: Path) -> Iterator[hostile.Stage]:
    made = hostile.Stage(mosquitto, tmp_path)
    yield made
    made.close()


def test_arbitrary_software(stage: hostile.Stage) -> None:
    """Altered and invented policies never reach the interpreter."""
    stage.start(*AT_A_RATE)
    topic = stage.names.policy("main")
    genuine = stage.publish(1)
    bad = hostile.forgeries(stage, topic, genuine)
    for payload in bad:
        stage.attacker.publish(topic, payload, retain=True)
        stage.attacker.publish(stage.names.policy_patch("main"), payload)
        stage.attacker.publish(stage.names.policy_piece("main"), payload)
    stage.await_refused(signature=3 * len(bad))
    assert stage.vitals.policy_version == 1
    stage.publish(2)
    stage.goes_on()


def test_rollback_also_after_a_reboot(stage: hostile.Stage) -> None:
    stage.start(*AT_A_RATE)
    first = stage.publish(1)
    second = stage.publish(2, epoch=2)
    topic = stage.names.policy("main")
    conftest.wait_until((stage.directory / "state" / "newest.json").exists, "the newest is on disk")
    conftest.wait_until(
        lambda: '"epoch": 2' in (stage.directory / "state" / "newest.json").read_text(), "a new epoch is stored at once"
    )
    stage.attacker.publish(topic, first, retain=True)
    stage.await_refused(older=1)
    stage.kill()
    stage.attacker.publish(topic, first, retain=True)  # what the actor finds when it comes back
    stage.start(*AT_A_RATE)
    stage.await_refused(older=1)
    assert stage.vitals.policy_version == 2, "from its disk"
    stage.kill()
    for name in ("keyframe.sealed", "delta.sealed"):
        (stage.directory / "state" / name).unlink(missing_ok=True)
    stage.start(*AT_A_RATE)
    stage.await_refused(older=1)
    assert stage.vitals.policy_version == 0, "no policy at all rather than an old one"
    stage.attacker.publish(topic, second)
    stage.await_acting(2)
    stage.goes_on()


def test_an_expired_policy(stage: hostile.Stage) -> None:
    """Kept back until it has expired. Where nobody knows the date it acts: a Pi without a clock must go on."""
    stage.start(*AT_A_RATE)
    stage.publish(1)
    stage.learner.publish(stage.policy(2, expires_s=1_000_000_000.0))
    if clock.now_s() is None:
        stage.await_acting(2)
    else:
        stage.await_refused(expired=1)
        assert stage.vitals.policy_version == 1
    stage.goes_on()


def test_fast_forward(stage: hostile.Stage) -> None:
    """A version so high that the genuine ones would all be old: only the learner can say it."""
    stage.start(*AT_A_RATE)
    genuine = stage.publish(1)
    state, topic = messages.LearnerState(True, "x", HUGE, HUGE, version=HUGE), stage.names.policy("main")
    policy = stage.policy(HUGE, epoch=HUGE)
    for where, message in ((stage.names.learner_state, state), (topic, policy)):
        body = codec.encode(message)
        for payload in (body, stage.other.seal(where, body), genuine[:68] + body):
            stage.attacker.publish(where, payload, retain=True)
    stage.await_refused(signature=6)
    stage.publish(2)
    assert stage.vitals.policy_lag == 0, "and nobody waits for the one that does not exist"


def test_mix_and_match(stage: hostile.Stage) -> None:
    """Genuine parts that do not belong together: other topic, other actor, other fleet, other base."""
    stage.start(*AT_A_RATE)
    names, whole, patches = stage.names, stage.names.policy("main"), stage.names.policy_patch("main")
    first = stage.publish(1)
    patch = fake_learner.patch(
        hostile.variant(1), hostile.variant(2), hostile.SPEC.fingerprint, base_version=1, version=2
    )
    genuine_patch = stage.sealed(patches, patch)
    moved = [
        (whole, genuine_patch),
        (patches, first),
        (whole, stage.sealed(names.policy("canary"), stage.policy(9))),
        (whole, stage.sealed(whole.replace("/lab/", "/lab2/"), stage.policy(9))),
        (names.assignment("pi"), stage.sealed(names.assignment("other"), fake_learner.assignment(stage.boot))),
        (names.receipt("pi"), stage.sealed(names.receipt("other"), messages.Receipt("l", stage.boot, 1))),
        (names.command("pi"), stage.sealed(names.command("other"), messages.Command("c", "evaluate", stage.boot))),
        (names.learner_state, stage.sealed(names.receipt("pi"), messages.Receipt("l", stage.boot, 1))),
    ]
    for topic, payload in moved:
        stage.attacker.publish(topic, payload)
    stage.await_refused(signature=len(moved))
    stage.publish(3)
    stage.attacker.publish(patches, genuine_patch)  # its base is gone, and it is old
    stage.await_refused(older=1)
    newer = fake_learner.patch(
        hostile.variant(1), hostile.variant(4), hostile.SPEC.fingerprint, base_version=1, version=4
    )
    stage.attacker.publish(patches, stage.sealed(patches, newer))  # genuine, newer, and of a base that is gone
    stage.await_refused(base=1)
    wrong = np.frombuffer(policy_patch.difference(hostile.variant(1), hostile.variant(5)), np.uint8)
    onto = dataclasses.replace(newer, version=5, base=3, patch=wrong)
    stage.attacker.publish(patches, stage.sealed(patches, onto))  # even a learner's mistake: the sum must be right
    stage.await_refused(sha256=1)
    assert stage.vitals.policy_version == 3
    stage.goes_on()


def test_freeze_of_policies_shows_in_the_state(stage: hostile.Stage) -> None:
    """The learner's state passes, its policies do not."""
    stage.learner.beats = False
    stage.start(*AT_A_RATE)
    stage.publish(1)
    stage.learner.say(stage.names.learner_state, messages.LearnerState(True, "l", 1, 1, version=7))
    conftest.wait_until(lambda: stage.vitals.policy_lag == 6, "it says how far behind it is")
    assert stage.vitals.policy_phase == "announced"
    stage.goes_on()


def test_freeze_of_everything_is_noticed(stage: hostile.Stage) -> None:
    """The same old words again and again, all of them genuine."""
    stage.learner.beats = False
    stage.start(*AT_A_RATE)
    policy = stage.publish(1)
    told = [stage.sealed(stage.names.learner_state, messages.LearnerState(True, "l", 1, beat)) for beat in (1, 2, 3)]
    will = stage.sealed(stage.names.learner_state, messages.LearnerState(False, "l", 1, 0))
    for payload in told:
        stage.attacker.publish(stage.names.learner_state, payload)
    for _ in range(2):
        for payload in (*told, will):
            stage.attacker.publish(stage.names.learner_state, payload, retain=True)
        stage.attacker.publish(stage.names.policy("main"), policy, retain=True)
    stage.await_refused(older_state=4, silence=0)
    conftest.wait_until(lambda: stage.vitals.refused.get("silence") == 1, "noticed", replay_guard.SILENCE_S + 5.0)
    assert "someone holds it back" in stage.log
    stage.goes_on()
    stage.learner.say(stage.names.learner_state, messages.LearnerState(True, "l", 1, 4))
    conftest.wait_until(lambda: "the learner is heard again" in stage.log, "the end is said, too")


def test_a_policy_that_is_withheld_too_long_brings_the_safe_action(stage: hostile.Stage) -> None:
    stage.start("--rate-hz", "100", "--max-policy-age-s", "1", "--safe-action", "0")
    stage.publish(1)
    stage.learner.assign(fake_learner.assignment(stage.boot, steps_granted=1 << 40, message_steps=16))
    stage.learner.await_steps(32)
    conftest.wait_until(lambda: stage.vitals.steps_unrecorded > 50, "the safe action is taken, and not recorded", 20.0)
    recorded = stage.learner.steps
    stage.publish(2)
    conftest.wait_until(lambda: stage.learner.steps > recorded, "a new policy ends it")


@pytest.mark.fault(11)
def test_a_repeated_policy_is_no_new_one(stage: hostile.Stage) -> None:
    """The retained keyframe and the learner's last word, all genuine, over and over: the safe action is taken.

    It is not while the learner says anew that it has no newer one.
    """
    stage.learner.beats = False
    stage.start("--rate-hz", "100", "--max-policy-age-s", "1", "--safe-action", "0")
    keyframe, topic = stage.publish(1), stage.names.learner_state
    beat = stage.sealed(topic, messages.LearnerState(True, "learner-1", 1, 1, fingerprint="any", version=1))
    stage.learner.assign(fake_learner.assignment(stage.boot, steps_granted=1 << 40, message_steps=16))
    stage.learner.await_steps(16)

    def goes_safe() -> bool:
        stage.attacker.publish(stage.names.policy("main"), keyframe, retain=True)
        stage.attacker.publish(topic, beat, retain=True)
        return stage.vitals.steps_unrecorded > 50

    conftest.wait_until(goes_safe, "the safe action is taken, and not recorded", 20.0)
    recorded, heartbeat = stage.learner.steps, itertools.count(2)

    def goes_on() -> bool:
        alive = messages.LearnerState(True, "learner-1", 1, next(heartbeat), fingerprint="any", version=1)
        stage.learner.say(topic, alive)
        return stage.learner.steps > recorded + 300

    conftest.wait_until(goes_on, "3 s of a policy that is three times as old as it may be, and the newest", 20.0)


def test_invented_and_replayed_assignments(stage: hostile.Stage) -> None:
    stage.start()
    topic = stage.names.assignment("pi")
    old = [
        stage.sealed(topic, fake_learner.assignment(stage.boot, epoch=1, steps_granted=1 << 40, session="gone")),
        stage.sealed(topic, fake_learner.assignment(stage.boot, epoch=2, steps_granted=256)),
    ]
    current = fake_learner.assignment(stage.boot, epoch=2, steps_granted=1024, session="learner-2")
    stage.learner.assign(current)
    stage.learner.await_steps(1024)
    for payload in old:
        stage.attacker.publish(topic, payload, retain=True)
    stage.await_refused(older_assignment=2)
    bad = hostile.forgeries(stage, topic, stage.sealed(topic, current))
    endless = codec.encode(dataclasses.replace(current, steps_granted=1 << 40, epoch=3))
    end = codec.encode(dataclasses.replace(current, refused="go home", epoch=3))
    bad += [stage.other.seal(topic, body) for body in (endless, end)]
    for payload in bad:
        stage.attacker.publish(topic, payload)
    stage.attacker.publish(topic, stage.sealed(topic, fake_learner.assignment(stage.boot - 1, epoch=9)))
    stage.await_refused(signature=len(bad))
    assert stage.learner.steps == 1024, "not a step more than it was granted"
    stage.learner.assign(dataclasses.replace(current, steps_granted=2048))
    stage.learner.await_steps(2048)


def test_invented_and_moved_receipts_take_nothing_from_the_spool(stage: hostile.Stage) -> None:
    """And a broker that acknowledges experience and drops it: the spool keeps it until the learner's own receipt."""
    stage.learner.receipts = False
    stage.start()
    topic = stage.names.receipt("pi")
    stage.learner.assign(fake_learner.assignment(stage.boot, steps_granted=2048))
    conftest.wait_until(lambda: stage.vitals.steps_recorded == 2048, "recorded")
    held = stage.vitals.messages_held
    assert held >= 8
    greedy = messages.Receipt("ledger-1", stage.boot, 1 << 40)
    bad = hostile.forgeries(stage, topic, stage.sealed(topic, greedy))
    moved = [stage.sealed(stage.names.receipt("other"), greedy), stage.sealed(stage.names.assignment("pi"), greedy)]
    for payload in (*bad, *moved):
        stage.attacker.publish(topic, payload, retain=True)
    stage.await_refused(signature=len(bad) + len(moved))
    stage.attacker.publish(topic, stage.sealed(topic, messages.Receipt("ledger-1", stage.boot - 1, 1 << 40)))
    stage.attacker.publish(topic, stage.sealed(topic, messages.Receipt("ledger-1", stage.boot, 3)))
    conftest.wait_until(lambda: stage.vitals.messages_held == held - 3, "genuine ones are obeyed")
    stage.attacker.publish(topic, stage.sealed(topic, messages.Receipt("ledger-1", stage.boot, 2)))  # a replay
    stage.learner.say(topic, messages.Receipt("ledger-1", stage.boot, held - 1))
    conftest.wait_until(lambda: stage.vitals.messages_held == 1, "and the replay took nothing back")


def test_invented_and_replayed_commands(stage: hostile.Stage) -> None:
    stage.start(*AT_A_RATE)
    topic = stage.names.command("pi")
    stage.publish(1)
    scored = stage.policy(5)
    order = messages.Command("once", "evaluate", stage.boot, 1, 0, scored.manifest, scored.model)
    genuine = stage.sealed(topic, order)
    for _ in range(20):
        stage.attacker.publish(topic, genuine)
    assert stage.learner.reports.get(timeout=20.0).error == ""
    stage.attacker.publish(topic, stage.sealed(topic, dataclasses.replace(order, command_id="b", boot=stage.boot - 1)))
    bad = hostile.forgeries(stage, topic, genuine)
    for payload in bad:
        stage.attacker.publish(topic, payload)
    stage.await_refused(signature=len(bad))
    stage.learner.command(messages.Command("twice", "explode", stage.boot))
    assert stage.learner.reports.get(timeout=20.0).command_id == "twice", "nothing else was answered"
    assert stage.learner.reports.empty()
    stage.goes_on()


@pytest.mark.parametrize("what", ["endless data", "random"])
def test_a_broker_that_speaks_no_mqtt(stage: hostile.Stage, mosquitto: conftest.BrokerProcess, what: str) -> None:
    """The actor leaves it for the next one of its list, whoever turns the connection; and its memory stays small."""
    stage.start()
    stage.kill()
    with raw_broker.RawBroker(raw_broker.GARBAGE[what]) as raw:
        stage.start("--broker", f"{raw.address},{mosquitto.address}")
        stage.learner.assign(fake_learner.assignment(stage.boot, steps_granted=1 << 40))
        stage.learner.await_steps(20_000, timeout_s=30.0)
        assert stage.actor is not None
        rss = psutil.Process(stage.actor.pid).memory_info().rss
        assert rss < 200e6, f"{rss / 1e6:.0f} MB"
        assert raw.clients.qsize() >= 1
        stage.goes_on()


def test_a_flood_of_what_is_genuine(stage: hostile.Stage) -> None:
    """Replays by the thousand cost time, and change nothing."""
    stage.start(*AT_A_RATE)
    stage.publish(1)
    topic = stage.names.assignment("pi")
    assigned = fake_learner.assignment(stage.boot, steps_granted=512)
    stage.learner.assign(assigned)
    stage.learner.await_steps(512)
    payload = stage.sealed(topic, assigned)
    for index in range(2000):
        stage.attacker.publish(topic, payload, wait=index % 100 == 99)
    stage.goes_on()
    assert stage.learner.steps == 512


def test_invented_and_replayed_orders_also_after_a_reboot(stage: hostile.Stage) -> None:
    stage.start(*AT_A_RATE)
    stage.publish(1)
    topic = stage.names.orders("pi")

    def orders(number: int, kind: str) -> messages.Orders:
        return messages.Orders((messages.Instruction(number, kind, HUGE),))

    pause = stage.sealed(topic, orders(7, "pause"))
    stage.attacker.publish(topic, pause)
    conftest.wait_until(lambda: stage.vitals.paused, "a genuine one is obeyed")
    stage.attacker.publish(topic, stage.sealed(topic, orders(8, "resume")))
    conftest.wait_until(lambda: not stage.vitals.paused, "and the next")
    again = orders(9, "pause")
    bad = hostile.forgeries(stage, topic, stage.sealed(topic, again))
    bad += [stage.other.seal(topic, codec.encode(again)), stage.sealed(stage.names.orders("other"), again)]
    for payload in (*bad, pause):
        stage.attacker.publish(topic, payload, retain=True)
    stage.await_refused(signature=len(bad), older_order=1)
    stage.kill()
    stage.start(*AT_A_RATE)  # what it finds when it comes back
    stage.await_refused(older_order=1)
    assert not stage.vitals.paused
    stage.goes_on()
