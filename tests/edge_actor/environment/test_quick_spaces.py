"""Quick spaces: the answers are Gymnasium's, for what belongs to a space and for what does not."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from edge_actor.environment import env, quick_spaces

NUMBERS: list[Any] = [
    *(kind(value) for kind in (int, np.int64, np.int32, np.int8, np.float64) for value in (-3, -2, -1, 0, 1, 4, 5, 6)),
    *(np.uint8(1), np.uint64(1), True, np.bool_(True), 1.0, None, "1", [1], (1,), np.array(1), np.array([1])),
]
ARRAYS: list[Any] = [
    *(np.array(values) for values in ([0, 1, 4], [0, 1, 5], [-1, 0, 0], [-2, 0, 2], [-3, 0, 0], [0, 1], [[0, 1, 4]])),
    *(np.array([0, 1, 4], kind) for kind in (np.int32, np.uint8, np.float64, bool, object)),
    *([0, 1, 4], (0, 1, 5), None, 1, np.int64(1), np.array([0, 9, 1, 9, 4])[::2], "abc"),
]


class OneStep(gymnasium.Env[Any, Any]):
    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,)), space


def quick(space: spaces.Space[Any]) -> spaces.Space[Any]:
    made = OneStep(space)
    quick_spaces.quicken(gymnasium.wrappers.TimeLimit(made, 5))
    return made.action_space


@pytest.mark.parametrize("start", [0, -2])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_discrete_answers_as_gymnasium(start: int, dtype: Any) -> None:
    plain, space = spaces.Discrete(5, start=start, dtype=dtype), quick(spaces.Discrete(5, start=start, dtype=dtype))
    assert type(space) is quick_spaces.QuickDiscrete
    assert [space.contains(x) for x in NUMBERS] == [plain.contains(x) for x in NUMBERS]
    assert space == plain
    assert space.seed(3) == plain.seed(3)
    assert [space.sample() for _ in range(9)] == [plain.sample() for _ in range(9)]
    again = copy.deepcopy(space)
    assert [again.contains(x) for x in NUMBERS] == [plain.contains(x) for x in NUMBERS]


@pytest.mark.parametrize("start", [0, -2])
def test_multi_discrete_answers_as_gymnasium(start: int) -> None:
    def make() -> spaces.MultiDiscrete:
        return spaces.MultiDiscrete([5] * 3, start=[start] * 3)

    plain, space = make(), quick(make())
    assert type(space) is quick_spaces.QuickMultiDiscrete
    assert [space.contains(x) for x in ARRAYS] == [plain.contains(x) for x in ARRAYS]
    assert space == plain


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete(np.array([[2, 2], [2, 2]])),
        spaces.MultiDiscrete([2, 2], start=[0, 1]),
        spaces.Discrete(1 << 20),
        spaces.Box(-1, 1, (2,)),
        type("Own", (spaces.Discrete,), {"contains": lambda self, x: x == 1})(2),
    ],
)
def test_others_are_left_alone(space: spaces.Space[Any]) -> None:
    before = type(space)
    assert type(quick(space)) is before


@pytest.mark.parametrize(("name", "n_envs"), [("CartPole-v1", 1), ("CartPole-v1", 4), ("Acrobot-v1", 3)])
def test_environments_are_made_with_them(name: str, n_envs: int) -> None:
    made = env.make(name, n_envs)
    wrapper: Any = made.step.__self__  # type: ignore[attr-defined]
    for one in getattr(wrapper, "envs", [wrapper]):
        assert type(one.unwrapped.action_space).__name__.startswith("Quick")
    made.reset(seed=0)
    made.step(made.to_env(0) if n_envs == 1 else np.zeros(n_envs, np.intp))
    with pytest.raises((AssertionError, IndexError)):
        wrapper.step(9 if n_envs == 1 else np.full(n_envs, 9))
    made.close()
