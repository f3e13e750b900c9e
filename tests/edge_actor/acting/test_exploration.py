"""Exploration: its schedule, and that it depends on the step alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import specs
from broker.contract.acting import draws
from edge_actor.acting import exploration
from tests.fakes import fake_learner

DISCRETE = specs.ActionSpec("discrete", n=3)
CONTINUOUS = specs.ActionSpec("continuous", shape=(2,), low=(-1.0, 0.0), high=(1.0, 5.0))


def explorer(recorded: Any = lambda: 0, n_envs: int = 1, action: specs.ActionSpec = DISCRETE, **changes: Any) -> Any:
    made = exploration.Explorer(action, n_envs, 0, recorded)
    made.assign(fake_learner.assignment(1, **changes))
    return made


def test_epsilon_falls_linearly_and_counts_the_offset() -> None:
    schedule = exploration.Schedule(1.0, 0.2, 100, offset=50)
    assert schedule.epsilon(np.array([0, 25, 50, 1000])) == pytest.approx([0.6, 0.4, 0.2, 0.2])


def test_the_share_of_random_steps_follows_the_schedule() -> None:
    steps = 0
    made = explorer(lambda: steps, epsilon_start=1.0, epsilon_end=0.1, epsilon_decay_steps=20_000, seed=3)
    explored = []
    while steps < 40_000:
        explored += [a is not None for a in made.draw(made.left)]
        steps = len(explored)
    assert np.mean(explored[:20_000]) == pytest.approx(0.55, abs=0.02)
    assert np.mean(explored[20_000:]) == pytest.approx(0.1, abs=0.02)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_a_row_does_not_depend_on_how_rows_are_grouped(groups: list[int]) -> None:
    changes: dict[str, Any] = {"epsilon_start": 0.5, "epsilon_end": 0.5, "seed": 7, "slot": 1}
    whole, parts = explorer(**changes), explorer(**changes)
    total = sum(groups)
    expected: list[Any] = []
    while len(expected) < total:
        expected += whole.draw(whole.left)
    seen: list[Any] = []
    for group in groups:
        left = group
        while left:
            rows = min(left, parts.left)
            seen += parts.draw(rows)
            left -= rows
    assert seen == expected[:total]


def test_seed_and_slot_decide_and_the_same_assignment_changes_nothing() -> None:
    def rows(**changes: Any) -> list[Any]:
        return list(explorer(epsilon_start=1.0, epsilon_end=1.0, **changes).draw(100))

    assert rows(seed=1) == rows(seed=1)
    assert rows(seed=1) != rows(seed=2)
    assert rows(seed=1, slot=0) != rows(seed=1, slot=1)

    again = explorer(epsilon_start=1.0, epsilon_end=1.0, seed=1)
    first = list(again.draw(40))
    again.assign(fake_learner.assignment(1, epsilon_start=1.0, epsilon_end=1.0, seed=1, steps_granted=9))
    assert first + list(again.draw(60)) == rows(seed=1)


def test_without_an_assignment_nothing_is_explored() -> None:
    made = exploration.Explorer(DISCRETE, 1, 0, lambda: 0)
    assert set(made.draw(made.left)) == {None}


def test_random_actions_are_uniform_and_inside_the_bounds() -> None:
    made = explorer()
    counts = np.bincount([a for _ in range(20) for a in made.draw_random(made.left)], minlength=3)
    assert counts / counts.sum() == pytest.approx([1 / 3] * 3, abs=0.03)

    several = explorer(n_envs=5, action=CONTINUOUS)
    values = np.stack(several.draw_random(several.left))
    assert values.shape == (exploration.BLOCK, 5, 2)
    assert values.dtype == np.float32
    assert values.min((0, 1)) == pytest.approx([-1, 0], abs=0.1)
    assert values.max((0, 1)) == pytest.approx([1, 5], abs=0.1)


def test_several_environments_explore_in_the_same_steps() -> None:
    made = explorer(n_envs=4, epsilon_start=0.3, epsilon_end=0.3)
    rows = made.draw(made.left)
    drawn = [row for row in rows if row is not None]
    assert 0.2 < len(drawn) / len(rows) < 0.4
    assert all(row.shape == (4,) for row in drawn)
    assert len({tuple(row) for row in drawn}) > 10


def noise(correlation_steps: float, rows: int = 20 * exploration.BLOCK, n_envs: int = 2) -> Any:
    made = explorer(n_envs=n_envs, action=CONTINUOUS, noise_std=0.5, noise_correlation_steps=correlation_steps)
    seen: list[Any] = []
    while len(seen) < rows:
        drawn, block = made.draw_perturbed(made.left)
        assert set(drawn) == {None}
        seen += block
    return np.stack(seen)


@pytest.mark.parametrize(("steps", "tolerance"), [(0.0, 0.03), (5.0, 0.06)])
def test_noise_has_the_deviation_asked_for_and_forgets_itself_in_time(steps: float, tolerance: float) -> None:
    seen = noise(steps)
    assert seen.shape[1:] == (2, 2)
    # Half the ranges are 1 and 2.5
    assert seen.std((0, 1)) == pytest.approx([0.5, 1.25], rel=tolerance)
    for lag in (1, 4):
        expected = np.exp(-lag / steps) if steps else 0.0
        for env in range(2):
            correlation = np.corrcoef(seen[:-lag, env, 0], seen[lag:, env, 0])[0, 1]
            assert correlation == pytest.approx(expected, abs=tolerance)
    assert abs(np.corrcoef(seen[:, 0, 0], seen[:, 1, 0])[0, 1]) < tolerance, "each environment has its own"


def test_rows_that_explore_anyway_get_no_noise_and_the_others_keep_theirs() -> None:
    changes: dict[str, Any] = {"action": CONTINUOUS, "noise_std": 0.5, "noise_correlation_steps": 3.0, "seed": 2}
    _, every = explorer(**changes).draw_perturbed(200)
    drawn, kept = explorer(**changes, epsilon_start=0.5, epsilon_end=0.5).draw_perturbed(200)
    asked = [n for n, action in zip(every, drawn, strict=True) if action is None]
    assert 60 < len(asked) < 140
    np.testing.assert_array_equal(np.stack(asked), np.stack(kept))


def test_without_deviation_nothing_is_perturbed() -> None:
    assert not explorer(action=CONTINUOUS, noise_correlation_steps=5.0).perturbs
    assert explorer(action=CONTINUOUS, noise_std=0.1).perturbs


@pytest.mark.parametrize(
    ("choices", "n_envs"), [(2, 1), (4096, 1), (64, 16), pytest.param(4096, 16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("head", ["categorical", "gaussian"])
def test_noise_is_a_blocks_whatever_part_of_it_is_drawn_at_once(choices: int, n_envs: int, head: Any) -> None:
    action = specs.ActionSpec("discrete", n=choices)
    made, rng = exploration.Explorer(action, n_envs, 5, lambda: 0), np.random.default_rng(0)
    whole = draws.sampling(5, 0, 0, action, n_envs, head)[:64]
    made.draw_random(3)  # before the first policy
    seen = [whole[:3]]
    while sum(map(len, seen)) < 64:
        rows = min(int(rng.integers(1, 20)), made.left, made.noise_left)
        drawn = made.draw_noise(rows, head)
        assert drawn.nbytes <= max(1 << 17, 4 * drawn[:1].nbytes), "a burst waits for no more"
        unused = int(rng.integers(0, rows))
        made.give_back(unused)
        seen.append(drawn[: rows - unused].copy())
    np.testing.assert_array_equal(np.concatenate(seen)[:64], whole)


def test_each_block_has_noise_of_its_own() -> None:
    made, found = exploration.Explorer(DISCRETE, 1, 5, lambda: 0), []
    for _ in range(2):
        found.append(made.draw_noise(made.noise_left, "categorical"))
        assert made.left == exploration.BLOCK
    for block in range(2):
        np.testing.assert_array_equal(found[block], draws.sampling(5, 0, block, DISCRETE, 1, "categorical"))
