"""One learner to a fleet, over real brokers; and only genuine messages get through."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner import config
from learner.fleet import gathering, roster, session
from learner.fleet.arriving import floods
from tests.conftest import BrokerProcess, wait_until
from tests.fakes import fleet_examples, log_reader
from tests.fakes.connections import plain_client, stranger

TOPICS = topics.Topics("lab")


@pytest.fixture
def fleet(actorq_home: Path) -> identity.Fleet:
    found = identity.Fleet.open("lab")
    found.enroll("pi")
    return found


def settings(address: str, **changes: object) -> config.TrainConfig:
    return config.TrainConfig(fleet="lab", broker=(address,), **changes)  # type: ignore[arg-type]


def arrivals(of: session.Session, count: int) -> list[session.Arrival]:
    """Waits until `count` have arrived."""
    found: list[session.Arrival] = []
    for _ in range(100):
        found += list(of.drain(0.1))
        if len(found) >= count:
            return found
    raise AssertionError(f"{len(found)} of {count} arrived")


@contextlib.contextmanager
def living(made: session.Session) -> Iterator[None]:
    """Has a session beat meanwhile, as the loop of a learner that lives does."""
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(0.05):
            made.beat()

    heart = threading.Thread(target=live)
    heart.start()
    try:
        yield
    finally:
        stop.set()
        heart.join()


def test_a_second_learner_is_refused_while_the_first_lives(
    broker_address: str, fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.2)
    first = session.Session.open(settings(broker_address))
    first.join()
    second = session.Session.open(settings(broker_address))
    busy = pytest.raises(errors.FleetBusy, match="another learner is live")
    with contextlib.closing(first), contextlib.closing(second), living(first), busy:
        second.join()
    assert second.epoch == first.epoch + 1


def test_what_a_dead_learner_left_behind_does_not_block(
    mosquitto: BrokerProcess, fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SILENCE_S", 0.3)
    state = messages.LearnerState(True, "dead", 1, 9)
    with plain_client.PlainClient(mosquitto.port, "ghost") as client:
        client.publish(TOPICS.learner_state, fleet.sealer.seal(TOPICS.learner_state, codec.encode(state)), retain=True)
    found = session.Session.open(settings(mosquitto.address))
    found.join()
    found.close()


def test_an_actor_of_a_newer_schema_is_named_and_told_to_have_the_learner_updated_first(
    mosquitto: BrokerProcess, fleet: identity.Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    found, topic = session.Session.open(settings(mosquitto.address)), TOPICS.actor_state("pi")
    mac, told = signing.ActorMac(fleet.bundle("pi").mac_key), TOPICS.assignment("pi")
    ours, newer = (f'"schema":"{messages.SCHEMA_VERSION + more}"'.encode() for more in (0, 1))
    body = codec.encode(fleet_examples.state(boot=7)).replace(ours, newer)
    with contextlib.closing(found), plain_client.PlainClient(mosquitto.port, "pi") as client:
        found.join()
        client.subscribe(told)
        client.publish(topic, mac.seal(topic, body.replace(newer, b'"schemb":"13"')))  # it says none
        client.publish(topic, mac.seal(topic, body.replace(b'"boot":"7"', b'"boot":"x"')))  # nobody can be told
        client.publish(topic, mac.seal(topic, body))
        wait_until(lambda: not list(found.drain(0.1)) and found.refused["state.schema"] == 3, "the states have come")
        sealed = client.next()[1]
    assert found.refused == {"state.schema": 3}
    refusal = codec.decode(messages.Assignment, signing.LearnerVerifier(fleet.sealer.public_key).open(told, sealed))
    assert (refusal.boot, refusal.steps_granted) == (7, 0)
    assert (
        f"version '{messages.SCHEMA_VERSION + 1}'" in refusal.refused and "update the learner first" in refusal.refused
    )
    assert "actor pi is refused: schema version" in caplog.text


def test_hands_on_what_enrolled_actors_say_and_counts_the_rest(mosquitto: BrokerProcess, fleet: identity.Fleet) -> None:
    found = session.Session.open(settings(mosquitto.address))
    found.join()
    mac = signing.ActorMac(fleet.bundle("pi").mac_key)
    state_topic, report_topic = TOPICS.actor_state("pi"), TOPICS.report("pi")
    body = codec.encode(fleet_examples.state())
    with plain_client.PlainClient(mosquitto.port, "pi") as client:
        client.publish(state_topic, body)  # not sealed
        client.publish(state_topic, mac.seal(report_topic, body))  # sealed for another topic
        client.publish(state_topic, fleet.sealer.seal(state_topic, body))  # sealed, but not by the actor
        client.publish(TOPICS.actor_state("stranger"), mac.seal(TOPICS.actor_state("stranger"), body))
        client.publish(report_topic, mac.seal(report_topic, body))  # a state where reports belong
        client.publish(TOPICS.learner_state, b"")
        client.publish(TOPICS.experience("pi"), b"whatever")  # ingest judges that
        client.publish(state_topic, mac.seal(state_topic, body))
    first, second = arrivals(found, 2)
    assert first.message == b"whatever"
    assert second.message == fleet_examples.state()
    assert found.refused == {
        "state.signature": 4,  # three from the actor's topic, one from the learner's
        "state.unknown_actor": 1,
        "report.kind": 1,
    }
    found.close()


def test_a_drained_session_leaves_its_sockets_to_the_network_threads(
    mosquitto: BrokerProcess, fleet: identity.Fleet
) -> None:
    found = session.Session.open(settings(mosquitto.address))
    found.join()
    with plain_client.PlainClient(mosquitto.port, "pi") as client:
        client.publish(TOPICS.experience("pi"), b"whatever")
    arrivals(found, 1)  # the last look did not wait: the loop may compute for long now
    assert all(one._loop._turns._resting.is_set() for one in found.brokers._all)
    found.close()


def test_follows_who_is_enrolled_renewed_and_revoked(mosquitto: BrokerProcess, fleet: identity.Fleet) -> None:
    found = session.Session.open(settings(mosquitto.address))
    found.join()
    topic, body = TOPICS.actor_state("pi"), codec.encode(fleet_examples.state())
    old = signing.ActorMac(fleet.bundle("pi").mac_key)
    new = signing.ActorMac(fleet.enroll("pi").mac_key)
    macs = found.macs  # what ingest was given
    with plain_client.PlainClient(mosquitto.port, "pi") as client:

        def verdict(mac: signing.ActorMac) -> str:
            """Returns what becomes of a message under this key: taken, or the reason why it was refused."""
            before = found.refused.copy()
            client.publish(topic, mac.seal(topic, body))
            for _ in range(100):
                taken = list(found.drain(0.05))
                if taken or found.refused != before:
                    return "taken" if taken else next(iter(found.refused - before))
            return "lost"

        wait_until(lambda: verdict(new) == "taken", "the new key is taken")
        assert verdict(old) == "state.signature"
        actors = fleet.directory / "actors"
        before = actors.stat()
        fleet.revoke("pi")
        os.utime(actors, ns=(before.st_atime_ns, before.st_mtime_ns))  # within one tick of the file system's clock
        wait_until(lambda: verdict(new) == "state.unknown_actor", "the revoked actor is unknown", timeout_s=1.0)
        assert verdict(new) == verdict(old) == "state.unknown_actor"
    assert macs == {}
    found.close()


def test_gathering_ends_when_nobody_comes(mosquitto: BrokerProcess, fleet: identity.Fleet) -> None:
    found = session.Session.open(settings(mosquitto.address, wait_s=0.1, actors=2))
    try:
        with pytest.raises(errors.EnvironmentFailure, match="0 of 2 actors"):
            gathering.gather(
                settings("", wait_s=0.1, actors=2), found, roster.Roster(found.id, found.epoch, ""), threading.Event()
            )
    finally:
        found.close()


def test_no_broker_is_a_named_error(fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.mqtt.network_thread.CONNECT_TIMEOUT_S", 0.1)
    found = session.Session.open(settings("127.0.0.1:1"))
    with pytest.raises(errors.BrokerUnreachable, match="no broker answered") as caught:
        found.join()
    assert "actorq-broker up" in caught.value.todo
    found.close()


@pytest.mark.fault(3)
def test_a_stranger_on_the_broker_s_port_is_a_named_error(
    fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not one of keys and bundles: those of this learner are in order."""
    monkeypatch.setattr("broker.mqtt.network_thread.CONNECT_TIMEOUT_S", 0.2)
    with stranger.Stranger(fleet, tmp_path, "self-signed") as other:
        found = session.Session.open(settings(other.address))
        with pytest.raises(errors.BrokerUnreachable, match="not one of this fleet") as caught:
            found.join()
        found.close()
    assert caught.value.where == other.address


