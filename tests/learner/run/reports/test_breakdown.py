"""The time of a run is divided in rows, in the summary and in its table."""

from __future__ import annotations

import time

import pytest

from broker.contract import messages
from broker.program import stopwatch
from learner.fleet import work
from learner.run.reports import breakdown, progress
from tests.fakes import fleet_examples


def made() -> tuple[breakdown.Breakdown, stopwatch.Stopwatch, work.Work]:
    """A breakdown, the learner's stages, and the fleet's."""
    own, theirs = stopwatch.Stopwatch(*breakdown.LEARNER_STAGES), work.Work()
    return breakdown.Breakdown([own, stopwatch.Stopwatch("sign")], theirs, progress.Progress()), own, theirs


def test_a_row_has_what_was_spent_since_the_row_before() -> None:
    found, own, theirs = made()
    own.add("update", 2.0, 16)
    theirs.times.add("wait", 3.0)
    first = found.metrics()
    own.add("update", 0.5, 16)
    second = found.metrics()
    assert first["stage_update_s"] == 2.0 and first["stage_actor_wait_s"] == 3.0 and first["stage_sample_s"] == 0.0
    assert second["stage_update_s"] == 0.5 and second["stage_actor_wait_s"] == 0.0
    assert len(first) == len(breakdown.LEARNER_STAGES) + len(messages.ACTOR_STAGES)


def test_the_summary_is_of_the_training_and_idle_is_the_share_of_it_that_waited() -> None:
    found, own, theirs = made()
    found.begin()
    own.add("wait", 1e6)
    theirs.note("a", fleet_examples.state(vitals=messages.Vitals(cpu_s=1.0, created_s=1e9)))
    spent = messages.Vitals(stages={"spool": (2, 0.5)}, cpu_s=3.5, created_s=1e9)
    theirs.note("a", fleet_examples.state(heartbeat=2, vitals=spent))
    found.end()
    own.add("wait", 1e6)  # after it
    summary = found.summary()
    assert summary["breakdown"]["learner"]["wait"] == {"count": 1, "total_s": 1e6}
    assert summary["breakdown"]["actors"]["spool"] == {"count": 2, "total_s": 0.5}
    assert summary["actors_cpu_s"] == pytest.approx(2.5)
    assert summary["learner_idle_share"] == 1.0
    assert 0.0 < summary["training_s"] < 60.0
    assert 0.0 <= summary["learner_cpu_s"] < time.process_time()
    assert summary["env_steps_per_s"] == 0.0


def test_actorq_s_categories_are_sums_of_ours() -> None:
    spent = {name: stopwatch.Spent(1, float(1 << n)) for n, name in enumerate(messages.ACTOR_STAGES)}
    assert breakdown.actorq(spent) == {"step": 7.0, "pull": 64.0, "deserialise": 128.0, "load": 256.0 + 512.0}


def test_the_table_has_the_longest_stages_and_no_way_that_is_nobody_s_time() -> None:
    found, own, theirs = made()
    for stage, seconds in {"update": 6.0, "wait": 3.0, "sample": 1.0, "broker": 500.0}.items():
        own.add(stage, seconds)
    theirs.times.add("environment", 4.0)
    found.begin()
    found.end()
    table = dict(breakdown.rows(found.summary()))
    assert table["learner's time"].startswith("update 60 %, wait 30 %, sample 10 % of 10.0 s")
    assert table["actors' time"] == "environment 100 % of 4.0 s"
    assert "together" not in table["CPU while training"]


def test_environment_steps_per_second_are_counted_between_first_and_last_experience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted, now_s = progress.Progress(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert counted.mean_steps_per_s == 0.0
    counted.count(fleet_examples.experience((500,)), None)
    assert counted.mean_steps_per_s == 0.0
    for _ in range(4):
        now_s += 0.5
        counted.count(fleet_examples.experience((8, 4)), None)
    assert counted.mean_steps_per_s == pytest.approx(4 * 12 / 2.0)
