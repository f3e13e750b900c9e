"""What a fleet may say follows from what the loop measures: a real broker, twenty simulated actors, a real ledger."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.fleet import identity
from learner import config
from learner.experience import validate
from learner.files import run_directory
from learner.fleet import budget, gathering, roster, session
from learner.run import before_learning, build
from learner.run.loop import training_loop
from learner.run.reports import console
from tests import conftest
from tests.conftest import BrokerProcess
from tests.fakes import simulated_actor, swarm

ACTORS = 20
RATE = 50.0


class SlowValidator:
    """What opens each message, and takes as long as it is told."""

    def __init__(self, validator: validate.Validator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.validate = validator.validate
        monkeypatch.setattr(validator, "validate", self._slow)

    def _slow(self, *args: Any) -> validate.Validated | None:
        time.sleep(self.seconds)
        return self.validate(*args)


@contextlib.contextmanager
def taking_in(port: int, run: Path, **changes: Any) -> Iterator[tuple[training_loop.TrainingLoop, swarm.Swarm]]:
    """A learner that takes in and never updates, and a swarm at work; both end with the block, the swarm before."""
    fleet, where = identity.Fleet.open("lab"), (f"127.0.0.1:{port}",)
    bundles = [fleet.enroll(f"sim-{number:02}", where) for number in range(ACTORS)]
    train = config.TrainConfig(
        fleet="lab",
        broker=where,
        actors=ACTORS,
        learning_starts=100_000,
        learning_starts_s=0.0,
        message_period_s=0.05,
        evaluate_episodes=0,
        keep_experience=True,
        **changes,
    )
    settings = config.Settings(train, config.DqnConfig(hidden=(8,)), config.GateConfig())
    simulated = swarm.Swarm(bundles, simulated_actor.Load(RATE, 256, 64, 0, 0.0), share=True)
    stop, here = threading.Event(), session.Session.open(train)
    sending = threading.Thread(target=simulated.run)
    sending.start()
    try:
        actors = roster.Roster(
            here.id, here.epoch, "", quorum=ACTORS, allowed=budget.Budget(train.message_budget_per_s)
        )
        gathering.gather(train, here, actors, stop)
        directory = run_directory.RunDirectory.open(run, resume=False)
        directory.describe(settings)
        display, now_s = console.Console(io.StringIO()), time.monotonic()
        begun = before_learning.begin(settings, directory, here, actors, None, now_s, stop)
        loop = build.build(settings, directory, here, actors, None, begun, display, now_s, stop)
        training = threading.Thread(target=loop.train)
        training.start()
        try:
            yield loop, simulated
            simulated.stop()
            sending.join()  # once all have their receipts
        finally:
            stop.set()
            training.join()
    finally:
        simulated.stop()
        sending.join()
        here.close()


def in_ledger(run: Path) -> tuple[int, int]:
    """Returns the messages in a run's ledger, and how many different ones they are."""
    with contextlib.closing(sqlite3.connect(run / run_directory.LEDGER)) as book:
        query = "SELECT count(*), count(DISTINCT actor || ' ' || seq) FROM messages WHERE verdict = 'ok'"
        total, distinct = book.execute(query).fetchone()
        return total, distinct


def test_a_slow_ingest_makes_the_fleet_say_less_and_a_quick_one_more_and_nothing_is_lost(
    mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, slow_s = 100.0, 0.015
    monkeypatch.setattr(budget, "WINDOW_S", 0.5)
    monkeypatch.setattr(budget, "WANTED_PERIOD_S", ACTORS / wanted)
    spare = budget.SPARE
    monkeypatch.setattr(budget, "SPARE", budget.Band(0.9, 1.0))  # a machine that is slow, and busy, has room, too
    monkeypatch.setattr(budget, "QUICK_S", 60.0)
    monkeypatch.setattr(budget, "SLOW_S", 60.0)
    with taking_in(mosquitto.port, tmp_path / "run") as (loop, simulated):
        assert isinstance(loop.parts.validator, validate.Validator)
        slow = SlowValidator(loop.parts.validator, monkeypatch)
        allowed, here = loop.parts.roster.budget, loop.parts.session
        conftest.wait_until(lambda: allowed.messages_per_s == wanted, "it says more, where there is room", 40.0)

        monkeypatch.setattr(budget, "SPARE", spare)
        slow.seconds = slow_s  # so that 67 messages a second is all that can be taken in
        conftest.wait_until(lambda: here.waiting >= 20, "messages wait", 40.0)
        most = budget.NEEDED.high / slow_s
        conftest.wait_until(lambda: allowed.messages_per_s <= most, "it says less", 40.0)
        conftest.wait_until(lambda: here.waiting < 3, "nothing waits, though ingest is as slow as before", 30.0)
        assert allowed.messages_per_s <= most
        conftest.wait_until(
            lambda: allowed.capacity_per_s < 1 / slow_s, "all that was measured before counts no more", 30.0
        )

        monkeypatch.setattr(budget, "SPARE", budget.Band(0.9, 1.0))
        slow.seconds, low = 0.0, allowed.messages_per_s
        conftest.wait_until(lambda: allowed.messages_per_s > 1.2 * low, "it says more again", 40.0)
    tally = simulated.tally
    assert tally.sent == tally.receipted > 100
    assert in_ledger(tmp_path / "run") == (tally.sent, tally.sent), "each once"
    summary = allowed.summary()
    assert summary["message_budget_per_s_least"] is not None and summary["message_budget_per_s_least"] <= most
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert min(row["message_budget_per_s"] for row in rows) <= most, "rows tell it"
    assert max(row["broker_delay_s"] for row in rows) > 0.0, "the heartbeat was heard again"


def test_a_fixed_budget_reaches_the_actors(mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path) -> None:
    with taking_in(mosquitto.port, tmp_path / "run", message_budget_per_s=40.0) as (loop, simulated):
        actors = loop.parts.roster.actors.values()
        conftest.wait_until(
            lambda: {one.assignment and one.assignment.message_period_s for one in actors} == {ACTORS / 40.0},
            "all are told",
        )
        conftest.wait_until(lambda: simulated.tally.receipted > 2 * ACTORS, "they speak")
    assert loop.parts.roster.budget.messages_per_s == 40.0
    assert in_ledger(tmp_path / "run") == (simulated.tally.sent, simulated.tally.sent)
