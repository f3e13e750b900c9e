"""An environment that an owner can put out of order: `--env drifting.py:Sensor --env-kwargs '{"when": "FILE"}'`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

OFFSET = 10.0


class Sensor(gymnasium.Env[Any, Any]):
    """Episodes of ten steps, which return 10 or so whatever is done.

    From the first episode on that finds the file `when`, the sensor of feature 1 is off by OFFSET, and they return 1.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, when: str) -> None:
        self._when = Path(when)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._is_astray = 0, self._when.exists()
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        reward = self.np_random.uniform(0.5, 1.5) * (0.1 if self._is_astray else 1.0)
        return self._observe(), reward, self._step == 10, False, {}

    def _observe(self) -> np.ndarray[Any, Any]:
        seen = self.np_random.uniform(-1.0, 1.0, 3)
        return (seen + [0.0, OFFSET * self._is_astray, 0.0]).astype(np.float32)
