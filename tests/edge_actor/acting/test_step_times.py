"""The time of steps is divided as a clock says that only environment and policy move."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from broker.program import stopwatch
from edge_actor.acting import exploration, rollout, step_times
from edge_actor.environment import env
from edge_actor.experience import trajectory
from edge_actor.policies import policy
from tests.edge_actor.policies.models import files
from tests.fakes import fake_learner

FREE = step_times.Overhead()


class Clock:
    """Seconds that pass when something is said to take them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        for module in (rollout, step_times):
            monkeypatch.setattr(module, "clock", lambda: self.now_s)

    def during(self, call: Any, seconds: Any) -> Any:
        """Returns what does the same, and takes that long; by what a function returns each time."""

        def slow(*arguments: Any, **named: Any) -> Any:
            self.now_s += seconds() if callable(seconds) else seconds
            return call(*arguments, **named)

        return slow


class Play:
    """Acts on CartPole, burst by burst, with times that are known."""

    def __init__(self, clock: Clock, n_envs: int = 1, *, step_s: Any, act_s: float, epsilon: float = 0.0) -> None:
        made = env.make("CartPole-v1", n_envs)
        step = self.counted("steps", clock.during(made.step, step_s))
        reset = self.counted("resets", clock.during(made.reset, 7.0))
        self.steps = self.resets = self.acts = 0
        self.environment = dataclasses.replace(made, step=step, reset=reset)
        self.acting = policy.Policy(files.INT8.read_bytes(), "q_values", made.spec, n_envs)
        self.acting.act = self.counted("acts", clock.during(self.acting.act, act_s))
        self.record = trajectory.Trajectory(self.environment.spec, n_envs, 4096)
        self.explorer = exploration.Explorer(self.environment.spec.action, n_envs, 0, lambda: self.record.recorded)
        self.explorer.assign(fake_learner.assignment(1, epsilon_start=epsilon, epsilon_end=epsilon))
        self.record.start(self.environment.reset(seed=0)[0])
        self.steps = self.resets = self.acts = 0
        self.times = step_times.StepTimes(lambda: FREE)

    def counted(self, name: str, call: Any) -> Any:
        def count(*arguments: Any, **named: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return call(*arguments, **named)

        return count

    def bursts(self, rows: int, each: int) -> stopwatch.Totals:
        for _ in range(rows // each):
            goal = self.record.used + each
            while self.record.used < goal:
                rollout.burst(
                    self.environment,
                    self.acting,
                    self.explorer,
                    self.record,
                    goal - self.record.used,
                    times=self.times,
                )
            if self.record.free < each:
                self.record.flush()
        return self.times.times.totals()


@pytest.mark.parametrize("each", [1, 7, 400])
@pytest.mark.parametrize("n_envs", [1, 4])
def test_steps_of_equal_length_are_told_exactly(monkeypatch: pytest.MonkeyPatch, n_envs: int, each: int) -> None:
    clock = Clock(monkeypatch)
    play = Play(clock, n_envs, step_s=3.0, act_s=1.0)
    clock.now_s = 0.0
    found = play.bursts(2800, each)
    assert sum(spent.seconds for spent in found.values()) == pytest.approx(clock.now_s)
    assert found["environment"].seconds == pytest.approx(3.0 * play.steps + 7.0 * play.resets)
    assert found["observation_to_action"].seconds == pytest.approx(1.0 * play.acts)
    assert found["record"].seconds == pytest.approx(0.0, abs=1e-6)
    assert found["environment"].runs == play.steps + play.resets
    assert found["observation_to_action"].runs == pytest.approx(play.acts, abs=1)


def test_what_a_loop_does_not_take_is_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    play = Play(clock, step_s=3.0, act_s=1.0)
    monkeypatch.setattr(play.explorer, "draw", clock.during(play.explorer.draw, 50.0))
    monkeypatch.setattr(play.record, "advance", clock.during(play.record.advance, 25.0))
    found = play.bursts(2048, 256)
    assert found["record"].seconds == pytest.approx(8 * 75.0)


@pytest.mark.slow
@pytest.mark.parametrize("period", [32, 64, 128])
def test_steps_that_are_long_in_time_with_the_sampling_are_told_truly(
    monkeypatch: pytest.MonkeyPatch, period: int
) -> None:
    clock, taken, long_ = Clock(monkeypatch), 0, 0.0

    def step_s() -> float:
        nonlocal taken, long_
        taken += 1
        seconds = 10.0 if taken % period == 0 else 1.0
        long_ += seconds
        return seconds

    play = Play(clock, step_s=step_s, act_s=2.0)
    taken, long_ = 0, 0.0
    found = play.bursts(128_000, 1000)
    assert found["environment"].seconds == pytest.approx(long_ + 7.0 * play.resets, rel=0.06)
    assert found["observation_to_action"].seconds == pytest.approx(2.0 * play.acts, rel=0.12)


@pytest.mark.parametrize("each", [1, 3, 200])
@pytest.mark.parametrize(("step_s", "late_rows"), [(3e-6, 16667), (1.6e-4, 312), (1e-3, step_times.PERIOD)])
def test_what_was_done_is_told_128_rows_or_50_ms_late(
    monkeypatch: pytest.MonkeyPatch, each: int, step_s: float, late_rows: int
) -> None:
    """Not later: a run may be over by then."""
    play = Play(Clock(monkeypatch), step_s=step_s, act_s=0.0)
    for _ in range(12_000 // each if each > 3 else 300):
        found = play.bursts(each, each)
        done = play.steps + play.resets
        assert max(1, done - late_rows) <= found["environment"].runs <= done
        assert found["observation_to_action"].runs <= play.acts + 1


def test_exploring_steps_ask_no_policy_and_are_not_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(Clock(monkeypatch), step_s=3.0, act_s=3.0, epsilon=0.5)
    found = play.bursts(64_000, 1000)
    assert 0.3 * play.steps < play.acts < 0.7 * play.steps
    assert found["observation_to_action"].runs == pytest.approx(play.acts, rel=0.1)
    assert found["observation_to_action"].seconds == pytest.approx(3.0 * play.acts, rel=0.1)


def test_a_plan_times_one_row_in_128_and_passes_each_row_once() -> None:
    times, rng = step_times.StepTimes(lambda: FREE), random.Random(3)
    passed = timed = 0
    for _ in range(20_000):
        rows = rng.randrange(1, 641)
        plan = times.plan(rows)
        assert sum(some for _, some in plan) == rows
        assert all(0 < some <= step_times.TOGETHER for is_timed, some in plan if is_timed)
        passed += rows
        timed += sum(some for is_timed, some in plan if is_timed)
    assert passed / timed == pytest.approx(step_times.PERIOD, rel=0.02)


def test_at_first_more_rows_are_timed_and_told_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of seconds has a breakdown too, though few of its steps may ask the policy."""
    play = Play(Clock(monkeypatch), step_s=6e-6, act_s=6e-6, epsilon=0.9)
    found = play.bursts(3000, 200)
    assert found["environment"].runs > 0.6 * play.steps, "of 18 ms, which is less than those that are told late"
    assert found["observation_to_action"].runs == pytest.approx(play.acts, rel=0.5)
    assert found["observation_to_action"].seconds == pytest.approx(6e-6 * play.acts, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 20, 64, 640])
def test_whatever_the_bursts_each_of_their_rows_is_timed_as_often(rows: int) -> None:
    times, hits = step_times.StepTimes(lambda: FREE), np.zeros(rows, int)
    for _ in range(1_500_000 // rows if rows < 64 else 80_000):
        at = 0
        for is_timed, some in times.plan(rows):
            hits[at : at + some] += is_timed
            at += some
    assert hits.min() > 0.75 * hits.mean()
    assert hits.max() < 1.25 * hits.mean()


def test_each_row_of_a_slow_environment_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(Clock(monkeypatch), step_s=0.05, act_s=0.001)
    play.bursts(40, 1)
    assert play.times.plan(5) == [(True, 5)]


def test_what_timing_costs_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    play = Play(clock, step_s=3.5, act_s=1.5)  # of which half a second is the timing's, it is said
    play.times = step_times.StepTimes(lambda: step_times.Overhead(inside_s=0.5, outside_s=0.0, piece_s=0.0))
    found = play.bursts(6400, 640)
    resets_s = 7.0 * play.resets
    assert (found["environment"].seconds - resets_s) / found["observation_to_action"].seconds == pytest.approx(3.0)


def test_an_environment_that_raises_leaves_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    play = Play(clock, step_s=3.0, act_s=1.0)
    clock.now_s = 0.0
    whole, step = play.environment, play.environment.step

    def breaks(action: Any) -> Any:
        if play.steps == 500:
            raise OSError("the wheel came off")
        return step(action)

    play.environment = dataclasses.replace(play.environment, step=breaks)
    with pytest.raises(OSError, match="wheel"):
        play.bursts(6400, 640)
    found = play.times.times.totals()
    assert found["environment"].seconds == pytest.approx(1500.0 + 7.0 * play.resets, rel=0.01)
    play.environment = whole
    play.record.flush()
    found = play.bursts(2800, 400)
    assert sum(spent.seconds for spent in found.values()) == pytest.approx(clock.now_s, rel=0.01)
    assert found["record"].seconds == pytest.approx(0.0, abs=1e-6)


def test_actions_that_nobody_chose_are_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The safe ones: between them and a burst nothing is counted twice."""
    clock = Clock(monkeypatch)
    play = Play(clock, step_s=3.0, act_s=1.0)
    clock.now_s = 0.0
    for _ in range(200):
        rollout.run(play.environment, [0], play.record, times=play.times)
    play.record.flush()
    found = play.bursts(2800, 400)
    assert sum(spent.seconds for spent in found.values()) == pytest.approx(clock.now_s, rel=0.01)
    assert found["record"].seconds == pytest.approx(0.0, abs=1e-6)


def test_this_machine_tells_what_timing_costs() -> None:
    cost = step_times.measured_overhead()
    assert 0.0 < cost.inside_s < 1e-4
    assert 0.0 < cost.outside_s < 1e-4
    assert 0.0 < cost.piece_s < 1e-4
