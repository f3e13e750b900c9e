"""How training is going: counts of episodes and policy lag, and the row of metrics made from them once a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from broker.contract import messages

PERIOD_S = 1.0
RECENT_EPISODES = 100


class Progress:
    """Counts over a session; `episodes` over the whole run."""

    def __init__(self) -> None:
        self.episodes = 0
        self.updates_per_s = self.env_steps_per_s = 0.0  # as the newest row has them
        self.returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._lag_sum = 0
        self._lag_steps = 0
        self._at = time.monotonic()
        self._updates = 0
        self._env_steps = 0

    def count(self, experience: messages.Experience, newest: int | None) -> None:
        """Counts what entered replay.

        Args:
            experience: It.
            newest: Version of the newest policy, or None where the experience is not of this session.
        """
        flags = experience.terminated.tolist(), experience.truncated.tolist()
        for episode_return, terminated, truncated in zip(experience.episode_return.tolist(), *flags, strict=True):
            if terminated or truncated:
                self.episodes += 1
                self.returns.append(episode_return)
        if experience.version and newest is not None:
            self._lag_steps += len(experience.reward)
            self._lag_sum += len(experience.reward) * (newest - experience.version)

    @property
    def lag_mean(self) -> float | None:
        """Versions between the policy that chose a step and the newest one when it arrived; mean over steps."""
        return self._lag_sum / self._lag_steps if self._lag_steps else None

    def restart_rates(self, updates: int, env_steps: int) -> None:
        """Rates of the next row count from here."""
        self._at, self._updates, self._env_steps = time.monotonic(), updates, env_steps

    def row(self, updates: int, env_steps: int, others: Callable[[], dict[str, float]]) -> dict[str, float] | None:
        """Returns the metrics of now, if a row is due.

        Args:
            updates: So many so far.
            env_steps: So many accepted so far.
            others: Asked for what the other stages count, where a row is due.
        """
        elapsed = time.monotonic() - self._at
        if elapsed < PERIOD_S:
            return None
        self.updates_per_s = (updates - self._updates) / elapsed
        self.env_steps_per_s = (env_steps - self._env_steps) / elapsed
        row: dict[str, float] = {
            "env_steps": env_steps,
            "updates": updates,
            "episodes": self.episodes,
            "updates_per_s": self.updates_per_s,
            "env_steps_per_s": self.env_steps_per_s,
            **others(),
        }
        if self.returns:
            row["return_mean"] = float(np.mean(self.returns))
        if self.lag_mean is not None:
            row["policy_lag_mean"] = self.lag_mean
        self.restart_rates(updates, env_steps)
        return row
