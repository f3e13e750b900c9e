"""A ratio of energies tells no more than what made them."""

from __future__ import annotations

from typing import Any

from learner.study import energies


def told(learner: float | None, actors: float | None, *, modelled: bool = False) -> dict[str, Any]:
    sides = {"learner": learner, "actors": actors}
    return {name: {"joules": j, "modelled": modelled, "source": f"{name}'s meter"} for name, j in sides.items()}


def test_measured_ones_can_tell() -> None:
    able, why = energies.distinguishable(told(1.0, 2.0), told(3.0, 4.0))
    assert able and why == "measured by actors's meter, learner's meter"


def test_modelled_ones_say_no_more_than_times() -> None:
    able, why = energies.distinguishable(told(1.0, None), told(3.0, None, modelled=True))
    assert not able and "their ratio is that of the times" in why and "the learner's joules" in why


def test_what_is_not_told_or_not_of_the_same_cannot_be_compared() -> None:
    assert energies.distinguishable(told(1.0, 2.0), {}) == (False, "not every run tells its energy")
    assert "one of them alone" in energies.distinguishable(told(1.0, 2.0), told(1.0, None))[1]
    assert not energies.distinguishable()[0]
