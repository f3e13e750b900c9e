"""Grants and the control rate."""

from __future__ import annotations

import threading

from edge_actor.acting import pace
from tests.fakes import fake_learner


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Wake(threading.Event):
    """Waiting takes the time it is asked to."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.now += timeout or 0.0
        return self.is_set()


def test_a_grant_counts_within_the_learner_s_session() -> None:
    grant = pace.Grant()
    assert grant.left(0) == 0
    grant.assign(fake_learner.assignment(1, session="a", steps_granted=100), 0)
    assert grant.left(30) == 70
    grant.assign(fake_learner.assignment(1, session="a", steps_granted=150), 30)
    assert grant.left(30) == 120
    grant.assign(fake_learner.assignment(1, session="b", steps_granted=50), 30)
    assert grant.left(30) == 50


def test_the_metronome_keeps_an_absolute_schedule() -> None:
    clock = Clock()
    wake, metronome = Wake(clock), pace.Metronome(10.0, clock)
    begun = []
    for _ in range(5):
        assert metronome.wait(wake)
        begun.append(round(clock.now, 6))
        clock.now += 0.07  # the step
    assert begun == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert metronome.missed == 0


def test_periods_without_a_step_are_missed_and_the_phase_stays() -> None:
    clock = Clock()
    wake, metronome = Wake(clock), pace.Metronome(10.0, clock)
    metronome.wait(wake)
    clock.now += 0.35  # due were 0.1, 0.2 and 0.3
    metronome.wait(wake)
    assert metronome.missed == 2
    metronome.wait(wake)
    assert round(clock.now, 6) == 0.4


def test_someone_else_may_wake_it() -> None:
    clock = Clock()
    wake, metronome = Wake(clock), pace.Metronome(10.0, clock)
    metronome.wait(wake)
    wake.set()
    assert not metronome.wait(wake)


def test_other_work_has_room_before_the_next_step_or_in_half_a_period_if_it_fits_into_none() -> None:
    clock = Clock()
    wake, metronome = Wake(clock), pace.Metronome(10.0, clock)
    metronome.wait(wake)
    clock.now += 0.03  # the step
    assert metronome.has_room(0.06)
    assert metronome.has_room(1.0)
    clock.now += 0.03
    assert metronome.has_room(0.03)
    assert not metronome.has_room(0.05)
    assert not metronome.has_room(1.0)


def test_bursts_take_about_two_milliseconds_or_what_is_asked() -> None:
    burst = pace.BurstLength()
    assert burst.rows() == 1
    for _ in range(100):
        burst.learn(50, 50 * 20e-6)
    assert burst.rows() in (98, 99, 100)
    assert burst.rows(0.0005) in (24, 25)
