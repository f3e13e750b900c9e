"""The fleet's joules: each board once, each joule with its source, and nothing that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract import messages
from learner.fleet import energy
from tests.fakes import fleet_examples


def told(at_s: float, joules: float | None, **changes: Any) -> messages.ActorState:
    values: dict[str, Any] = {"power_source": "INA226", "board_id": "one", "energy_s": at_s, "created_s": 1e9 + at_s}
    process = {key: changes.pop(key) for key in ("boot", "session") if key in changes}
    return fleet_examples.state(vitals=messages.Vitals(energy_j=joules, **(values | changes)), **process)


def test_counting_begins_with_what_is_heard_first() -> None:
    fleet = energy.Energy()
    for at_s, joules in ((0.0, 1000.0), (10.0, 1050.0), (20.0, 1090.0)):
        fleet.note("pi", told(at_s, joules), at_s)
    assert fleet.drawn == [energy.Drawn("one", "INA226", False, 90.0)]
    assert fleet.coverage == 1.0
    assert fleet.metrics() == {"actors_measured_j": 90.0}


def test_two_actors_on_one_board_count_once() -> None:
    fleet = energy.Energy()
    fleet.note("a", told(0.0, 0.0), 0.0)
    fleet.note("b", told(5.0, 25.0), 5.0)  # of a board of 5 W
    fleet.note("a", told(10.0, 50.0), 10.0)
    fleet.note("b", told(15.0, 75.0), 15.0)
    fleet.note("a", told(20.0, 100.0), 20.0)
    assert [one.joules for one in fleet.drawn] == [pytest.approx(100.0)]
    assert fleet.of_actor("a") == {"joules": pytest.approx(100.0), "coverage": 1.0}


def test_boards_apart_add_up_and_so_do_actors_that_name_none() -> None:
    fleet = energy.Energy()
    for at_s in (0.0, 10.0):
        fleet.note("a", told(at_s, 3 * at_s), at_s)
        fleet.note("b", told(at_s, 2 * at_s, board_id="two", power_modelled=True, power_source="model"), at_s)
        fleet.note("c", told(at_s, at_s, board_id=""), at_s)
        fleet.note("d", told(at_s, at_s, board_id=""), at_s)
    assert fleet.metrics() == {"actors_measured_j": 50.0, "actors_modelled_j": 20.0}


def test_coverage_is_the_share_of_the_actors_time_with_a_reading() -> None:
    fleet = energy.Energy()
    for at_s in (0.0, 10.0):
        fleet.note("a", told(at_s, at_s, energy_s=at_s / 2), at_s)
        fleet.note("b", told(at_s, None, energy_s=0.0, board_id="two"), at_s)
    assert fleet.coverage == 0.25
    assert fleet.of_actor("b") == {"joules": None, "coverage": 0.0}


def test_what_is_drawn_after_a_clock_was_put_back_counts() -> None:
    fleet = energy.Energy()
    for at_s in (0.0, 10.0, 50.0, 60.0):
        for actor_id in ("a", "b"):  # of a board of 5 W
            clock_s = at_s - (3600.0 if at_s > 10.0 else 0.0)
            fleet.note(actor_id, told(at_s, 5 * at_s, created_s=1e9 + clock_s), at_s)
    assert [one.joules for one in fleet.drawn] == [pytest.approx(100.0)], "all but the time of the jump"
    assert fleet.coverage == 1.0


def test_a_process_that_starts_anew_begins_anew_and_what_it_said_stays() -> None:
    fleet = energy.Energy()
    fleet.note("pi", told(0.0, 0.0), 0.0)
    fleet.note("pi", told(10.0, 40.0), 10.0)
    fleet.note("pi", told(12.0, 1.0, boot=2, energy_s=0.2), 12.0)
    fleet.note("pi", told(22.0, 41.0, boot=2, energy_s=10.2), 22.0)
    assert [one.joules for one in fleet.drawn] == [80.0]


@pytest.mark.parametrize(
    "then",
    [
        told(10.0, -5.0 + 5.0, energy_s=-0.0),  # no reading
        told(10.0, 1e12),
        told(10.0, 20.0, board_id="another"),
        told(1e6, 20.0),  # its clock jumps
    ],
)
def test_what_cannot_be_is_not_counted(then: messages.ActorState) -> None:
    fleet = energy.Energy()
    fleet.note("pi", told(0.0, 0.0), 0.0)
    fleet.note("pi", then, 10.0)
    assert sum(one.joules for one in fleet.drawn) == 0.0


def test_heartbeats_in_quick_succession_share_a_reading() -> None:
    fleet = energy.Energy()
    for at_s, read_s in ((0.0, 0.0), (1.0, 1.0), (1.25, 1.0), (2.0, 2.0)):
        fleet.note("pi", told(at_s, 5 * read_s, energy_s=read_s), at_s)
    assert [one.joules for one in fleet.drawn] == [10.0] and fleet.coverage == 1.0


def test_a_goodbye_says_nothing() -> None:
    fleet = energy.Energy()
    fleet.note("pi", told(0.0, 5.0), 0.0)
    fleet.note("pi", fleet_examples.state(online=False), 1.0)
    fleet.note("pi", told(10.0, 25.0), 10.0)
    assert [one.joules for one in fleet.drawn] == [20.0]
