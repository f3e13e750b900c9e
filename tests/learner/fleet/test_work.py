"""The actors of a fleet tell what they spend, through reboots and first words."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract import messages
from learner.fleet import roster, work
from tests.fakes import fleet_examples


def state(count: int, seconds: float, cpu_s: float | None = None, **changes: Any) -> messages.ActorState:
    told = messages.Vitals(stages={"environment": (count, seconds)}, cpu_s=cpu_s, created_s=1e9)
    return fleet_examples.state(vitals=told, **changes)


def test_boots_and_actors_are_added_up_from_what_each_said_first() -> None:
    made = work.Work()
    assert made.cpu_s is None
    made.note("a", state(1000, 50.0, 9.0))  # it has acted for somebody else before
    made.note("a", state(1010, 51.5, 9.5))
    made.note("a", state(0, 0.0, 0.25, boot=2))  # rebooted
    made.note("a", state(7, 2.0, 1.25, boot=2))
    made.note("b", state(0, 0.0))
    made.note("b", state(3, 0.5))
    assert made.times.totals()["environment"] == (20, 4.0)
    assert made.cpu_s == pytest.approx(1.5)


def test_a_goodbye_and_what_goes_backwards_say_nothing() -> None:
    made = work.Work()
    for count, seconds in ((5, 1.0), (9, 3.0), (9, 2.0), (9, 4.0)):
        made.note("a", state(count, seconds, seconds))
    made.note("a", fleet_examples.state(online=False))
    assert made.times.totals()["environment"] == (4, 4.0)
    assert made.cpu_s == pytest.approx(4.0)


def test_two_processes_that_take_turns_count_once_each() -> None:
    made = work.Work()
    for n in range(10):
        for session in ("one", "two"):
            made.note("a", state(n, float(n), session=session))
    assert made.times.totals()["environment"] == (18, 18.0)


def test_of_processes_without_end_few_are_remembered() -> None:
    made = work.Work()
    for boot in range(100):
        made.note("a", state(0, 0.0, boot=boot))
        made.note("a", state(1, 1.0, boot=boot))
    assert made.times.totals()["environment"] == (100, 100.0)
    assert len(made._newest["a"]) <= 4


def test_the_roster_counts_what_its_actors_say() -> None:
    found = roster.Roster("session", 4, "")
    found.observe("a", state(0, 0.0, 1.0), retained=False, now_s=0.0)
    found.observe("a", state(64, 0.5, 2.0, heartbeat=2), retained=False, now_s=1.0)
    found.observe("a", state(32, 0.2, 1.5, heartbeat=1), retained=False, now_s=1.1)  # late
    assert found.work.times.totals()["environment"] == (64, 0.5)
    assert found.work.cpu_s == pytest.approx(1.0)