def test_leaves_offline_behind_when_it_goes(mosquitto: BrokerProcess, fleet: identity.Fleet) -> None:
    found = session.Session.open(settings(mosquitto.address))
    found.join()
    found.close()
    with plain_client.PlainClient(mosquitto.port, "reader") as client:
        client.subscribe(TOPICS.learner_state)
        topic, payload, retained = client.next()
    opened = signing.LearnerVerifier(fleet.sealer.public_key).open(topic, payload)
    assert retained
    assert codec.decode(messages.LearnerState, opened).online is False


def said_before(port: int, fleet: identity.Fleet, *, retain: bool = True, **changes: object) -> None:
    """Publishes a state of another session, under the fleet's key."""
    values: dict[str, object] = {"online": False, "session": "before", "epoch": 7, "heartbeat": 9}
    state = messages.LearnerState(**(values | changes))  # type: ignore[arg-type]
    with plain_client.PlainClient(port, "ghost") as client:
        sealed = fleet.sealer.seal(TOPICS.learner_state, codec.encode(state))
        client.publish(TOPICS.learner_state, sealed, retain=retain)


def said_at(fleet: identity.Fleet, client: plain_client.PlainClient) -> messages.LearnerState:
    """Returns what a learner says next, or said last."""
    opened = signing.LearnerVerifier(fleet.sealer.public_key).open(TOPICS.learner_state, client.next()[1])
    return codec.decode(messages.LearnerState, opened)


