"""Environments whose trajectories can be written down by hand."""

from __future__ import annotations

import collections
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Countdown(gymnasium.Env[Any, Any]):
    """Episode k lasts `lengths[k % len]` steps and ends as `ends[k % len]` says: T, or t for truncated.

    Observation is [episode, step], reward of step s is s + 1, plus 100 times the action.
    """

    observation_space: spaces.Space[Any] = spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, lengths: tuple[int, ...] = (3,), ends: str = "T") -> None:
        self.lengths, self.ends = lengths, ends
        self.episode, self.now = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.now = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now += 1
        over = self.now == self.lengths[self.episode % len(self.lengths)]
        how = self.ends[self.episode % len(self.ends)]
        reward = self.now + 100.0 * float(action)
        return np.array([self.episode, self.now], np.float32), reward, over and how == "T", over and how == "t", {}


class Flaky(Countdown):
    """Raises at every `period`-th step of the process."""

    taken = 0

    def __init__(self, period: int = 5) -> None:
        super().__init__((4,))
        self.period = period

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Flaky.taken += 1
        if Flaky.taken % self.period == 0:
            raise OSError("the wheel came off")
        return super().step(action)


class Robot(gymnasium.Env[Any, Any]):
    """Continuous actions in [-1, 2] x [0, 1]; keeps what it was given."""

    observation_space = spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(-1, 1, (2,), np.float64)})
    action_space = spaces.Box(np.array([-1, 0], np.float32), np.array([2, 1], np.float32))

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def _observe(self) -> dict[str, Any]:
        return {"b": 1, "a": np.array([0.25, -0.5])}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        return self._observe(), 0.0, False, False, {}


class Endless(gymnasium.Env[Any, Any]):
    """Its episodes never end; the spec is CartPole's."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.float32), 1.0, False, False, {}


class Text(Robot):
    """Observes what cannot be carried."""

    observation_space = spaces.Text(5)  # type: ignore[assignment]


class ManyActions(Robot):
    """Takes what cannot be carried."""

    action_space = spaces.MultiDiscrete([2, 3])  # type: ignore[assignment]


class Unbounded(Robot):
    """Takes actions of any size."""

    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Ordered(Robot):
    """Observes a Dict whose members have an order of their own."""

    observation_space = spaces.Dict(
        collections.OrderedDict(b=spaces.Discrete(2), a=spaces.Box(-1, 1, (2,), np.float64))
    )


class Broken(Robot):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no such device")


class Offset(Countdown):
    """Actions 5 and 6; an observation of bytes."""

    action_space = spaces.Discrete(2, start=5)
    observation_space = spaces.Box(0, 255, (2, 2), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((2, 2), np.uint8), super().reset(seed=seed)[1]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return np.full((2, 2), action, np.uint8), *super().step(action - 5)[1:]


if "Countdown-v0" not in gymnasium.registry:  # loaded again by tests that name this file
    gymnasium.register("Countdown-v0", Countdown)  # type: ignore[arg-type]  # its protocol demands **kwargs
