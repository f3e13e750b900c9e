"""Gradient updates: a call of several at a time on batches from replay, and what comes of it."""

from __future__ import annotations

import gc

import numpy as np

from broker.program import stopwatch
from learner import algorithms, config
from learner.experience import rate_limiter, replay

NORMALIZER_OBSERVATIONS = 1024
CALL_NUMBERS = 4_000_000  # observed, in one call of updates: convolutions take seconds, and no call can be ended


def updates_per_call(settings: config.AlgorithmConfig, observation_size: int) -> int:
    """Returns how many updates one call makes: as many as is set, or fewer of large observations."""
    return max(1, min(settings.updates_per_call, CALL_NUMBERS // (settings.batch_size * observation_size)))


class Updater:
    """Draws batches, and takes note of what updates with them computed.

    Args:
        settings: Batches.
        per_call: Updates that one call makes.
        algorithm: Computes.
        buffer: Replay.
        limiter: Says whether samples may be drawn.
        rng: Draws.

    Attributes:
        call_s: The seconds that the newest call took; 0 before the second one, since the first one compiles.
        times: `sample`: drawing batches, and new priorities; `update`: what the other thread computes. By updates.
    """

    def __init__(
        self,
        settings: config.AlgorithmConfig,
        per_call: int,
        algorithm: algorithms.Algorithm,
        buffer: replay.Replay,
        limiter: rate_limiter.RateLimiter,
        rng: np.random.Generator,
    ) -> None:
        self._batch_size, self._per_call = settings.batch_size, per_call
        self._algorithm, self._replay, self._limiter, self._rng = algorithm, buffer, limiter, rng
        self._metrics: dict[str, float] = {}
        self.call_s = 0.0
        self.times = stopwatch.Stopwatch("sample", "update")

    @property
    def may_update(self) -> bool:
        """Returns whether there are transitions, and samples may be drawn now."""
        return len(self._replay) > 0 and self._limiter.may_sample(self._samples)

    @property
    def work(self) -> str:
        """One call of updates, for people."""
        return f"{self._per_call} gradient steps of {self._batch_size} transitions to compute"

    def draw(self) -> replay.Batch:
        """Returns the batch of the next call; the first one sets how observations are normalized."""
        if self._algorithm.updates == 0:
            self._algorithm.normalize(self._replay.observations(NORMALIZER_OBSERVATIONS, self._rng))
        with self.times.time("sample", self._per_call):
            batch = self._replay.sample(self._per_call, self._batch_size, self._rng)
        self._limiter.sample(self._samples)
        return batch

    def compute(self, batch: replay.Batch) -> algorithms.Update:
        """Makes the updates of one call; on whatever thread."""
        with self.times.time("update", self._per_call):
            return self._algorithm.update(batch)

    def note(self, batch: replay.Batch, update: algorithms.Update, seconds: float) -> None:
        """Takes note of a call that computed finite numbers.

        Args:
            batch: Its batch.
            update: What it computed.
            seconds: How long it took.
        """
        with self.times.time("sample", 0):
            self._replay.update_priorities(batch.ids, update.td_error)
        if self._metrics:
            self.call_s = seconds
            self._limiter.took(self._samples, seconds)
        else:  # the first one compiled. All that stays: Python need not look through it for garbage again
            gc.freeze()
        self._metrics = update.metrics

    @property
    def _samples(self) -> int:
        return self._batch_size * self._per_call

    def metrics(self) -> dict[str, float]:
        """Returns what the newest call said, for a row of metrics."""
        return self._metrics