@pytest.mark.fault(17)
@pytest.mark.parametrize("online", [False, True], ids=["goodbye", "left over"])
def test_a_lost_epoch_is_found_again(
    online: bool,
    mosquitto: BrokerProcess,
    fleet: identity.Fleet,
    monkeypatch: pytest.MonkeyPatch,
    log: log_reader.LogReader,
) -> None:
    monkeypatch.setattr(session, "SILENCE_S", 0.3)
    said_before(mosquitto.port, fleet, online=online)
    found = session.Session.open(settings(mosquitto.address, wait_s=0.1))
    actors = roster.Roster(found.id, found.epoch, "")
    with pytest.raises(errors.EnvironmentFailure):
        gathering.gather(settings("", wait_s=0.1), found, actors, threading.Event())
    assert found.epoch == 8 and int((fleet.directory / "epoch").read_text()) == 8
    actor = actors.observe("pi", fleet_examples.state(), retained=False, now_s=0.0)
    exploration = config.DqnConfig()
    assignment = actors.assign(
        actor,
        steps_left=1,
        env_steps=0,
        lockstep_version=0,
        settings=settings(mosquitto.address),
        exploration=exploration,
        now_s=0.0,
    )
    assert assignment is not None and assignment.epoch == 8
    assert any("heard epoch 7" in line for line in log.lines)
    with plain_client.PlainClient(mosquitto.port, "reader") as client:
        client.subscribe(TOPICS.learner_state)
        assert said_at(fleet, client).epoch == 8
        for one in found.brokers._all:
            assert one._network.client is not None
            one._network.client._sock_close()  # as if it were killed: its will says so, and is its own
        will = said_at(fleet, client)
        assert (will.online, will.epoch, will.session) == (False, 8, found.id)
    found.close()


def test_a_copy_of_the_keys_whose_epoch_is_the_same_goes_above_it(
    mosquitto: BrokerProcess, fleet: identity.Fleet, tmp_path: Path
) -> None:
    """The keys are a standby's on another machine: as they were before the live one began."""
    copied = tmp_path / "copied"
    shutil.copytree(fleet.directory, copied)
    first = session.Session.open(settings(mosquitto.address))
    first.join()
    first.close()
    shutil.rmtree(fleet.directory)
    shutil.copytree(copied, fleet.directory)
    second = session.Session.open(settings(mosquitto.address))
    assert second.epoch == first.epoch
    second.join()
    assert second.epoch == first.epoch + 1
    second.close()


