"""Action spaces that have no place of their own on the wire: one choice among combinations, or one Box of floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from broker.contract import errors, specs
from edge_actor.environment import env
from tests.fakes.environments import toys

FACTORED = {"panel": (5, 7, 3, 16), "keys": (2,) * 12, "robot": (40, 2, 2, 13, 13)}
COUNTS = {"multi": 6, "grid": 12, "buttons": 16, "steps": 9, "pair": 12, "named": 12}
pytestmark = pytest.mark.fault(29)


def made(kind: str, n_envs: int = 1) -> env.Environment:
    return env.make(f"{toys.__file__}:Taker", n_envs, {"kind": kind})


def plain(action: Any) -> Any:
    """An action as something that can be compared."""
    if isinstance(action, dict):
        return tuple((key, plain(part)) for key, part in action.items())
    if isinstance(action, tuple):
        return tuple(plain(part) for part in action)
    return tuple(np.ravel(action).tolist())


@pytest.mark.parametrize(("kind", "count"), COUNTS.items())
def test_each_combination_is_one_choice(kind: str, count: int) -> None:
    environment, space = made(kind), toys.ACTIONS[kind]
    assert environment.spec.action == specs.ActionSpec("discrete", n=count)
    environment.reset()
    for _ in range(2):  # whatever the environment does to what it was given
        actions = [environment.to_env(choice) for choice in range(count)]
        assert all(space.contains(action) for action in actions)
        assert len({plain(action) for action in actions}) == count
        for action in actions:
            environment.step(action)


@pytest.mark.parametrize("kind", COUNTS)
def test_several_environments_take_the_same(kind: str) -> None:
    one, three = made(kind), made(kind, 3)
    assert one.spec == three.spec
    three.reset()
    robots = [member.unwrapped for member in three.step.__self__.envs]  # type: ignore[attr-defined]
    chosen = np.array([0, COUNTS[kind] - 1, 1])
    three.step(three.to_env(chosen))
    for robot, choice in zip(robots, chosen.tolist(), strict=True):
        assert plain(robot.taken[-1]) == plain(one.to_env(choice))


def test_the_last_part_changes_fastest() -> None:
    to_env = made("multi").to_env
    assert [to_env(choice).tolist() for choice in range(6)] == [[0, 5], [0, 6], [1, 5], [1, 6], [2, 5], [2, 6]]


@pytest.mark.parametrize(("kind", "size"), [("floats", 5), ("angle", 1)])
def test_floats_are_joined_and_clipped(kind: str, size: int) -> None:
    space = toys.ACTIONS[kind]
    one, two = made(kind), made(kind, 2)
    assert one.spec == two.spec
    assert one.spec.action.shape == (size,)
    far = np.full(size, 9.0, np.float32)
    action = one.to_env(far)
    assert space.contains(action)
    assert np.array_equal(np.concatenate([np.ravel(part) for part in _floats(action)]), one.spec.action.high)
    one.reset()
    one.step(one.to_env(far))
    two.reset()
    two.step(two.to_env(np.stack([far, -far])))
    robots = [member.unwrapped for member in two.step.__self__.envs]  # type: ignore[attr-defined]
    assert plain(robots[0].taken[-1]) == plain(action)
    assert plain(robots[1].taken[-1]) == plain(one.to_env(-far))


def _floats(action: Any) -> list[Any]:
    if isinstance(action, dict):
        return [leaf for part in action.values() for leaf in _floats(part)]
    return [leaf for part in action for leaf in _floats(part)] if isinstance(action, tuple) else [action]


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([4000, 97]),
        spaces.MultiBinary(20_000),
        spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (3,), np.int64),
    ],
)
def test_too_many_choices_are_refused_with_the_bounds(space: spaces.Space[Any]) -> None:
    with pytest.raises(errors.SpecError, match="choices together, 1024 and 4096 at most"):
        env._action(space, 0)


@pytest.mark.parametrize(("kind", "choices"), FACTORED.items())
def test_many_combinations_are_a_choice_for_each_element(kind: str, choices: tuple[int, ...]) -> None:
    one, three = made(kind), made(kind, 3)
    assert one.spec == three.spec
    assert one.spec.action.choices == choices
    assert one.spec.action.size == sum(choices)
    ends = np.stack([np.zeros(len(choices), int), np.array(choices) - 1, np.arange(len(choices)) % np.array(choices)])
    one.reset()
    actions = [one.to_env(row) for row in ends]
    assert all(toys.ACTIONS[kind].contains(action) for action in actions)
    assert len({plain(action) for action in actions}) == 3
    three.reset()
    three.step(three.to_env(ends))
    robots = [member.unwrapped for member in three.step.__self__.envs]  # type: ignore[attr-defined]
    assert [plain(robot.taken[-1]) for robot in robots] == [plain(action) for action in actions]
    for action in actions:  # last: the environment makes zeros of what it was given
        one.step(action)


def test_the_first_and_last_choices_are_the_ends_of_each_element() -> None:
    to_env = made("panel").to_env
    assert to_env(np.array([0, 0, 0, 0])).tolist() == [0, 2, -1, 0]
    assert to_env(np.array([4, 6, 2, 15])).tolist() == [4, 8, 1, 15]
    robot = made("robot").to_env(np.array([39, 0, 1, 0, 12]))
    assert (robot["arm"][0], robot["arm"][1].tolist(), robot["leg"].tolist()) == (44, [0, 1], [[-3], [9]])
    assert np.ndim(robot["arm"][0]) == 0
    assert hash(robot["arm"][0]) == hash(44), "a number, as environments know it"


def test_an_environment_of_several_choices_is_acted_in() -> None:
    """A random policy reaches every combination."""
    environment = made("multi")
    environment.reset()
    rng = np.random.default_rng(0)
    for choice in rng.integers(environment.spec.action.n, size=200).tolist():
        environment.step(environment.to_env(choice))
    robot: Any = environment.step.__self__.unwrapped  # type: ignore[attr-defined]
    assert len({plain(action) for action in robot.taken}) == math.prod((3, 2))
