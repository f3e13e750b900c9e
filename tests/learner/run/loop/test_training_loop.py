"""The loop itself, over a real broker and ledger; only the update takes as long as the test wants."""

from __future__ import annotations

import contextlib
import io
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, messages, signing, topics
from broker.fleet import identity
from learner import config
from learner.algorithms import Update
from learner.experience.buffers import replay
from learner.files import checkpoint, run_directory
from learner.fleet import gathering, roster, session
from learner.networks import layers
from learner.run import before_learning, build
from learner.run.loop import training_loop
from learner.run.reports import console, energy, summary
from tests import conftest
from tests.conftest import BrokerProcess
from tests.fakes import fleet_examples, log_reader
from tests.fakes.connections import plain_client

TOPICS = topics.Topics("lab")
WAIT_S = 60.0
ANY_POLICY = config.GateConfig(gate_agreement_min=0.0, gate_ties_max=1.0, gate_saturation_max=1.0)


class Actor:
    """Says that it lives, and sends a message of experience until it has the receipt; then the next one."""

    def __init__(self, fleet: identity.Fleet, client: plain_client.PlainClient) -> None:
        self._mac = signing.ActorMac(fleet.bundle("pi").mac_key)
        self._verifier = signing.LearnerVerifier(fleet.sealer.public_key)
        self._client = client
        self.vitals = messages.Vitals()
        self.stop = threading.Event()
        self.receipts = threading.Semaphore(0)

    def run(self) -> None:
        self._client.subscribe(TOPICS.receipt("pi"))
        seq, beats = 1, 0
        while not self.stop.is_set():
            beats += 1
            sent = fleet_examples.experience((8, 4), seq=seq, step=12 * (seq - 1), epoch=0, version=0)
            self._say(TOPICS.actor_state("pi"), fleet_examples.state(heartbeat=beats, vitals=self.vitals))
            self._say(TOPICS.experience("pi"), sent)
            if self._has_receipt(seq):
                seq += 1
                self.receipts.release()

    def _say(self, topic: str, message: messages.Message) -> None:
        self._client.publish(topic, self._mac.seal(topic, codec.encode(message)))

    def _has_receipt(self, seq: int) -> bool:
        """Returns whether it comes soon; a learner that is not there yet gives none."""
        try:
            topic, payload, _ = self._client.received.get(timeout=0.5)
        except queue.Empty:
            return False
        return codec.decode(messages.Receipt, self._verifier.open(topic, payload)).seq >= seq


class Judge:
    """The same actor's word on each policy that it is to score: good. It keeps the last one back until told."""

    def __init__(self, fleet: identity.Fleet, client: plain_client.PlainClient) -> None:
        self._mac = signing.ActorMac(fleet.bundle("pi").mac_key)
        self._verifier = signing.LearnerVerifier(fleet.sealer.public_key)
        self._client = client
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.order: messages.Command | None = None
        client.subscribe(TOPICS.command("pi"))

    def gives_up(self) -> None:
        """Whatever it is asked."""
        while True:
            topic, payload, _ = self._client.received.get()
            self.order = codec.decode(messages.Command, self._verifier.open(topic, payload))
            topic, error = TOPICS.report("pi"), "gave up after 9 steps and 0.1 s in episode 1 of 20"
            report = messages.Report(self.order.command_id, "evaluate", error=error)
            self._client.publish(topic, self._mac.seal(topic, codec.encode(report)))
            self.asked.set()

    def run(self) -> None:
        for n in range(3):  # screening, then as published and in fp32
            topic, payload, _ = self._client.received.get(timeout=WAIT_S)
            order = codec.decode(messages.Command, self._verifier.open(topic, payload))
            if n == 2:
                self.asked.set()
                assert self.may_answer.wait(WAIT_S)
            report = messages.Report(
                order.command_id, "evaluate", episode_return=np.full(order.episodes, 9, np.float32)
            )
            topic = TOPICS.report("pi")
            self._client.publish(topic, self._mac.seal(topic, codec.encode(report)))


