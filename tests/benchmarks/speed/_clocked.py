"""An environment with 24 inputs and 6 actions that costs almost nothing and clocks its own steps. Actors load it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

EPISODE_STEPS = 200
NOTED_S = 0.0005
"""Gaps between two steps that are longer are noted."""


class Clocked(gymnasium.Env[Any, Any]):
    """Walks through a table of random observations.

    Args:
        log: File for `[monotonic time, seconds]` of every long gap, written when it is closed.
    """

    observation_space: gymnasium.spaces.Space[Any] = gymnasium.spaces.Box(-10.0, 10.0, (24,), np.float32)
    action_space = gymnasium.spaces.Discrete(6)

    def __init__(self, log: str) -> None:
        self._log = Path(log)
        self._table = list(np.random.default_rng(0).standard_normal((4096, 24), np.float32))
        self._at = self._step = 0
        self._last = time.monotonic()
        self._gaps: list[tuple[float, float]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._step = 0
        return self._table[self._at], {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        now = time.monotonic()
        if now - self._last > NOTED_S:
            self._gaps.append((now, now - self._last))
        self._last = now
        self._step += 1
        self._at = (self._at + 1 + action) % len(self._table)
        return self._table[self._at], float(action), False, self._step == EPISODE_STEPS, {}

    def close(self) -> None:
        self._log.write_text(json.dumps(self._gaps))
