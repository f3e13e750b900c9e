"""Vitals: each stage tells its own, and they become one message."""

from __future__ import annotations

import math
from typing import Any

import pytest

from broker.contract import codec, messages
from broker.program import stopwatch
from edge_actor.fleet import vitals


class Stage:
    """Tells what it was made with."""

    def __init__(self, **figures: Any) -> None:
        self._figures = figures

    def vitals(self) -> dict[str, Any]:
        return self._figures


def test_what_each_stage_tells_becomes_one_and_refusals_add_up() -> None:
    stages = [Stage(steps=7, refused={"signature": 2, "flood": 1}), Stage(refused={"signature": 3}), Stage(episodes=1)]
    assert vitals.merge(stages) == messages.Vitals(steps=7, episodes=1, refused={"signature": 5, "flood": 1})
    assert vitals.merge([]) == messages.Vitals()


def test_stages_of_one_name_add_up_and_those_that_never_ran_are_left_out() -> None:
    first, second = stopwatch.Stopwatch("send", "seal"), stopwatch.Stopwatch("send")
    first.add("send", 0.5, 2)
    second.add("send", 0.25)
    assert vitals.merge([vitals.Stages([first, second])]) == messages.Vitals(stages={"send": (3, 0.75)})


def test_stages_are_looked_at_once_by_states_in_quick_succession() -> None:
    now_s, watch = 100.0, stopwatch.Stopwatch("send")
    stages = vitals.Stages([watch], lambda: now_s)
    for at_s, seen in ((100.0, 1), (100.1, 1), (100.3, 3), (100.4, 3)):
        now_s = at_s
        watch.add("send", 0.5)
        assert stages.vitals() == {"stages": {"send": (seen, seen * 0.5)}}


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_is_none(odd: float) -> None:
    merged = vitals.merge([Stage(return_mean=odd, power_w=1.5)])
    assert merged == messages.Vitals(return_mean=None, power_w=1.5)
    codec.encode(messages.ActorState(True, "s", 1, 1, vitals=merged))


def test_a_field_that_no_message_has_is_a_fault() -> None:
    with pytest.raises(TypeError, match="step"):
        vitals.merge([Stage(step=7)])
