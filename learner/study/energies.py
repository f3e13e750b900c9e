"""Judges what energies can tell: joules that a model made from times say no more than the times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIDES = ("learner", "actors")


def distinguishable(*energies: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns whether a ratio of these energies tells more than the ratio of times, and why not, or what it rests on.

    Args:
        energies: The `energy` of runs' summaries. All of them are looked at, as one that is modelled spoils a ratio.

    Returns:
        True and what measured them, where all joules that are told were measured and all runs tell those of the same
        sides; false and the reason otherwise, as one sentence for people.
    """
    told = [frozenset(side for side in SIDES if _joules(one, side) is not None) for one in energies]
    if not told or not all(told):
        return False, "not every run tells its energy"
    if len(set(told)) > 1:
        return False, "some runs tell the energy of learner and actors, others of one of them alone"
    sides = [side for side in SIDES if side in told[0]]
    modelled = [side for side in sides if any(_side(one, side).get("modelled", True) for one in energies)]
    if modelled:
        who = " and ".join("learner's" if side == "learner" else "actors'" for side in modelled)
        return False, (
            f"the {who} joules are modelled from time and load: their ratio is that of the times, and cannot show "
            "whether int8 instructions draw less"
        )
    sources = sorted({str(_side(one, side).get("source")) for one in energies for side in sides})
    return True, f"measured by {', '.join(sources)}"


def _side(energy: Mapping[str, Any], side: str) -> Mapping[str, Any]:
    found = energy.get(side)
    return found if isinstance(found, Mapping) else {}


def _joules(energy: Mapping[str, Any], side: str) -> float | None:
    value = _side(energy, side).get("joules")
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
