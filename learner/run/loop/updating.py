"""Gradient updates: a call of several at a time on batches from replay, or on a phase, and what comes of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker.contract import messages
from broker.program import stopwatch
from learner import algorithms, config
from learner.experience import rate_limiter
from learner.experience.buffers import memory, replay, rollouts

NORMALIZER_OBSERVATIONS = 1024
CALL_NUMBERS = 4_000_000  # observed, in one call of updates: convolutions take seconds, and no call can be ended


_B = TypeVar("_B", bound=memory.Batch)


def updates_per_call(settings: config.OffPolicyConfig, observation_size: int) -> int:
    """Returns how many updates one call makes: as many as is set, or fewer of large observations."""
    return max(1, min(settings.updates_per_call, CALL_NUMBERS // (settings.batch_size * observation_size)))


class Updater(Generic[_B]):
    """Draws batches, and takes note of what updates with them computed.

    Args:
        batch_size: Transitions of a minibatch.
        per_call: Updates that one call makes.
        algorithm: Computes.
        limiter: Counts samples.
        rng: Draws.

    Attributes:
        call_s: The seconds that the newest call took; 0 before the second one, since the first one compiles.
        times: `sample`: drawing batches, and new priorities; `update`: what the other thread computes. By updates.
    """

    def __init__(
        self,
        batch_size: int,
        per_call: int,
        algorithm: algorithms.Algorithm,
        limiter: rate_limiter.RateLimiter,
        rng: np.random.Generator,
    ) -> None:
        self._batch_size, self._per_call = batch_size, per_call
        self._algorithm, self._limiter, self._rng = algorithm, limiter, rng
        self._metrics: dict[str, float] = {}
        self.call_s = 0.0
        self.times = stopwatch.Stopwatch("sample", "update")

    @property
    def may_update(self) -> bool:
        """Returns whether there is a batch for a call of updates now."""
        raise NotImplementedError

    @property
    def awaits_policy(self) -> bool:
        """Returns whether a policy has to act before there is anything to learn from, and none of this session does."""
        return False

    def begin(self) -> None:
        """Makes ready for that policy."""

    @property
    def work(self) -> str:
        """One call of updates, for people."""
        return f"{self._per_call} gradient steps of {self._batch_size} transitions to compute"

    def draw(self) -> _B:
        """Returns the batch of the next call."""
        raise NotImplementedError

    def compute(self, batch: _B) -> algorithms.Update:
        """Makes the updates of one call; on whatever thread."""
        with self.times.time("update", self._per_call):
            return self._algorithm.update(batch)

    def note(self, batch: _B, update: algorithms.Update, seconds: float) -> None:
        """Takes note of a call that computed finite numbers.

        Args:
            batch: Its batch.
            update: What it computed.
            seconds: How long it took.
        """
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

    def summary(self) -> dict[str, float]:
        """Returns the counts of steps that nothing was learned from, for the summary; replay passes over none."""
        return {"steps_stale": 0, "steps_unsampled": 0}


class Sampled(memory.Observed, Protocol):
    """Replay, here or in workers; see `replay.Replay` for each of these."""

    def __len__(self) -> int: ...

    def sample(self, k: int, b: int, rng: np.random.Generator) -> replay.Batch: ...

    def update_priorities(self, ids: NDArray[np.int64], td_error: NDArray[np.float32]) -> None: ...


class ReplayUpdater(Updater[replay.Batch]):
    """Learns from transitions that are drawn from replay, many times each.

    Args:
        settings: Batches.
        per_call: Updates that one call makes.
        algorithm: Computes.
        buffer: Replay.
        limiter: Says whether samples may be drawn.
        rng: Draws.
    """

    def __init__(
        self,
        settings: config.OffPolicyConfig,
        per_call: int,
        algorithm: algorithms.Algorithm,
        buffer: Sampled,
        limiter: rate_limiter.RateLimiter,
        rng: np.random.Generator,
    ) -> None:
        super().__init__(settings.batch_size, per_call, algorithm, limiter, rng)
        self._replay = buffer

    @property
    def may_update(self) -> bool:
        """Returns whether there are transitions, and samples may be drawn now."""
        return len(self._replay) > 0 and self._limiter.may_sample(self._samples)

    def draw(self) -> replay.Batch:
        """Returns the batch of the next call; the first one sets how observations are normalized."""
        if self._algorithm.updates == 0:
            self._algorithm.normalize(self._replay.observations(NORMALIZER_OBSERVATIONS, self._rng))
        with self.times.time("sample", self._per_call):
            batch = self._replay.sample(self._per_call, self._batch_size, self._rng)
        self._limiter.sample(self._samples)
        return batch

    def note(self, batch: replay.Batch, update: algorithms.Update, seconds: float) -> None:
        with self.times.time("sample", 0):
            self._replay.update_priorities(batch.ids, update.td_error)
        super().note(batch, update, seconds)


class PhaseUpdater(Updater[rollouts.Phase]):
    """Learns from each step in one phase.

    Args:
        settings: Phases.
        algorithm: Computes.
        buffer: Steps that wait.
        limiter: Counts them.
        rng: Shuffles.
        newest: Returns the newest policy of this session; None where none went out.
    """

    def __init__(
        self,
        settings: config.OnPolicyConfig,
        algorithm: algorithms.Algorithm,
        buffer: rollouts.Rollouts,
        limiter: rate_limiter.RateLimiter,
        rng: np.random.Generator,
        newest: Callable[[], messages.Order | None],
    ) -> None:
        super().__init__(settings.batch_size, settings.updates_per_phase, algorithm, limiter, rng)
        self._settings, self._rollouts, self._newest = settings, buffer, newest

    @property
    def may_update(self) -> bool:
        """Returns whether enough steps of policies that are new enough wait."""
        newest = self._newest()
        steps = self._settings.rollout_steps
        return newest is not None and self._rollouts.usable(newest, steps) >= steps

    @property
    def awaits_policy(self) -> bool:
        """Returns whether none went out, and there are observations to make one with."""
        return self._newest() is None and len(self._rollouts) > 0

    def begin(self) -> None:
        """Normalises observations, where no update did, and passes over what waits: random steps, or older ones."""
        if self._algorithm.updates == 0:
            self._algorithm.normalize(self._rollouts.observations(self._rollouts.capacity, self._rng))
        self._rollouts.usable(messages.Order(0, 0))

    def draw(self) -> rollouts.Phase:
        """Returns the next phase."""
        settings, newest = self._settings, self._newest()
        assert newest is not None
        with self.times.time("sample", self._per_call):
            phase = self._rollouts.draw(settings.rollout_steps, settings.epochs, settings.batch_size, newest, self._rng)
        self._limiter.sample(settings.rollout_steps)
        return phase

    def metrics(self) -> dict[str, float]:
        return self._metrics | self._rollouts.metrics()

    def summary(self) -> dict[str, float]:
        return self._rollouts.metrics()