@contextlib.contextmanager
def training(
    port: int,
    tmp_path: Path,
    stop: threading.Event,
    *,
    resume: bool = False,
    **changes: Any,
) -> Iterator[tuple[training_loop.TrainingLoop, Actor, Judge]]:
    """A loop that has not begun, an actor that sends, and one who may judge."""
    fleet = identity.Fleet.open("lab")
    fleet.enroll("pi")
    train = config.TrainConfig(fleet="lab", broker=(f"127.0.0.1:{port}",), **({"learning_starts": 24} | changes))
    settings = config.Settings(train, config.DqnConfig(hidden=(8,), batch_size=4), ANY_POLICY)
    here = session.Session.open(train)
    with plain_client.PlainClient(port, "pi") as client, plain_client.PlainClient(port, "judge") as other:
        actor, judge = Actor(fleet, client), Judge(fleet, other)
        acting = threading.Thread(target=actor.run)
        acting.start()
        try:
            actors = roster.Roster(here.id, here.epoch, "")
            gathering.gather(train, here, actors, stop)
            directory = run_directory.RunDirectory.open(tmp_path / "run", resume=resume)
            directory.describe(settings)
            saved = checkpoint.load_newest(directory.checkpoints)
            display, now_s = console.Console(io.StringIO()), time.monotonic()
            begun = before_learning.begin(settings, directory, here, actors, saved, now_s, stop)
            yield (
                build.build(settings, directory, here, actors, saved, begun, display, now_s, stop),
                actor,
                judge,
            )
        finally:
            actor.stop.set()
            acting.join()
            here.close()


