"""The progress of training: episodes, policy lag and rates, and when a row of metrics is due."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

import numpy as np

from broker.contract import messages

PERIOD_S = 1.0
RECENT_EPISODES = 100
LAGS_MAX = 1000
"""Policies that are older than that are as old as any."""


class Progress:
    """Counts over a session; `episodes` over the whole run.

    Attributes:
        lags: Steps by how many versions old their policy was.
    """

    def __init__(self) -> None:
        self.episodes = 0
        self.updates_per_s = self.env_steps_per_s = 0.0  # as the newest row has them
        self.returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.lags: Counter[int] = Counter()
        self._lag_sum = 0
        self._lag_steps = 0
        self._at = time.monotonic()
        self._updates = 0
        self._env_steps = 0
        self._first_s = self._last_s = 0.0  # of experience
        self._first_steps = self._steps = 0

    def set_episodes(self, episodes: int) -> None:
        """Takes over the count of episodes of the run so far."""
        self.episodes = episodes

    def count(self, experience: messages.Experience, newest: int | None) -> None:
        """Counts what entered replay.

        Args:
            experience: The message.
            newest: The newest policy version; None where the experience is of an earlier session.
        """
        self._last_s, steps = time.monotonic(), len(experience.reward)
        if not self._steps:
            self._first_s, self._first_steps = self._last_s, steps
        self._steps += steps
        flags = experience.terminated.tolist(), experience.truncated.tolist()
        for episode_return, terminated, truncated in zip(experience.episode_return.tolist(), *flags, strict=True):
            if terminated or truncated:
                self.episodes += 1
                self.returns.append(episode_return)
        if experience.version and newest is not None:
            self._lag_steps += steps
            self.lags[min(newest - experience.version, LAGS_MAX)] += steps
            self._lag_sum += steps * (newest - experience.version)

    @property
    def mean_steps_per_s(self) -> float:
        """Environment steps per second, from the first experience to the last; 0 where there is one at most."""
        took_s = self._last_s - self._first_s
        return (self._steps - self._first_steps) / took_s if took_s > 0 else 0.0

    @property
    def steps(self) -> int:
        """Steps that reached replay in this session."""
        return self._steps

    @property
    def lag_mean(self) -> float | None:
        """The mean, over steps, of the versions between the policy that chose a step and the newest when it arrived."""
        return self._lag_sum / self._lag_steps if self._lag_steps else None

    def summary(self) -> dict[str, Any]:
        """Returns episodes, policy lag, and the steps of this session, for the summary."""
        return {
            "episodes": self.episodes,
            "policy_lag_mean_versions": self.lag_mean,
            "session_env_steps": self.steps,
        }

    def restart_rates(self, updates: int, env_steps: int) -> None:
        """Makes the rates of the next row count from here."""
        self._at, self._updates, self._env_steps = time.monotonic(), updates, env_steps

    def row(self, updates: int, env_steps: int) -> dict[str, float] | None:
        """Returns the progress since the last row, if a row of metrics is due; None otherwise.

        Args:
            updates: Updates so far.
            env_steps: Environment steps that were accepted so far.
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
        }
        if self.returns:
            row["return_mean"] = float(np.mean(self.returns))
        if self.lag_mean is not None:
            row["policy_lag_mean"] = self.lag_mean
        self.restart_rates(updates, env_steps)
        return row
