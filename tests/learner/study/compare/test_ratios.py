"""Rows and their table, of records as comparison.py writes them."""

from __future__ import annotations

from typing import Any

from learner.study.compare import headroom, plan, ratios, table

REQUEST = plan.Request(
    precisions=("float32", "int8"), hidden=((64, 64),), seeds=2, regimes=("actor-bound",), kinds=plan.KINDS
)
ARMS = dict(zip(REQUEST.precisions, plan.arms(REQUEST, "actor-bound", (64, 64)), strict=True))
HELD = {"share": 0.25, "how": "cgroup v1, 12500 of 50000 us", "throttled": 0.9}
PACES = {("actor-bound", (64, 64)): headroom.Pace(1000, 0.5)}


def record(precision: str, seed: int, kind: str = "throughput", failed: str = "", **changed: Any) -> dict[str, Any]:
    figures = {"env_steps_per_s": 100.0 if precision == "float32" else 400.0, "idle_share": 0.5, "actors_joules": 2.0}
    energy = {"actors": {"joules": 2.0, "modelled": True, "source": "load", "coverage": 1.0}, "note": "as the times"}
    step = 900.0 if precision == "float32" else 200.0
    return {
        "run": f"{precision}-{seed}",
        "kind": kind,
        "arm": ARMS[precision].facts(),
        "seed": seed,
        "failed": failed,
        "figures": figures | changed.get("figures", {}),
        "breakdown": {"actors": {"observation_to_action": step, "environment": 20.0}},
        "summary": {"actors_held": HELD, "energy": energy, "env_steps": 1000} | changed.get("summary", {}),
    }


def found(*records: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["measure"]: row for row in ratios.ratios(REQUEST, records, PACES)}


BOTH = [record(precision, seed) for precision in ("float32", "int8") for seed in (0, 1)]


def test_a_row_says_regime_width_precisions_and_why() -> None:
    row = found(*BOTH)["env_steps_per_s"]
    assert row["case"] == (
        "actor-bound, CartPole-v1 64x64, int8 over float32: environment steps/s at equal learner work"
    )
    assert (row["value"], row["reference"], row["ratio"], row["interval"], row["runs"]) == (400, 100, 4, [4, 4], 2)
    for told in (
        "each actor held to 0.25 of a core by cgroup v1, 12500 of 50000 us, which made it wait in 90% of its periods",
        "learner idle 50% (int8), 50% (float32)",
        "0.5 samples per insert",
        "actors, us a step: observation_to_action 900 -> 200",
        "2 seeds: the interval is narrower than it claims",
    ):
        assert told in row["explain"]
    assert row["breakdown"]["int8"]["actors"]["observation_to_action"] == 200.0


def test_energy_says_whether_it_is_modelled() -> None:
    explain = found(*BOTH)["actors_joules"]["explain"]
    assert "in the first run: modelled (load), of 100% of the actors, as the times; " in explain


def test_a_busy_learner_and_a_free_actor_are_said() -> None:
    busy = record(
        "int8", 0, figures={"idle_share": 0.2}, summary={"actors_held": {"share": None, "how": "unlimited: no"}}
    )
    explain = found(BOTH[0], busy)["env_steps_per_s"]["explain"]
    assert "NOT actor-bound: in a run the learner was idle for 20% only" in explain
    assert "unlimited: no" in explain
    assert "held to" not in explain


def test_a_failed_run_is_counted_and_left_out() -> None:
    row = found(*BOTH[:3], record("int8", 1, failed="it broke", figures={"env_steps_per_s": 9e9}))["env_steps_per_s"]
    assert (row["ratio"], row["runs"], row["interval"]) == (4.0, 1, None)
    assert "1 of 2 runs of int8 failed and are left out" in row["explain"]
    assert "one seed: no interval" in row["explain"]


