"""A tiny environment that only an actor can import: press the button that lights up. Best return is 10."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Stick(gymnasium.Env[Any, Any]):
    """Ten steps; the observation shows which of two buttons is lit, pressing it gives 1."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def _observe(self) -> np.ndarray[Any, Any]:
        self._lit = int(self.np_random.integers(2))
        return np.array([1.0 - 2.0 * self._lit, self._step / 10, 0.5], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._lit)
        self._step += 1
        return self._observe(), reward, self._step == 10, False, {}


gymnasium.register("Stick-v0", Stick)  # type: ignore[arg-type]  # its protocol demands **kwargs
