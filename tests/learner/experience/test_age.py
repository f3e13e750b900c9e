"""How old experience is, whatever the clocks say."""

from __future__ import annotations

import pytest

from broker.contract import messages
from learner.experience import age
from tests.fakes import fleet_examples

NOW_S = 1_800_000_000.0


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def sealed(before_s: float, boot: int = 1) -> messages.Experience:
    return fleet_examples.experience(boot=boot, created_ms=int(1e3 * (NOW_S - before_s)))


def test_clocks_that_agree_need_no_heartbeat() -> None:
    ages = age.Ages(clock=Clock())
    assert ages.age_s("pi", sealed(7.5)) == pytest.approx(7.5)
    ages.hear("pi", 1, NOW_S - 0.4)
    assert ages.age_s("pi", sealed(7.5)) == pytest.approx(7.5), "0.4 s are the way, or were spent in a queue"


@pytest.mark.parametrize("error_s", [-86_400.0, -3.0, 3.0, 3e7])
def test_a_wrong_clock_is_known_from_heartbeats_of_its_process(error_s: float) -> None:
    ages = age.Ages(clock=Clock())
    for held_up_s in (5.0, 0.0, 40.0):
        ages.hear("pi", 1, NOW_S - error_s - held_up_s)
    assert ages.age_s("pi", sealed(error_s + 60.0)) == pytest.approx(60.0)
    assert ages.age_s("pi", sealed(60.0, boot=9)) == pytest.approx(60.0), "another process, of another time"
    assert ages.age_s("other", sealed(60.0)) == pytest.approx(60.0)


def test_a_learner_that_stood_still_takes_no_clock_for_wrong() -> None:
    clock = Clock()
    ages = age.Ages(clock=clock)
    for second in range(60):
        ages.hear("pi", 1, NOW_S + second - 60.0)  # all of them now
    assert ages.age_s("pi", sealed(60.0)) == pytest.approx(60.0)


def test_a_new_process_and_a_clock_that_was_set_are_noticed() -> None:
    ages = age.Ages(clock=Clock())
    ages.hear("pi", 1, NOW_S - 500.0)
    ages.hear("pi", 2, NOW_S)
    assert ages.age_s("pi", sealed(20.0, boot=2)) == pytest.approx(20.0)
    ages.hear("pi", 2, NOW_S + 900.0)  # set forward
    assert ages.age_s("pi", sealed(20.0 - 900.0, boot=2)) == pytest.approx(20.0)


def test_nothing_is_younger_than_new_and_who_has_no_clock_has_no_age() -> None:
    ages = age.Ages(limit_s=1.0, clock=Clock())
    assert ages.age_s("pi", sealed(-0.5)) == 0.0
    ages.hear("pi", 1, 0.0)
    timeless = fleet_examples.experience(created_ms=0)
    assert ages.age_s("pi", timeless) is None
    assert not ages.is_too_old("pi", timeless)
    ages.note_inserted([("pi", timeless)])
    assert ages.summary() == {
        "experience_age_s_p50": None,
        "experience_age_s_p99": None,
        "steps_stale": 0,
        "steps_too_old": 0,
        "messages_of_unknown_age": 1,
    }


def test_what_is_over_the_limit_counts_and_the_rest_has_percentiles() -> None:
    ages = age.Ages(limit_s=10.0, clock=Clock())
    assert not ages.is_too_old("pi", sealed(9.9))
    assert ages.is_too_old("pi", sealed(10.1))
    assert ages.steps_too_old == 3
    ages.note_inserted(("pi", sealed(float(before_s))) for before_s in range(1, 102))
    row = ages.metrics()
    assert (row["experience_age_s_p50"], row["experience_age_s_p99"]) == pytest.approx((51.0, 100.0))
    assert (row["steps_stale"], row["steps_too_old"]) == (3, 3)
    assert "experience_age_s_p50" not in ages.metrics(), "none since"
    assert ages.summary()["experience_age_s_p50"] == pytest.approx(51.0)


def test_without_a_limit_nothing_is_too_old() -> None:
    assert not age.Ages(clock=Clock()).is_too_old("pi", sealed(1e9))
