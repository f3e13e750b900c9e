"""A run's files tell its rates, by the rows in which actors act by policies; later runs are paced by them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from learner.study.compare import figures, fleet_run, headroom, plan

TUNED = {
    "samples_per_insert": 16.0,
    "batch_size": 128,
    "updates_per_call": 16,
    "publish_period_updates": 16,
    "learning_starts": 1000,
    "message_steps": 1024,
}


def row(second: int, steps: int, version: int, **further: float) -> dict[str, Any]:
    return {"wall_s": float(second), "env_steps": steps, "updates": 10 * second, "policy_version": version, **further}


def test_a_rate_counts_from_the_second_policy_on() -> None:
    rows = [row(5, 1000, 0), row(9, 1000, 1), row(10, 4000, 2), row(11, 5000, 3), row(14, 8000, 5)]
    found = figures.rates(figures.settled(rows))
    assert found["env_steps_per_s"] == pytest.approx(1000.0)
    assert (found["window_s"], found["updates_per_s"]) == (4.0, 10.0)
    assert "idle_share" not in found  # the rows do not say
    few = figures.settled(rows[:3])
    assert [one["policy_version"] for one in few] == [1, 2]
    assert figures.rates(rows[:1]) == {}


def test_stages_are_of_the_window_and_the_actors_their_own() -> None:
    stages = {"stage_wait_s": 0.5, "stage_update_s": 0.25, "stage_actor_wait_s": 3.0}
    rows = [row(second, 1000 * second, 2, **stages) for second in range(10, 15)]
    found = figures.rates(rows)
    assert found["idle_share"] == pytest.approx(0.5)
    assert found["update_s"] == pytest.approx(1.0)
    parts = figures.breakdown(rows, {})
    assert parts == {"learner": {"wait": 500.0, "update": 250.0}, "actors": {"wait": 3000.0}}


def test_a_breakdown_of_the_summary_serves_where_rows_have_none() -> None:
    whole = {"learner": {"update": {"count": 3, "total_s": 2.0}}, "actors": {}, "actorq": {"step": 1.0}}
    parts = figures.breakdown([row(1, 0, 2)], {"breakdown": whole, "env_steps": 1000})
    assert parts == {"learner": {"update": 2000.0}, "actorq": {"step": 1000.0}}


def test_what_is_not_said_is_missing() -> None:
    summary = {
        "precision": "int8",
        "policy_int8_bytes": 5000,
        "solved": True,
        "env_steps": 900,
        "env_steps_per_s": 90.0,
    }
    found = figures.of_run([row(1, 900, 1, return_mean=7.0)], summary, reached=True)
    known = {"return": 7.0, "policy_bytes": 5000.0, "trained_s": 10.0, "trained_steps": 900.0}
    # No rate: its rows are too few, and that of the summary has random steps in it
    assert found == known | {"threshold_s": 10.0, "threshold_steps": 900.0}
    assert "threshold_s" not in figures.of_run([], summary | {"solved": False}, reached=True)
    energy = {"learner": {"joules": 3.0}, "actors": {"joules": None}, "kgco2e": 1e-6}
    both = figures.of_run([], {"energy": energy, "bytes_received": 3, "bytes_sent": 4}, reached=False)
    assert both == {"learner_joules": 3.0, "kgco2e": 1e-6, "bytes": 7.0}


def test_broken_lines_of_metrics_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{json.dumps(row(1, 5, 0))}\n\x00{{\n[1]\n{{"wall_s": 3}}\n{json.dumps(row(2, 9, 1))}\n{{"wall')
    assert [one["env_steps"] for one in figures.read_rows(file)] == [5, 9]
    assert figures.read_rows(tmp_path / "none") == []


def test_the_learner_gets_time_to_spare() -> None:
    pilot = headroom.first(TUNED, 0.0)
    assert pilot.flags() == [
        *("--samples-per-insert", "0.25", "--updates-per-call", "4", "--publish-period-updates", "4"),
    ]
    # 1000 steps/s, 2 updates/s that take 150 ms each; the rest of its time, all but 0.1, it waits
    found = {"env_steps_per_s": 1000.0, "updates": 20.0, "window_s": 10.0, "idle_share": 0.6, "update_s": 3.0}
    pace = headroom.actor_bound(found, pilot, TUNED, run_s=15.0)
    assert pace.samples_per_insert is not None
    busy = 0.1 + 1000.0 * pace.samples_per_insert / 128 * 0.15
    assert busy == pytest.approx(0.45, abs=0.01)
    assert (pace.updates_per_call, pace.publish_period_updates) == (1, 2)
    # 1000 random steps to begin with, 256 samples' worth or a message ahead, 15 s
    assert pace.steps == pytest.approx(1000 + max(256 / pace.samples_per_insert, 1024) + 15_000, rel=0.02)
    small = found | {"update_s": 0.001}
    assert headroom.actor_bound(small, pilot, TUNED, run_s=15.0).samples_per_insert == 16.0  # never more than tuned
    asked = headroom.actor_bound(found, pilot, TUNED, 15.0, samples_per_insert=2.0)
    assert asked.samples_per_insert == 2.0


def test_phases_are_as_tuned_and_the_fleet_is_one_ahead() -> None:
    tuned = {"rollout_steps": 2048, "learning_starts": 1000, "message_steps": 1024}
    assert not headroom.has_replay(tuned)
    pace = headroom.learner_bound({"env_steps_per_s": 1000.0}, tuned, run_s=15.0)
    assert pace == headroom.Pace(20_000)  # of 1000 random ones, 4096 ahead and 15 s
    assert pace.flags() == []


def test_actors_that_waited_for_the_learner_get_a_lighter_pilot() -> None:
    pilot, paces = headroom.first(TUNED, 0.0), []
    while headroom.was_starved({"idle_share": 0.1}, pilot):
        pilot = headroom.lighter(pilot)
        paces.append(pilot.samples_per_insert)
    assert paces == [0.0625, 0.02]
    assert not headroom.was_starved({"idle_share": 0.2}, headroom.first(TUNED, 0.0))
    assert not headroom.was_starved({}, headroom.first(TUNED, 0.0))  # nobody knows


def test_a_pilot_that_does_not_say_how_long_it_waited_is_told() -> None:
    pilot = headroom.first(TUNED, 0.0)
    pace = headroom.actor_bound({"env_steps_per_s": 100.0, "updates": 5.0}, pilot, TUNED, run_s=15.0)
    assert pace.samples_per_insert == 0.25
    assert "did not say" in pace.remark
    assert headroom.learner_bound({"env_steps_per_s": 100.0}, TUNED, 15.0) == headroom.Pace(3500)


def test_a_run_towards_the_threshold_may_take_as_many_updates_as_the_task_allows() -> None:
    asked, tuned = plan.Request(), {"samples_per_insert": 16.0, "max_env_steps": 1000}
    flags = fleet_run.until_threshold(asked, headroom.Pace(0, 0.25), tuned)
    assert flags[flags.index("--max-env-steps") + 1] == "64000"
    for as_tuned in (headroom.Pace(0), headroom.Pace(0, 16.0)):
        assert "--max-env-steps" not in fleet_run.until_threshold(asked, as_tuned, tuned)
    no_replay = fleet_run.until_threshold(asked, headroom.Pace(0), {"rollout_steps": 8})
    assert "--max-env-steps" not in no_replay
    limited = dataclasses.replace(asked, settings=("max_env_steps=7",))
    assert "--max-env-steps" not in fleet_run.until_threshold(limited, headroom.Pace(0, 0.25), tuned), "it is asked for"