def test_a_receipt_does_not_wait_for_an_update(
    mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    with training(mosquitto.port, tmp_path, stop, evaluate_episodes=0) as (loop, actor, _):
        update = loop.parts.algorithm.update

        def slow(batch: replay.Batch) -> Update:
            while actor.receipts.acquire(blocking=False):  # those of before
                pass
            arrived = [actor.receipts.acquire(timeout=WAIT_S) for _ in range(3)]
            stop.set()
            assert all(arrived), "receipts wait for the update"
            return update(batch)

        monkeypatch.setattr(loop.parts.algorithm, "update", slow)
        loop.train()
    assert loop.parts.algorithm.updates == config.DqnConfig().updates_per_call
    assert loop.parts.pace.env_steps >= 24 + 3 * 12


def meet_updates(loop: training_loop.TrainingLoop, monkeypatch: pytest.MonkeyPatch, wait_s: float) -> list[bool]:
    """Has each policy made only when the network has learned more since it was begun; returns whether it had."""
    maker, went_on = loop.parts.publisher._maker, list[bool]()
    make = maker.make

    def slow(*arguments: Any) -> Any:
        before, end_s = loop.parts.algorithm.updates, time.monotonic() + wait_s
        while loop.parts.algorithm.updates == before and time.monotonic() < end_s:
            time.sleep(0.01)
        went_on.append(loop.parts.algorithm.updates > before)
        return make(*arguments)

    monkeypatch.setattr(maker, "make", slow)
    return went_on


def test_updates_go_on_while_a_policy_is_made(
    mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    with training(mosquitto.port, tmp_path, stop, evaluate_episodes=0, samples_per_insert=64.0) as (loop, _, _):
        went_on = meet_updates(loop, monkeypatch, WAIT_S)
        monkeypatch.setattr(loop.parts.publisher, "on_published", lambda order, model: stop.set())
        loop.train()
    assert went_on == [True]
    assert loop.parts.publisher.newest is not None
    assert loop.parts.publisher.newest.manifest.version == loop.parts.publisher.version == 1


def test_a_run_ends_with_the_network_that_was_found_good(
    mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the network learned more while it was made, and where the last word on it comes during an update."""
    wanted: dict[str, Any] = {"evaluate_episodes": 2, "solved_return": 5.0}
    wanted |= {"publish_period_updates": 1, "samples_per_insert": 64.0}
    with training(mosquitto.port, tmp_path, threading.Event(), **wanted) as (loop, _, judge):
        threading.Thread(target=judge.run, daemon=True).start()
        update = loop.parts.algorithm.update

        def slow(batch: replay.Batch) -> Update:
            if judge.asked.is_set():
                judge.may_answer.set()
                conftest.wait_until(lambda: loop.parts.scores.solved is not None, "the loop hears it during the update")
            return update(batch)

        monkeypatch.setattr(loop.parts.algorithm, "update", slow)
        went_on = meet_updates(loop, monkeypatch, 5.0)
        loop.train()
        assert went_on[0]
        assert loop.parts.scores.solved is not None
        told = loop.parts.scores.summary()
        assert 0 < told["solved_env_steps"] < loop.parts.pace.env_steps, "of when it was made: the fleet went on"
        good = layers.arrays(loop.parts.scores.solved.policy.layers)
        left = layers.arrays(loop.parts.algorithm.policy_layers())
    assert all(np.array_equal(good[name], left[name]) for name in good)
    assert loop.parts.publisher.newest is not None
    assert loop.parts.publisher.newest.model == loop.parts.scores.solved.policy.model
    saved = checkpoint.load_newest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    assert saved.meta["published"] == run_directory.policy_name(loop.parts.publisher.newest.manifest)


@pytest.mark.fault(24)
def test_says_whose_environment_fails_and_how(
    mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path, log: log_reader.LogReader
) -> None:
    with training(mosquitto.port, tmp_path, threading.Event(), evaluate_episodes=0, max_env_steps=48) as (
        loop,
        actor,
        _,
    ):
        actor.vitals = messages.Vitals(env_failures=3, env_failure="TypeError: the old API")
        loop.train()
        made = summary.make(loop.summaries(), energy.summary(None, "switched off", loop.parts.roster.energy, 48))
    assert any("actor pi failed 3 times: TypeError: the old API" in line for line in log.lines)
    assert made["env_failures"] == {"pi": {"count": 3, "message": "TypeError: the old API"}}
    assert "failed 3 times: TypeError: the old API" in summary.table(made)


@pytest.mark.fault(28)
def test_a_slow_environment_begins_with_fewer_steps(
    mosquitto: BrokerProcess,
    actorq_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: log_reader.LogReader,
) -> None:
    stop = threading.Event()
    slow: dict[str, Any] = {"learning_starts": 10_000, "learning_starts_s": 0.01, "evaluate_episodes": 0}
    with training(mosquitto.port, tmp_path, stop, **slow) as (loop, _, _):
        update = loop.parts.algorithm.update

        def only(batch: replay.Batch) -> Update:
            stop.set()
            return update(batch)

        monkeypatch.setattr(loop.parts.algorithm, "update", only)
        loop.train()
        assert loop.parts.algorithm.updates > 0
        assert loop.parts.pace.env_steps < 10_000
    assert f"learning begins with {loop.parts.pace.limiter.min_size} steps instead of 10,000" in "\n".join(log.lines)
    saved = checkpoint.load_newest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    assert saved.meta["limiter"]["min_size"] == loop.parts.pace.limiter.min_size, "a resumed run does not wait again"


@pytest.mark.fault(2)
def test_says_that_there_is_no_score_and_trains_on(
    mosquitto: BrokerProcess,
    actorq_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: log_reader.LogReader,
) -> None:
    with training(mosquitto.port, tmp_path, threading.Event(), publish_period_updates=1) as (loop, _, judge):
        threading.Thread(target=judge.gives_up, daemon=True).start()
        update, asked_after = loop.parts.algorithm.update, []

        def trained(batch: replay.Batch) -> Update:
            if judge.asked.is_set():
                asked_after.append(loop.parts.scores.busy)
                if "gave up" in "\n".join(log.lines) and len(asked_after) > 20:
                    loop._stop.set()
            return update(batch)

        monkeypatch.setattr(loop.parts.algorithm, "update", trained)
        loop.train()
        assert judge.order is not None
        assert judge.order.max_steps > 0
        assert judge.order.max_s > 0
    assert "\n".join(log.lines).count("actor pi gave no score: gave up after 9 steps") == 1, (
        "once, and not with each policy"
    )


@pytest.mark.fault(15)
def test_a_resumed_run_takes_nothing_that_was_recorded_for_another_in_between(
    mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path
) -> None:
    mac = signing.ActorMac(identity.Fleet.open("lab").enroll("po").mac_key)
    topic = TOPICS.experience("po")

    def takes(loop: training_loop.TrainingLoop, epoch: int) -> bool:
        sent = fleet_examples.experience((8, 4), boot=epoch, assigned_epoch=epoch, epoch=0, version=0)
        before = loop.parts.validator.refused["epoch"]
        loop.parts.ingest.receive("po", topic, mac.seal(topic, codec.encode(sent)), 0)
        return loop.parts.validator.refused["epoch"] == before

    with training(mosquitto.port, tmp_path, threading.Event()) as (loop, _, _):
        loop.save()
        loop.parts.ingest.close()
        loop.parts.checkpoints._directory._lock.close()  # it is killed here
    assert identity.Fleet.open("lab").next_epoch() == 2, "another run begins, and ends"
    with training(mosquitto.port, tmp_path, threading.Event(), resume=True) as (loop, _, _):
        assert [takes(loop, epoch) for epoch in (1, 2, 3, 4)] == [True, False, True, False]
        assert loop.parts.validator.refused["epoch"] == 2
        loop.parts.ingest.commit(wait=True)
        loop.parts.ingest.close()
