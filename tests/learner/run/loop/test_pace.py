"""The pace says what may be recorded, and when a run is over."""

from __future__ import annotations

import dataclasses
import time

import pytest

from learner import config
from learner.experience import rate_limiter
from learner.run.loop import pace

EXPLORATION = config.DqnConfig(epsilon_start=1.0, epsilon_end=0.1, epsilon_decay_steps=100, batch_size=4)
SETTINGS = config.TrainConfig(max_env_steps=500, learning_starts=24, samples_per_insert=4.0, publish_period_updates=20)


def make(**changes: object) -> pace.Pace:
    limiter = rate_limiter.RateLimiter(4.0, 24, 8.0)
    return pace.Pace(dataclasses.replace(SETTINGS, **changes), EXPLORATION, limiter, time.monotonic())  # type: ignore[arg-type]


def test_in_lock_step_a_cycle_grants_what_its_updates_need() -> None:
    found = make(deterministic=True)
    assert found.steps_granted == 24
    found.limiter.insert(24)
    found.begin_cycle()
    assert found.steps_granted == 24 + 20 * 4 / 4
    spent = [found.budget_spent]
    found.lockstep_goal = 501
    assert [*spent, found.budget_spent] == [False, True]
    assert found.steps_granted == found.env_steps, "nothing more of a cycle that is not whole"


def test_no_more_steps_are_granted_than_the_budget_has() -> None:
    found = make()
    found.limiter.insert(499)
    found.limiter.sample(10**6)
    assert found.steps_granted == 500
    spent = [found.budget_spent]
    found.limiter.insert(1)
    assert [*spent, found.budget_spent] == [False, True]


def test_epsilon_follows_the_steps_of_the_fleet() -> None:
    found = make()
    seen = [found.epsilon]
    for _ in range(2):
        found.limiter.insert(50)
        seen.append(found.epsilon)
    found.limiter.insert(50)
    assert [*seen, found.epsilon] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_time_is_set_aside_for_a_last_score_if_that_is_not_much() -> None:
    found = make(max_wall_s=100.0)
    assert not found.is_time_up(0.0, 0.0)
    found.end_s = time.monotonic() + 20.0
    assert found.is_time_up(10.0, 0.0), "its 25 s are a quarter"
    assert not found.is_time_up(11.0, 0.0), "more is not waited for"
    assert found.is_time_up(0.0, 30.0), "nor would a call of updates end in time"
