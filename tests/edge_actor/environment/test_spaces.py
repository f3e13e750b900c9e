"""Any space of Gymnasium's: acted in by an actor's own loop, or refused by its name before the first step."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from broker.contract import errors
from edge_actor.acting import exploration, rollout
from edge_actor.environment import env
from edge_actor.experience import trajectory
from tests.fakes import fake_learner

HERE = __file__
NUMBER = spaces.Box(-1, 1, (1,))
OBSERVED: dict[str, tuple[spaces.Space[Any], str]] = {
    "dict": (spaces.Dict(a=spaces.Discrete(3), b=spaces.Dict(c=NUMBER, d=spaces.MultiBinary(2))), "float32[6]"),
    "tuple": (spaces.Tuple((spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 3]))), "float32[8]"),
    "discrete": (spaces.Discrete(4, start=-1), "float32[4]"),
    "multidiscrete": (spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])), "float32[14]"),
    "multibinary": (spaces.MultiBinary((2, 2)), "float32[4]"),
    "number": (spaces.Box(0, 1, ()), "float32[1]"),
    "integers": (spaces.Box(-5, 5, (2, 2), np.int16), "float32[2,2]"),
    "double": (spaces.Box(-1, 1, (3,), np.float64), "float32[3]"),
    "ram": (spaces.Box(0, 255, (128,), np.uint8), "uint8[128]"),
    "gray": (spaces.Box(0, 255, (9, 8), np.uint8), "uint8[9,8,1]"),
    "planes": (spaces.Box(0, 1, (5, 4, 2), np.bool_), "uint8[5,4,2]"),
    "image beside numbers": (spaces.Dict(i=spaces.Box(0, 255, (8, 8, 3), np.uint8), v=NUMBER), "float32[193]"),
}
TAKEN: dict[str, tuple[spaces.Space[Any], str]] = {
    "from 2": (spaces.Discrete(3, start=2), "3 actions"),
    "multidiscrete": (spaces.MultiDiscrete([2, 3]), "6 actions"),
    "multibinary": (spaces.MultiBinary(10), "1024 actions"),
    "integers": (spaces.Box(0, 2, (2,), np.int64), "9 actions"),
    "dict of choices": (spaces.Dict(a=spaces.Discrete(2), b=spaces.MultiBinary(2)), "8 actions"),
    "many combinations": (spaces.MultiDiscrete([100, 4, 3]), "3 choices of 3 to 100"),
    "many buttons": (spaces.MultiBinary((4, 4)), "16 choices of 2"),
    "many of each": (
        spaces.Tuple((spaces.Discrete(30, start=-4), spaces.Box(0, 9, (2,), np.int8))),
        "3 choices of 10 to 30",
    ),
    "tuple of floats": (spaces.Tuple((NUMBER, spaces.Box(0, 2, (2, 2)))), "continuous[5]"),
    "double": (spaces.Box(-1, 1, (2,), np.float64), "continuous[2]"),
}
REFUSED: dict[str, tuple[spaces.Space[Any], spaces.Space[Any], str]] = {
    "text": (spaces.Text(4), NUMBER, "observation space Text"),
    "sequence": (spaces.Sequence(NUMBER), NUMBER, "observation space Sequence"),
    "graph": (spaces.Graph(NUMBER, None), NUMBER, "observation space Graph"),
    "one of": (spaces.OneOf([NUMBER, NUMBER]), NUMBER, "observation space OneOf"),
    "member": (spaces.Tuple((NUMBER, spaces.Dict(m=spaces.Text(3)))), NUMBER, r"member \[1\]\['m'\] is a Text"),
    "no members": (spaces.Dict(), NUMBER, "the observation is a Dict without members"),
    "no members within": (spaces.Dict(a=NUMBER, t=spaces.Tuple(())), NUMBER, r"member \['t'\] that is a Tuple without"),
    "too many": (NUMBER, spaces.MultiDiscrete([4000, 100]), "action space MultiDiscrete has 2 parts of 4100 choices"),
    "mixed": (NUMBER, spaces.Tuple((NUMBER, spaces.Discrete(2))), r"Tuple with the part \[0\], a Box"),
    "one choice": (NUMBER, spaces.MultiDiscrete([1, 1]), "2 to 65536 choices, not 1"),
    "no bounds": (NUMBER, spaces.Box(-np.inf, np.inf, (2,)), "bounds must be finite"),
    "taken sequence": (NUMBER, spaces.Sequence(NUMBER), "action space Sequence"),
}


class Sampled(gymnasium.Env[Any, Any]):
    """Observes what its space samples; takes nothing that is not in its space."""

    def __init__(self, observed: str = "", taken: str = "", refused: str = "") -> None:
        self.observation_space = OBSERVED[observed][0] if observed else NUMBER
        self.action_space = TAKEN[taken][0] if taken else spaces.Discrete(2)
        if refused:
            self.observation_space, self.action_space, _ = REFUSED[refused]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 0.0, False, False, {}


def describe_acted_in(n_envs: int, **arguments: str) -> str:
    environment = env.make(f"{HERE}:Sampled", n_envs, arguments)
    record = trajectory.Trajectory(environment.spec, n_envs, 20 * n_envs)
    explorer = exploration.Explorer(environment.spec.action, n_envs, 0, lambda: 0)
    explorer.assign(fake_learner.assignment(1, epsilon_start=1.0, epsilon_end=1.0))
    record.start(environment.reset(seed=0)[0])
    while record.used < 20:
        rollout.burst(environment, None, explorer, record, 20 - record.used)
    assert record.flush().steps == 20 * n_envs
    return environment.spec.describe()


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("name", OBSERVED)
def test_observes(name: str, n_envs: int) -> None:
    assert describe_acted_in(n_envs, observed=name) == f"obs {OBSERVED[name][1]} -> 2 actions"


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("name", TAKEN)
def test_takes(name: str, n_envs: int) -> None:
    assert describe_acted_in(n_envs, taken=name) == f"obs float32[1] -> {TAKEN[name][1]}"


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name_with_what_to_do(name: str, n_envs: int) -> None:
    with pytest.raises(errors.SpecError, match=REFUSED[name][2]) as caught:
        env.make(f"{HERE}:Sampled", n_envs, {"refused": name})
    assert caught.value.where


def test_planes_are_bytes_of_0_and_255() -> None:
    environment = env.make(f"{HERE}:Sampled", 1, {"observed": "planes"})
    assert set(np.unique(environment.reset(seed=0)[0]).tolist()) == {0, 255}
