"""What a fleet may say, by what is measured."""

from __future__ import annotations

import math

import pytest

from learner.fleet import brokers, budget


class Ingest:
    """An ingest and brokers as they are measured, window after window; the fleet sends what it may, at once."""

    def __init__(self, steered: budget.Budget, actors: int, message_s: float) -> None:
        self.steered, self.actors, self.message_s = steered, actors, message_s
        self.waiting = 0.0
        self.delays_s = {"a": 0.01}
        self.seen: list[float] = []

    def run(self, windows: int) -> None:
        for _ in range(windows):
            offered = self.waiting + self.steered.messages_per_s * budget.WINDOW_S
            taken = min(offered, budget.WINDOW_S / self.message_s)
            self.waiting = offered - taken
            done = round(taken)
            busy_s = taken * self.message_s
            self.steered.steer(
                budget.Seen(self.actors, budget.WINDOW_S, done, done, busy_s, round(self.waiting), dict(self.delays_s))
            )
            self.seen.append(self.steered.messages_per_s)


@pytest.mark.parametrize("actors", [1, 20, 500])
@pytest.mark.parametrize("message_s", [1e-6, 0.24e-3, 4e-3])
def test_a_fleet_that_is_served_keeps_its_budget(actors: int, message_s: float) -> None:
    found = Ingest(budget.Budget(), actors, message_s)
    found.run(100)
    assert set(found.seen) == {budget.MESSAGES_PER_S}


def test_a_large_fleet_is_given_what_is_to_spare_in_steps_and_then_left_alone() -> None:
    found = Ingest(budget.Budget(), 10_000, 0.24e-3)
    found.run(400)
    assert found.steered.capacity_per_s == pytest.approx(1 / 0.24e-3, rel=0.01)
    assert found.seen[-1] == pytest.approx(budget.SPARE.low / 0.24e-3, rel=0.02), "and not 1600, which it would want"
    steps = [later / before for before, later in zip(found.seen, found.seen[1:], strict=False)]
    assert max(steps) <= budget.RISE + 1e-9
    assert len(set(found.seen[-100:])) == 1, "it rests"


def test_what_costs_more_than_expected_is_taken_back_but_not_at_once() -> None:
    found = Ingest(budget.Budget(), 10_000, 0.24e-3)
    found.run(400)
    before = found.seen[-1]
    found.message_s = 0.24e-3 * 1.3
    found.run(20)
    assert found.seen[-1] == before, "within the band"
    found.message_s = 0.24e-3 * 2
    found.run(20)
    low, high = (share / found.message_s for share in budget.SPARE)
    assert low <= found.seen[-1] <= high < before


def test_a_slow_ingest_lets_the_budget_fall_until_nothing_waits_and_a_quick_one_gives_it_back() -> None:
    found = Ingest(budget.Budget(), 40, 0.025)
    found.run(1)
    assert found.seen == [budget.MESSAGES_PER_S], "one window proves nothing"
    found.run(20)
    low, high = (share / 0.025 for share in budget.NEEDED)
    assert low <= found.seen[-1] <= high and found.waiting == 0
    assert len(set(found.seen[-10:])) == 1, "it rests"
    found.message_s = 0.24e-3
    found.run(60)
    assert found.seen[-1] == budget.MESSAGES_PER_S


def test_what_waits_for_a_disk_counts_though_the_loop_is_idle() -> None:
    found = budget.Budget()
    for _ in range(6):
        found.steer(budget.Seen(100, 2.0, 80, 80, 0.02, 400, {"a": 0.01}))
    assert found.capacity_per_s == pytest.approx(40.0), "what came through"
    assert found.messages_per_s == pytest.approx(budget.NEEDED.low * 40.0)


def test_no_fleet_is_silenced() -> None:
    found = Ingest(budget.Budget(), 100, 3.0)
    found.run(20)
    assert found.seen[-1] == budget.LEAST_PER_S


def test_a_message_or_two_that_wait_are_no_backlog() -> None:
    found = budget.Budget()
    for _ in range(10):
        found.steer(budget.Seen(1, 2.0, 1, 1, 1.9, 5, {"a": 0.01}))
    assert found.messages_per_s == budget.MESSAGES_PER_S and math.isnan(found.capacity_per_s)


def test_brokers_add_up_and_a_slow_one_counts_for_less() -> None:
    one, three = (Ingest(budget.Budget(), 1000, 1e-4) for _ in range(2))
    three.delays_s = {"a": 0.01, "b": 0.01, "c": 0.01}
    one.run(1)
    three.run(1)
    assert one.seen[-1] == 100.0 and three.seen[-1] == 100.0, "what ingest allows by now"
    for found in (one, three):
        found.run(100)
        assert found.seen[-1] == pytest.approx(1000 / budget.WANTED_PERIOD_S)
    one.delays_s = {"a": 3.0}
    one.run(200)
    assert one.seen[-1] == budget.LEAST_PER_S
    three.delays_s = {"a": 3.0, "b": 0.5, "c": 0.01}
    three.run(200)
    assert three.seen[-1] == 3 * budget.LEAST_PER_S, "all actors have one period"
    three.delays_s = {"a": 3.0}
    three.run(1)
    assert three.seen[-1] < 20, "where they are gone, their shares are gone"
    three.delays_s = {"a": 0.01}
    three.run(250)
    assert three.seen[-1] == pytest.approx(1000 / budget.WANTED_PERIOD_S)


def test_a_fixed_one_stays_and_says_what_could_be() -> None:
    found = Ingest(budget.Budget(300.0), 40, 0.025)
    found.delays_s = {"a": 9.0}
    found.run(20)
    assert set(found.seen) == {300.0}
    assert found.steered.capacity_per_s == pytest.approx(40.0)
    assert found.steered.metrics()["backlog_s"] > budget.BACKLOG_S


def test_an_echo_tells_how_long_a_broker_takes_and_its_absence_as_well() -> None:
    found = brokers.Echoes()
    found.say(1, 100.0)
    assert found.delays_s(["a", "b"], 109.0) == {"a": 0.0, "b": 0.0}, "nothing is known of them"
    found.hear("a", 1, 100.2)
    found.hear("b", 1, 100.3)
    found.say(2, 102.0)
    found.hear("b", 2, 102.1)
    assert found.delays_s(["a", "b"], 105.0) == pytest.approx({"a": 3.0, "b": 0.1})
    found.hear("a", 1, 106.0)
    assert found.delays_s(["a"], 106.0) == pytest.approx({"a": 4.0}), "what is repeated says nothing"
    found.hear("a", 2, 106.5)
    assert found.delays_s(["a"], 107.0) == pytest.approx({"a": 4.5})
    found.hear("a", 7, 108.0)
    assert found.delays_s(["a"], 108.0) == pytest.approx({"a": 4.5}), "never said"
