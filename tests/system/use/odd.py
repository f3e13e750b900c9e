"""Environments as people have them: whose episodes never end, that fail now and then, that take continuous actions."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np


class Endless(gymnasium.Env[Any, Any]):
    """Its episodes never end."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space: gymnasium.spaces.Space[Any] = gymnasium.spaces.Discrete(2)
    taken = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken += 1
        return self.observation_space.sample(), 1.0, False, False, {}


class Rickety(Endless):
    """Slow, and it fails at every tenth step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.05)
        if self.taken == 9:
            raise OSError("the wheel came off")
        return super().step(action)


class Continuous(Endless):
    """Takes continuous actions, for ten steps."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:2], self.taken % 10 == 0, False, {}
