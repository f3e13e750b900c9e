"""How training is going: counts of episodes and policy lag, and the row of metrics made from them once a second."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from broker import messages

if TYPE_CHECKING:
    from learner import training_loop

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

    def row(self, loop: training_loop.TrainingLoop) -> dict[str, float] | None:
        """The metrics of now, if a row is due."""
        elapsed = time.monotonic() - self._at
        if elapsed < PERIOD_S:
            return None
        updates, env_steps = loop.algorithm.updates, loop.env_steps
        self.updates_per_s = (updates - self._updates) / elapsed
        self.env_steps_per_s = (env_steps - self._env_steps) / elapsed
        row: dict[str, float] = {
            "env_steps": env_steps,
            "updates": updates,
            "episodes": self.episodes,
            "updates_per_s": self.updates_per_s,
            "env_steps_per_s": self.env_steps_per_s,
            "samples_per_insert": loop.limiter.sampled / max(1, env_steps),
            "epsilon": loop.epsilon,
            "policy_version": loop.publisher.version,
            "policies_held_back": sum(loop.publisher.held_back.values()),
            "actors_live": len(loop.roster.working()),
            "messages": loop.ingest.messages,
            "messages_refused": sum(loop.ingest.refused.values()) + sum(loop.session.refused.values()),
            "steps_refused": loop.ingest.steps_refused,
            "steps_missed": loop.ingest.steps_missed,
            "env_failures": loop.notices.env_failures,
            "steps_quarantined": loop.recovery.steps_quarantined,
            "recoveries": loop.recovery.recoveries,
            "writes_failed": sum(loop.records.failed.values()),
            "bytes_received": loop.session.brokers.bytes_received,
            "bytes_sent": loop.session.brokers.bytes_sent,
            **loop.update_metrics,
        }
        if self.returns:
            row["return_mean"] = float(np.mean(self.returns))
        if self.lag_mean is not None:
            row["policy_lag_mean"] = self.lag_mean
        timings, traffic = loop.publisher.timings, loop.publisher.channel.traffic
        row |= {
            "keyframes": traffic.keyframes,
            "keyframe_bytes": traffic.keyframe_bytes,
            "deltas": traffic.deltas,
            "delta_bytes": traffic.delta_bytes,
        }
        for name in ("calibrate_ms", "quantize_ms", "gate_ms", "delta_ms", "send_ms"):
            if stage := getattr(timings, name):
                row[name] = stage[-1]
        if timings.acting_ms:
            row["publish_to_acting_ms"] = timings.acting_ms[-1]
        if loop.publisher.newest is not None:
            row |= {f"gate_{name}": value for name, value in loop.publisher.newest.verdict.measures.items()}
        if loop.last_score is not None:
            row["published_return_mean"] = loop.last_score.mean("published")
        self.restart_rates(updates, env_steps)
        return row
