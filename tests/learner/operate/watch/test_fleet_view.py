"""What the page knows of a fleet: who is there, what is wrong, and how much memory that takes."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import pytest

from broker.contract import messages
from learner.operate.watch import alarms, fleet_view, history
from tests.fakes import simulated_actor

BIRTH = messages.Birth("Arm-v0", simulated_actor.SPEC, 1, "Raspberry Pi 5", "3.11", "litert", "", 50.0, release="0.1.0")
ASSIGNED = messages.Assignment("s", 1, 1, "main", 0, 0.0, 0.0, 1, 0, 0, 0)


class Clock:
    """Unix time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1.8e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock: Clock) -> fleet_view.FleetView:
    return fleet_view.FleetView(clock)


def state(heartbeat: int, *, online: bool = True, boot: int = 1, **vitals: Any) -> messages.ActorState:
    return messages.ActorState(online, f"s{boot}", boot, heartbeat, BIRTH, messages.Vitals(**vitals))


def row(view: fleet_view.FleetView, name: str = "pi") -> dict[str, Any]:
    return next(one for one in view.rows()[1] if one["actor"] == name)


def test_a_learner_that_names_no_task_has_that_of_its_actors(view: fleet_view.FleetView) -> None:
    view.hear_learner(messages.LearnerState(True, "s", 1, 1), retained=False)
    assert view.fleet()["learner"]["env_id"] == ""
    view.hear_actor("pi", state(1), retained=False)
    assert view.fleet()["learner"]["env_id"] == "Arm-v0"


def test_a_row_has_what_the_heartbeat_says(view: fleet_view.FleetView, clock: Clock) -> None:
    view.hear_actor("pi", state(1, steps=100, created_s=clock.now_s), retained=False)
    clock.now_s += 2.0
    told: dict[str, Any] = {
        "latency_p99_us": 9.5,
        "power_w": 4.5,
        "power_source": "INA226",
        "temperature_c": 51.0,
        "throttled": 0,
    }
    view.hear_actor("pi", state(2, steps=300, delegate="XNNPACK", **told), retained=False)
    found = row(view)
    assert found["steps_per_s"] == pytest.approx(100.0)
    assert told.items() <= found.items()
    assert (found["board"], found["release"], found["kernels"]) == ("Raspberry Pi 5", "0.1.0", "XNNPACK")
    assert found["live"] and not found["alarms"]


def test_an_actor_whose_plug_is_pulled_shows_within_eleven_seconds(view: fleet_view.FleetView, clock: Clock) -> None:
    view.hear_actor("pi", state(1), retained=False)
    clock.now_s += 9.9
    view.tick()
    assert not row(view)["alarms"]
    clock.now_s += 1.1
    before, *_ = view.rows()
    view.tick()
    assert [one["actor"] for one in view.rows(before)[1]] == ["pi"], "a page is told of it"
    assert "silent" in row(view)["alarms"] and not row(view)["live"]


def test_who_may_speak_less_often_is_not_silent_so_soon(view: fleet_view.FleetView, clock: Clock) -> None:
    view.hear_assignment("pi", dataclasses.replace(ASSIGNED, message_period_s=10.0))
    view.hear_actor("pi", state(1), retained=False)
    clock.now_s += 29.0
    view.tick()
    assert row(view)["live"]


def test_a_will_shows_at_once_and_a_late_one_never(view: fleet_view.FleetView) -> None:
    view.hear_actor("pi", state(5), retained=False)
    view.hear_actor("pi", state(4, online=False), retained=False)
    assert row(view)["live"]
    view.hear_actor("pi", state(6, online=False), retained=False)
    assert row(view)["alarms"] == {"silent": "went offline"}


def test_what_is_retained_makes_nobody_live_or_missed(view: fleet_view.FleetView) -> None:
    view.hear_actor("pi", state(5), retained=True)
    view.tick()
    assert not row(view)["live"] and not row(view)["alarms"]


