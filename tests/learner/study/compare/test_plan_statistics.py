"""The order of runs, and ratios of what they came to against answers worked out by hand."""

from __future__ import annotations

import math

import pytest

from learner.study.compare import plan, statistics

REQUEST = plan.Request(precisions=("float32", "float16", "int8"), hidden=((64, 64), (256,)), seeds=3, seed=5)


def test_every_arm_meets_every_seed_once() -> None:
    runs = plan.runs(REQUEST)
    assert len(runs) == len(set(runs)) == len({run.name for run in runs}) == 3 * 2 * 2 * 2 * 3
    assert {run.seed for run in runs} == {5, 6, 7}
    assert runs[0].name == "learner-bound-64x64-float32-throughput-seed5"


def test_arms_of_a_cell_follow_one_another_and_each_seed_begins_with_the_next() -> None:
    runs = [run for run in plan.runs(REQUEST) if run.kind == "threshold" and run.arm.hidden == (256,)]
    orders = [[run.arm.precision for run in runs[at : at + 3]] for at in range(0, len(runs), 3)]
    first, second, third = (
        ["float32", "float16", "int8"],
        ["float16", "int8", "float32"],
        ["int8", "float32", "float16"],
    )
    assert orders == [first, first, second, second, third, third]  # of both regimes
    assert all(len({run.seed for run in runs[at : at + 6]}) == 1 for at in range(0, len(runs), 6))


def test_peers_run_float32_under_their_own_name() -> None:
    found = plan.arms(plan.Request(precisions=("float32",), peers=("torch-int8",)), "actor-bound", (64,))
    assert [(arm.name, arm.precision) for arm in found] == [("float32", "float32"), ("torch-int8", "float32")]


def test_a_ratio_is_the_geometric_mean_of_pairs() -> None:
    found = statistics.paired({0: 2.0, 1: 8.0, 9: 1.0}, {0: 1.0, 1: 1.0, 7: 5.0})
    assert found is not None
    assert found.pairs == 2  # seeds 9 and 7 have nothing beside them
    assert (found.value, found.reference) == (5.0, 1.0)
    assert found.ratio == pytest.approx(4.0)
    assert found.spread == pytest.approx(6.0)
    # Of two pairs a resample is the one, the other, or both: a quarter of them each end
    assert found.interval == pytest.approx((2.0, 8.0))


def test_pairs_are_resampled_as_pairs() -> None:
    hard, easy = {0: 3.0, 1: 300.0, 2: 30.0}, {0: 1.0, 1: 100.0, 2: 10.0}
    found = statistics.paired(hard, easy)
    assert found is not None
    assert found.interval == pytest.approx((3.0, 3.0))  # though the seeds differ by a hundred


def test_an_interval_has_the_width_that_theory_gives() -> None:
    values = {seed: math.exp(0.1 * (-1) ** seed) for seed in range(400)}  # logarithms of deviation 0.1
    found = statistics.paired(values, dict.fromkeys(values, 1.0))
    assert found is not None
    assert found.interval is not None
    half = 1.96 * 0.1 / math.sqrt(400)
    assert [math.log(end) for end in found.interval] == pytest.approx([-half, half], rel=0.1)


def test_what_may_be_negative_is_compared_by_its_difference() -> None:
    found = statistics.paired({0: -100.0, 1: 10.0}, {0: -110.0, 1: -10.0}, as_difference=True)
    assert found is not None
    assert found.ratio is None
    assert found.difference == 15.0
    assert found.interval == pytest.approx((10.0, 20.0))


def test_zero_has_no_ratio_and_one_seed_no_interval() -> None:
    zero = statistics.paired({0: 1.0}, {0: 0.0})
    assert zero is not None
    assert (zero.ratio, zero.interval, zero.difference) == (None, None, 1.0)
    assert statistics.paired({0: 1.0}, {1: 1.0}) is None
    assert statistics.remark(1) == "one seed: no interval"
    assert "narrower than it claims" in statistics.remark(5)
    assert statistics.remark(6) == ""
