"""A worker over a real broker, in this process: what a shard takes in, receipts, and does after a kill."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner import config
from learner.experience import ledger
from learner.files import run_directory
from learner.run.workers import plan, shard
from tests import conftest
from tests.fakes import fake_learner, fleet_examples
from tests.fakes.connections import plain_client

TOPICS = topics.Topics("lab")
HERE, ELSEWHERE = "pi-0", "pi-3"
"""Actors of shard 0 of 2, and of shard 1."""


class Site:
    """A fleet with a run of two shards, and what its actors and its learner say."""

    def __init__(self, broker: conftest.BrokerProcess, directory: Path) -> None:
        self.fleet = identity.Fleet.open("lab", directory / "fleet")
        self.macs = {
            name: signing.ActorMac(self.fleet.enroll(name, [broker.address]).mac_key) for name in (HERE, ELSEWHERE)
        }
        self.run = directory / "run"
        self.run.mkdir()
        about = {"env_id": "any", "spec": json.dumps(dataclasses.asdict(fleet_examples.SPEC))}
        for path in run_directory.ledgers(self.run, 2):
            ledger.Ledger.open(path, about=about).close()
        train = config.TrainConfig(fleet="lab", broker=(broker.address,), ingest_workers=2, message_steps=100)
        self.plan = plan.Plan(
            shard=0,
            run=str(self.run),
            keys=str(self.fleet.directory),
            train=train,
            algorithm=config.DqnConfig(replay_capacity=1000),
            spec=fleet_examples.SPEC,
            epoch=1,
            epochs=frozenset({1}),
            head="q_values",
            granted={},
            received={},
            earlier_steps=0,
            earlier={},
            held=frozenset(),
        )
        self.client = plain_client.PlainClient(int(broker.address.rpartition(":")[2]), "actors")
        self.verifier = signing.LearnerVerifier(self.fleet.sealer.public_key)
        self.workers: list[shard.Shard] = []

    def begin(self, **changes: Any) -> plan.Begun | plan.Failed:
        self.workers.append(shard.Shard())
        return self.workers[-1].begin(dataclasses.replace(self.plan, **changes))

    def send(self, seq: int, actor: str = HERE, shard_: int = 0) -> None:
        topic = TOPICS.ingest(shard_, actor)
        sent = fleet_examples.experience((3,), seq=seq, step=3 * (seq - 1))
        self.client.publish(topic, self.macs[actor].seal(topic, codec.encode(sent)))

    def assign(self, steps: int, actor: str = HERE) -> None:
        topic = TOPICS.assignment(actor)
        assigned = fake_learner.assignment(1, steps_granted=steps, shard=topics.shard_of(actor, 2))
        self.client.publish(topic, self.fleet.sealer.seal(topic, codec.encode(assigned)), retain=True)

    def receipt(self) -> messages.Receipt:
        topic, payload = self.client.next()[:2]
        assert topic == TOPICS.receipt(HERE)
        return codec.decode(messages.Receipt, self.verifier.open(topic, payload))

    def report(self) -> plan.Report:
        found = self.workers[-1].report(plan.Told(1), 2.0)
        assert isinstance(found, plan.Report)
        return found


@pytest.fixture
def site(mosquitto: conftest.BrokerProcess, tmp_path: Path) -> Iterator[Site]:
    made = Site(mosquitto, tmp_path)
    with made.client:
        made.client.subscribe(TOPICS.receipt(HERE))
        yield made
    for worker in made.workers:
        worker.close()


def test_it_takes_in_its_shard_alone_and_what_was_granted(site: Site) -> None:
    begun = site.begin()
    assert isinstance(begun, plan.Begun) and begun.steps == begun.transitions == 0
    site.assign(6)
    site.assign(100, ELSEWHERE)
    site.send(1, ELSEWHERE)  # at this shard's topic, where the broker would not refuse it
    for seq in (1, 2, 3):
        site.send(seq)
    while site.receipt().seq < 3:  # the third one, too: it shall not come for ever
        pass
    report = site.report()
    assert report.received == [plan.Received(HERE, 1, 1, 6, 9)], "refused ones use up none of a grant"
    assert report.inserted == [plan.Inserted(HERE, 1, 1, 1, 6, [3.0, 3.0], [0, 0])]
    assert report.counts["messages_refused"] == {"grant": 1}
    assert report.transitions == 6
    batch = site.workers[-1].sample(4, 0)
    assert isinstance(batch, tuple) and [len(field) for field in batch] == [4] * 7


def test_the_next_worker_goes_on_from_the_ledger_and_counts_nothing_twice(site: Site) -> None:
    site.begin()
    site.assign(100)
    for seq in (1, 2):
        site.send(seq)
    while site.receipt().seq < 2:
        pass
    site.workers[-1].close()
    begun = site.begin(granted={(HERE, 1): 100})
    assert isinstance(begun, plan.Begun)
    assert (begun.steps, begun.transitions, begun.marks) == (6, 6, {(HERE, 1): 6})
    site.send(2)  # its receipt was lost
    assert site.receipt().seq == 2
    site.send(3)
    assert site.receipt().seq == 3
    report = site.report()
    assert [(one.steps, one.returns) for one in report.inserted] == [(3, [3.0])]
    assert report.counts["messages_refused"] == {"duplicate": 1}


def test_a_report_that_waits_for_news_tells_at_once_what_was_held_back_meanwhile(site: Site) -> None:
    site.begin()
    site.assign(100)
    site.send(1)
    assert site.receipt().seq == 1
    assert site.report().transitions == 3
    worker = site.workers[-1]
    with futures.ThreadPoolExecutor(1) as learner:
        waiting = learner.submit(worker.report, plan.Told(1), 30.0)
        assert worker.hold(HERE, (1, 0)) == 3
        found = waiting.result(15.0)
    assert isinstance(found, plan.Report) and (found.transitions, found.steps_held) == (0, 3)


def test_a_learner_of_a_higher_epoch_silences_it_and_gets_its_ledger(site: Site) -> None:
    site.begin()
    site.assign(100)
    site.send(1)
    assert site.receipt().seq == 1
    topic = TOPICS.learner_state
    newer = messages.LearnerState(True, "another", 2, 1)
    site.client.publish(topic, site.fleet.sealer.seal(topic, codec.encode(newer)))
    conftest.wait_until(lambda: isinstance(site.workers[0].report(plan.Told(), 0.0), plan.Failed), "it has ended")
    failed = site.workers[0].report(plan.Told(), 0.0)
    assert isinstance(failed, plan.Failed) and isinstance(failed.error(), errors.FleetBusy)
    site.send(2)
    begun = site.begin(epoch=2, epochs=frozenset({1, 2}), earlier_steps=1000.0)
    assert isinstance(begun, plan.Begun) and begun.steps == 3
    site.send(2)
    assert site.receipt().seq == 2


def test_a_ledger_that_is_missing_or_broken_or_in_use_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_directory.ledgers(site.run, 2)[0]
    whole = path.read_bytes()
    path.write_bytes(b"no ledger at all" * 1000)
    broken = site.begin()
    assert isinstance(broken, plan.Failed) and "the ledger is broken" in broken.what and broken.where == str(path)
    path.unlink()
    missing = site.begin()
    assert isinstance(missing, plan.Failed) and "ledger of ingest worker 0 is missing" in missing.what
    assert missing.where == str(path) and "restore it" in missing.todo
    path.write_bytes(whole)
    monkeypatch.setattr(shard, "LOCK_S", 0.3)
    assert isinstance(site.begin(), plan.Begun)
    used = site.begin()
    assert isinstance(used, plan.Failed) and "another process is using the ledger" in used.what
    site.workers.pop()
