"""The first steps of a run: where they come slowly, learning begins with fewer than was planned."""

from __future__ import annotations

import logging
import math

from learner import config
from learner.experience import rate_limiter
from learner.run.reports import notices

_log = logging.getLogger(__name__)
ENOUGH_BATCHES = 2  # to begin with, where steps come slowly


class FirstSteps:
    """Watches the steps that are gathered before the first update.

    Args:
        settings: When learning may begin.
        batch_size: Transitions of a batch.
        limiter: Counts steps.
    """

    def __init__(self, settings: config.TrainConfig, batch_size: int, limiter: rate_limiter.RateLimiter) -> None:
        self._settings, self._batch_size, self._limiter = settings, batch_size, limiter
        self._began: tuple[float, int] | None = None  # when the first steps had come, and how many

    @property
    def are_complete(self) -> bool:
        """Returns whether enough steps came for learning to begin."""
        return self._limiter.inserted >= self._limiter.min_size

    def begin_early(self, now_s: float) -> None:
        """Lets learning begin with fewer steps than was planned, where they come slowly."""
        limiter = self._limiter
        if limiter.sampled or not limiter.inserted or self.are_complete:
            return
        if self._began is None:
            self._began = now_s, limiter.inserted
        if self._settings.deterministic or self._early_s(now_s) > 0:
            return
        _log.info(
            "learning begins with %s steps instead of %s, because they come slowly; --learning-starts N holds to N",
            f"{limiter.inserted:,}",
            f"{limiter.min_size:,}",
        )
        limiter.begin()

    def describe(self, now_s: float) -> str:
        """Returns how many came, and how long learning waits for the others, for people."""
        rate = self._steps_per_s(now_s)
        whole_s = (self._limiter.min_size - self._limiter.inserted) / rate if rate else math.inf
        early_s = math.inf if self._settings.deterministic else self._early_s(now_s)
        fewer = ", and begins with fewer" if early_s < whole_s else ""
        return (
            f"gathering: {self._limiter.inserted:,} of {self._limiter.min_size:,} first steps; learning waits for "
            f"{notices.duration(min(whole_s, early_s))}{fewer}; --learning-starts N begins earlier"
        )

    def _steps_per_s(self, now_s: float) -> float:
        since_s, steps = self._began or (now_s, 0)
        return (self._limiter.inserted - steps) / max(1e-9, now_s - since_s)

    def _early_s(self, now_s: float) -> float:
        """Returns the seconds until learning may begin with fewer steps than was planned; inf if it never may."""
        if not self._settings.learning_starts_s or self._began is None:
            return math.inf
        missing = ENOUGH_BATCHES * self._batch_size - self._limiter.inserted
        rate = self._steps_per_s(now_s)
        wait_s = 0.0 if missing <= 0 else missing / rate if rate else math.inf
        return max(wait_s, self._began[0] + self._settings.learning_starts_s - now_s)