def test_a_process_with_a_lower_boot_has_the_name_once_the_other_is_gone(
    view: fleet_view.FleetView, clock: Clock
) -> None:
    view.hear_actor("pi", state(5, boot=7), retained=False)
    view.hear_actor("pi", state(1, boot=3, steps=33), retained=False)
    assert row(view)["steps"] == 0
    clock.now_s += 11.0
    view.hear_actor("pi", state(2, boot=3, steps=33), retained=False)
    assert row(view)["steps"] == 33 and row(view)["live"]


@pytest.mark.parametrize(
    ("kind", "vitals"),
    [
        ("throttled", {"throttled": 0x50005}),
        ("spool", {"spool_share": 0.6}),
        ("clock", {"created_s": 1.8e9 - 3600.0}),
        ("kernels", {"delegate": "built-in"}),
        ("refusals", {"refused": {"signature": 3}}),
        ("environment", {"env_failures": 1, "env_failure": "OSError"}),
    ],
)
def test_alarms(view: fleet_view.FleetView, kind: str, vitals: dict[str, Any]) -> None:
    view.hear_actor("pi", state(1, delegate="XNNPACK", throttled=0x50000), retained=False)
    assert not row(view)["alarms"], "what was so before is no alarm"
    view.hear_actor("pi", state(2, **vitals), retained=False)
    assert list(row(view)["alarms"]) == [kind]
    assert kind in alarms.KINDS and view.fleet()["alarms"] == {kind: 1}


def test_a_lag_is_alarming_when_it_grows(view: fleet_view.FleetView, clock: Clock) -> None:
    for beat in range(1, 100):
        view.hear_actor("pi", state(beat, policy_lag=beat // 8), retained=False)
        clock.now_s += 1.0
    assert list(row(view)["alarms"]) == ["lag"]
    for beat in range(100, 200):
        view.hear_actor("pi", state(beat, policy_lag=12), retained=False)
        clock.now_s += 1.0
    assert not row(view)["alarms"]


def test_a_refused_actor_says_why(view: fleet_view.FleetView) -> None:
    view.hear_actor("pi", state(1), retained=False)
    view.hear_assignment("pi", dataclasses.replace(ASSIGNED, refused="another spec"))
    assert row(view)["alarms"] == {"refused": "another spec"}


def test_what_the_learner_found_is_an_alarm_while_it_says_so(view: fleet_view.FleetView, clock: Clock) -> None:
    view.hear_actor("pi", state(1), retained=False)
    view.hear_drift({"pi": {"outside": "feature 2", "other": "of another release"}, "gone": {"returns": "fell"}})
    view.tick()
    assert row(view)["alarms"] == {"outside": "feature 2"} and view.fleet()["alarms"] == {"outside": 1}
    view.hear_drift({})
    view.tick()
    assert not row(view)["alarms"]


def test_who_is_revoked_is_gone(view: fleet_view.FleetView) -> None:
    view.hear_actor("pi", state(1), retained=False)
    view.keep({"other"})
    assert view.rows() == (view.revision, [], [])


def test_memory_is_bounded_over_hours(view: fleet_view.FleetView, clock: Clock) -> None:
    def an_hour(first: int) -> None:
        for beat in range(first, first + 360):
            clock.now_s += 10.0
            for name in ("one", "two", "three"):
                view.hear_actor(name, state(beat, steps=beat, refused={"signature": beat}), retained=False)
            view.tick()

    an_hour(1)
    tracemalloc.start()
    try:
        an_hour(400)
        before, _ = tracemalloc.get_traced_memory()
        an_hour(800)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000
    points = view.history("one")
    assert points is not None and len(points["at_s"]) == history.POINTS


def test_history_is_of_the_last_hour_and_in_order() -> None:
    kept = history.History()
    for second in range(0, 2 * 3600, 5):
        kept.note(1e6 + second, {"policy_lag": float(second)})
    series = kept.series(1e6 + 2 * 3600 - 5)
    assert series["at_s"] == sorted(at for at in series["at_s"] if at is not None) and len(series["at_s"]) == 360
    assert series["policy_lag"][-1] == 2 * 3600 - 5 and series["power_w"] == [None] * 360
    assert kept.series(2e6)["at_s"] == []