@pytest.mark.fault(17)
def test_a_live_learner_has_the_fleet_though_the_epoch_was_lost(
    broker_address: str, fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.2)
    (fleet.directory / "epoch").write_text("41\n")
    first = session.Session.open(settings(broker_address))
    first.join()
    (fleet.directory / "epoch").unlink()
    second = session.Session.open(settings(broker_address))
    busy = pytest.raises(errors.FleetBusy, match="another learner is live")
    with contextlib.closing(second), living(first), busy:
        second.join()
    third = session.Session.open(settings(broker_address), take_over=True)
    third.join()
    assert third.epoch > first.epoch == 42, "what was heard is remembered"
    with pytest.raises(errors.FleetBusy, match="taken this fleet over"):
        arrivals(first, 1)
    first.close()
    third.close()


@pytest.mark.fault(17)
def test_a_learner_whose_successor_has_left_ends_too(mosquitto: BrokerProcess, fleet: identity.Fleet) -> None:
    """Actors heard a higher epoch meanwhile, and would take nothing more of it: it would stand still for ever."""
    found = session.Session.open(settings(mosquitto.address))
    found.join()
    said_before(mosquitto.port, fleet, epoch=found.epoch + 1, heartbeat=0, retain=False)  # the will of one that waited
    said_before(mosquitto.port, fleet, epoch=found.epoch + 1)
    with pytest.raises(errors.FleetBusy, match="taken this fleet over"):
        arrivals(found, 1)
    found.close()


@pytest.mark.fault(17)
def test_an_actor_that_is_ahead_is_named_once_and_not_believed(
    mosquitto: BrokerProcess, fleet: identity.Fleet, log: log_reader.LogReader
) -> None:
    found = session.Session.open(settings(mosquitto.address, wait_s=0.5))
    mac = signing.ActorMac(fleet.bundle("pi").mac_key)
    with plain_client.PlainClient(mosquitto.port, "pi") as client:
        for heartbeat in (1, 2):
            state = fleet_examples.state(heartbeat=heartbeat, vitals=messages.Vitals(policy_epoch=10**15))
            topic = TOPICS.actor_state("pi")
            client.publish(topic, mac.seal(topic, codec.encode(state)), retain=True)
        with pytest.raises(errors.EnvironmentFailure):
            gathering.gather(
                settings("", wait_s=0.5), found, roster.Roster(found.id, found.epoch, ""), threading.Event()
            )
    assert found.epoch == 1
    (line,) = [line for line in log.lines if "epoch" in line]
    assert "actor pi" in line and str(10**15) in line and str(fleet.directory / "epoch") in line
    found.close()


@pytest.mark.fault(16)
def test_who_floods_is_not_listened_to_for_a_while(
    fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch, log: log_reader.LogReader
) -> None:
    """The broker vouches for topics. Each time is longer, and whoever is enrolled meanwhile is listened to."""
    found = session.Session.open(settings("mqtts://127.0.0.1:1"))
    now = [0.0]
    monkeypatch.setattr(found, "_floods", floods.Floods(lambda: now[0]))
    followed: list[set[str]] = []
    monkeypatch.setattr(
        found.brokers, "follow", lambda wanted: followed.append({topic.split("/")[3] for topic in wanted})
    )
    topic = TOPICS.experience("pi")

    def flood() -> None:
        for _ in range(5000):
            found._inbox.put(topic, b"junk", False)
        assert len(list(found.drain(0.0))) < 1000

    flood()
    list(found.drain(0.0))
    assert followed == [set()] and found.refused["rate"] > 4000
    fleet.enroll("late")
    wait_until(lambda: list(found.drain(0.0)) or {"late"} in followed, "the new one is")
    now[0] = floods._DEAF_S
    list(found.drain(0.0))
    assert followed[-1] == {"late", "pi"}, "and the other one again"
    flood()
    list(found.drain(0.0))
    assert followed[-1] == {"late"} and "for 60 s" in log.lines[-1]


def test_where_anybody_may_write_at_any_topic_nobody_pays_for_it(fleet: identity.Fleet) -> None:
    found = session.Session.open(settings("127.0.0.1:1"))
    for _ in range(5000):
        found._inbox.put(TOPICS.experience("pi"), b"junk", False)
    assert len(list(found.drain(0.0))) == 5000
