"""The pace of a run: which steps the fleet may record, when the learner may update, and when the budget is spent.

In lock-step the fleet records exactly the steps of one cycle, then the learner makes exactly the updates that they
allow; only whole cycles count, since what has arrived of the next one depends on time.
"""

from __future__ import annotations

import math
import time

from learner import config
from learner.experience import rate_limiter

SCORES_S = 2.5  # two evaluations, and some margin, by what the newest one took
FINAL_SCORE_S = 5.0  # beyond max_wall_s, for the score of the last policy


class Pace:
    """Steps, samples and seconds of a run.

    Args:
        settings: The budget, and whether in lock-step.
        schedule: The schedule of exploration.
        limiter: Counts steps and samples.
        started_s: Monotonic time at which the process began.

    Attributes:
        lockstep_goal: Steps at the end of this cycle.
        end_s: Monotonic time at which training ends; infinite without `max_wall_s`.
    """

    def __init__(
        self,
        settings: config.TrainConfig,
        schedule: config.AlgorithmConfig,
        limiter: rate_limiter.RateLimiter,
        started_s: float,
    ) -> None:
        self._settings, self._schedule = settings, schedule
        self.limiter = limiter
        self.lockstep_goal = settings.learning_starts
        self.end_s = started_s + settings.max_wall_s if settings.max_wall_s else math.inf

    @property
    def env_steps(self) -> int:
        """The environment steps of the fleet that reached replay, over the whole run."""
        return self.limiter.inserted

    @property
    def epsilon(self) -> float:
        """The share of random actions that the schedule sets now."""
        epsilon = self._schedule.epsilon
        done = min(1.0, self.env_steps / max(1, epsilon.decay_steps))
        return epsilon.start + done * (epsilon.end - epsilon.start)

    @property
    def budget_spent(self) -> bool:
        """Returns whether the steps of the budget were recorded."""
        if self._settings.deterministic:
            return self.lockstep_goal > self._settings.max_env_steps
        return self.env_steps >= self._settings.max_env_steps

    @property
    def steps_granted(self) -> int:
        """The steps that the whole fleet may have recorded, over the whole run."""
        if self._settings.deterministic:
            return self.env_steps if self.budget_spent else self.lockstep_goal
        return min(self.limiter.steps_granted(), self._settings.max_env_steps)

    def is_time_up(self, score_s: float, call_s: float) -> bool:
        """Returns whether the time is up, or would be before the next updates had ended.

        Args:
            score_s: Seconds that a score took: what a last one takes is set aside if it is not much.
            call_s: Seconds that a call of updates took.
        """
        last_s = SCORES_S * score_s
        if last_s > 0.25 * self._settings.max_wall_s:
            last_s = 0.0
        return time.monotonic() > self.end_s - max(last_s, call_s - FINAL_SCORE_S)

    def restore(self, lockstep_goal: int) -> None:
        """Goes on in the cycle of lock-step that ends at these steps."""
        self.lockstep_goal = lockstep_goal

    def begin_cycle(self) -> None:
        """Grants the steps of the next cycle of lock-step."""
        if isinstance(self._schedule, config.OnPolicyConfig):
            self.lockstep_goal += self._schedule.rollout_steps
            return
        samples = self._settings.publish_period_updates * self._schedule.batch_size
        self.lockstep_goal += max(1, round(samples / self._settings.samples_per_insert))

    def metrics(self) -> dict[str, float]:
        """Returns samples per transition and epsilon, for a row of metrics."""
        return {"samples_per_insert": self.limiter.sampled / max(1, self.env_steps), "epsilon": self.epsilon}

    def summary(self) -> dict[str, int]:
        """Returns the steps of the run, for the summary."""
        return {"env_steps": self.env_steps}