def test_a_run_that_ended_by_time_is_said() -> None:
    explain = found(*BOTH[:3], record("int8", 1, summary={"env_steps": 999}))["env_steps_per_s"]["explain"]
    assert "1 of 2 runs of int8 ended by time before their 1,000 steps" in explain
    assert "of float32 ended by time" not in explain


def test_runs_that_did_not_reach_the_threshold_are_counted() -> None:
    reached = [record(p, s, "threshold", figures={"threshold_s": 5.0}) for p in ("float32", "int8") for s in (0, 1)]
    del reached[3]["figures"]["threshold_s"]
    for row in (found(*reached)["threshold_s"], found(*reached)["actors_joules"]):
        assert row["runs"] == 1, "what the other run cost is not the cost of getting there"
        assert "1 of 2 runs of int8 did not reach it within 180 s" in row["explain"]
    assert not list(ratios.unreached(REQUEST, reached))
    del reached[0]["figures"]["threshold_s"]
    assert not found(*reached)
    assert list(ratios.unreached(REQUEST, [*BOTH, *reached])) == [
        "actor-bound, CartPole-v1 64x64: no ratio of times to the threshold, which 1 of 2 runs of int8 and 1 of 2 runs "
        "of float32 reached within 180 s"
    ]


def threshold_runs(float32: list[float | None], int8: list[float | None]) -> list[dict[str, Any]]:
    """Returns runs with the seconds that they took to the threshold; None: ended after 100 s, without it."""
    return [
        record(
            precision,
            seed,
            "threshold",
            figures={"actors_joules": 2.0 * (s or 100.0)}
            | ({"trained_s": 100.0} if s is None else {"trained_s": s, "threshold_s": s}),
        )
        for precision, seconds in (("float32", float32), ("int8", int8))
        for seed, s in enumerate(seconds)
    ]


def test_runs_that_did_not_get_there_bound_the_ratio_on_the_side_that_they_tell_of() -> None:
    rows = found(*threshold_runs([40.0, None], [20.0, 25.0]))
    for row in (rows["threshold_s"], rows["actors_joules"]):
        assert (row["ratio"], row["runs"]) == (0.5, 1)
        assert row["bound"] == {"side": "at most", "ratio": 0.3536, "interval": [0.25, 0.5], "runs": 2}
        assert "the ratio is at most 0.354 (0.25 to 0.5) over 2 seeds" in row["explain"]
    row = found(*threshold_runs([20.0, 25.0], [40.0, None]))["threshold_s"]
    assert row["bound"] == {"side": "at least", "ratio": 2.828, "interval": [2.0, 4.0], "runs": 2}
    for neither in (([40.0, None, 25.0], [20.0, 25.0, None]), ([40.0, None], [20.0, None]), ([40.0], [20.0])):
        assert found(*threshold_runs(*neither))["threshold_s"]["bound"] is None
    assert found(*BOTH)["env_steps_per_s"]["bound"] is None


def test_a_bound_is_told_where_no_seed_has_both_arms_there() -> None:
    (line,) = ratios.unreached(REQUEST, threshold_runs([None, None], [20.0, 25.0]))
    assert line.endswith(
        "2 of 2 runs of int8 and 0 of 2 runs of float32 reached within 180 s; "
        "it is at most 0.224 (0.2 to 0.25) over 2 seeds"
    )
    (line,) = ratios.unreached(REQUEST, threshold_runs([None, 30.0], [20.0, None]))
    assert line.endswith("reached within 180 s")


def test_nothing_beside_it_makes_no_row() -> None:
    assert not found(*BOTH[:2])


def test_the_table_has_ratio_and_interval() -> None:
    text = table.table(list(ratios.ratios(REQUEST, BOTH, PACES)))
    assert text.startswith("CartPole-v1, 64x64, actor-bound\n")
    line = next(line for line in text.splitlines() if "environment steps/s" in line)
    assert line.split()[-6:] == ["1/s", "4.00x", "4", "to", "4", "2"]
