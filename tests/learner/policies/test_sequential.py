"""The trial's promises hold on seeded trials, whoever stops when; and figures worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from learner.policies import sequential

Draw = Callable[[np.random.Generator], float]
TRIALS = 200
PAIRS_MAX = 2000
RETURNS: dict[str, Draw] = {
    "normal": lambda rng: rng.normal(200.0, 60.0),
    "with outliers": lambda rng: -150.0 + 40.0 * rng.standard_cauchy(),
    "two outcomes": lambda rng: float(rng.random() < 0.3),
    "an episode's length": lambda rng: float(rng.geometric(0.02)),
}


def verdicts(challenger: Draw, incumbent: Draw) -> list[tuple[str, int]]:
    """Decisions of seeded trials, and after how many episodes of the challenger each came."""
    found: list[tuple[str, int]] = []
    for seed in range(TRIALS):
        rng, trial = np.random.default_rng(seed), sequential.Trial()
        while trial.decision == "wait" and trial.pairs < PAIRS_MAX:
            trial.add_incumbent(incumbent(rng))
            trial.add_challenger(challenger(rng))
        found.append((trial.decision, trial.pairs))
    return found


@pytest.mark.parametrize("name", RETURNS)
def test_equal_policies_are_rarely_withdrawn_however_often_one_looks(name: str) -> None:
    found = verdicts(RETURNS[name], RETURNS[name])
    share = sum(decision == "withdraw" for decision, _ in found) / TRIALS
    assert share <= 0.05
    assert sum(decision == "promote" for decision, _ in found) / TRIALS >= 0.9


def test_halved_returns_are_withdrawn_within_episodes() -> None:
    found = verdicts(lambda rng: 0.5 * RETURNS["normal"](rng), RETURNS["normal"])
    assert {decision for decision, _ in found} == {"withdraw"}
    pairs = [pairs for _, pairs in found]
    print(f"halved returns: median {np.median(pairs):g} episodes, 99th percentile {np.percentile(pairs, 99):g}")
    assert np.median(pairs) <= 15
    assert np.percentile(pairs, 99) <= 50


@pytest.mark.parametrize("name", ["two outcomes", "an episode's length"])
def test_halved_returns_of_great_spread_take_longer(name: str) -> None:
    found = verdicts(lambda rng: RETURNS[name](rng) * (rng.random() < 0.5), RETURNS[name])
    assert sum(decision == "withdraw" for decision, _ in found) >= 0.2 * TRIALS
    if name == "an episode's length":
        assert sum(decision == "promote" for decision, _ in found) <= 0.02 * TRIALS


def test_a_better_policy_is_promoted_soon() -> None:
    found = verdicts(lambda rng: 2.0 * RETURNS["normal"](rng), RETURNS["normal"])
    assert {decision for decision, _ in found} == {"promote"}
    assert np.median([pairs for _, pairs in found]) <= 15


def test_a_challenger_that_loses_every_pair_is_withdrawn_when_the_mean_wealth_says_so() -> None:
    trial, pairs = sequential.Trial(alpha=0.02), 0
    while trial.decision == "wait":
        trial.add_incumbent(1.0)
        trial.add_challenger(0.0)
        pairs += 1
    wealth = [np.mean([(1 + share) ** n for share in sequential._SHARES]) for n in (pairs - 1, pairs)]
    assert wealth[0] < 50 <= wealth[1]
    assert (trial.decision, trial.pairs) == ("withdraw", pairs)


def test_it_waits_for_both_sides_and_a_decision_stays() -> None:
    trial = sequential.Trial()
    for _ in range(100):
        assert trial.add_challenger(-1.0) == "wait"
    assert trial.pairs == 0
    while trial.add_incumbent(0.0) == "wait":
        pass
    decided = trial.pairs
    for _ in range(100):
        trial.add_incumbent(-5.0)
        assert trial.add_challenger(5.0) == "withdraw"
    assert trial.pairs == decided


def test_thresholds_outside_their_range_are_refused() -> None:
    for wrong in ({"alpha": 0.0}, {"margin": 1.0}, {"alpha": math.nan}):
        with pytest.raises(ValueError, match="between 0 and 1"):
            sequential.Trial(**wrong)
