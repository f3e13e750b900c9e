"""Keeps the learner's samples in proportion to the transitions that actors insert; bounds how far either runs ahead.

The arithmetic of Reverb's SampleToInsertRatio (https://github.com/google-deepmind/reverb, rate_limiter.cc), as a class
without threads: with D = inserted * samples_per_insert - sampled, the learner keeps D near its target
min_size * samples_per_insert, within +- error_buffer. It waits below that band, and the fleet is granted no steps
beyond it. Either side may be given more room, where grants have to last.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from broker.contract import errors

_SMOOTHING = 0.1


class RateLimiter:
    """Counts inserts and samples; says who may go on.

    Args:
        samples_per_insert: Times that a transition is sampled, on average.
        min_size: Transitions in replay before the first sample.
        error_buffer: Samples by which D may leave its target on either side. At least what one `sample` or one
            message brings, else both sides wait for each other.
    """

    def __init__(self, samples_per_insert: float, min_size: int, error_buffer: float) -> None:
        if samples_per_insert <= 0 or min_size < 1 or error_buffer < max(1.0, samples_per_insert):
            raise errors.ConfigError(
                f"samples_per_insert {samples_per_insert}, min_size {min_size} and error_buffer {error_buffer} "
                "leave no step that either side may take",
                todo="use samples_per_insert > 0, min_size >= 1, error_buffer >= max(1, samples_per_insert)",
            )
        self.samples_per_insert = samples_per_insert
        self.min_size = min_size
        self._error_buffer = self._sampled_buffer = self._inserted_buffer = error_buffer
        self._samples_per_s = 0.0  # when it need not wait
        self.inserted = 0
        self.sampled = 0

    def took(self, transitions: int, seconds: float) -> None:
        """Learns from a call that sampled so many how fast the learner can go."""
        per_s = transitions / seconds
        self._samples_per_s += (per_s - self._samples_per_s) * (_SMOOTHING if self._samples_per_s else 1.0)

    def widen(self, seconds: float, inserted_per_s: float) -> None:
        """Lets each side run so far ahead as the other one gets in that time, and by `error_buffer` at least.

        The learner by what is inserted: by its own pace it could run ahead the further the faster it runs, without end.
        The fleet by what the learner could sample: a learner that waits for the fleet must not slow it down.
        """
        self._sampled_buffer = max(self._error_buffer, seconds * inserted_per_s * self.samples_per_insert)
        self._inserted_buffer = max(self._error_buffer, seconds * self._samples_per_s)

    def set_inserted(self, transitions: int) -> None:
        """Takes over the count of transitions that entered replay so far."""
        self.inserted = transitions

    def insert(self, transitions: int) -> None:
        """Counts transitions that entered replay."""
        self.inserted += transitions

    def sample(self, transitions: int) -> None:
        """Counts transitions that were drawn from replay."""
        self.sampled += transitions

    def may_sample(self, transitions: int) -> bool:
        """Returns whether that many may be drawn now without running ahead of the actors."""
        if self.inserted < self.min_size:
            return False
        lead = self.inserted * self.samples_per_insert - (self.sampled + transitions)
        return lead >= self._target - self._sampled_buffer

    def begin(self) -> None:
        """Lets sampling begin with what was inserted, though it is less than `min_size`."""
        self.min_size = max(1, min(self.min_size, self.inserted))

    def steps_granted(self) -> int:
        """Returns the transitions that the fleet may have inserted since the start, so that the learner can keep up.

        Falls only when `widen` narrows it, and never lies below what `may_sample` needs to go on, if `error_buffer`
        covers one `sample`.
        """
        steps = math.floor((self.sampled + self._target + self._inserted_buffer) / self.samples_per_insert)
        return max(self.min_size, steps)

    @property
    def _target(self) -> float:
        return self.min_size * self.samples_per_insert

    def state(self) -> dict[str, int]:
        """Returns the counters, for a checkpoint."""
        return {"inserted": self.inserted, "sampled": self.sampled, "min_size": self.min_size}

    def restore(self, state: dict[str, int]) -> None:
        """Takes the counters of `state()` back; and `min_size` where sampling has begun with fewer."""
        if state["sampled"]:
            self.min_size = min(self.min_size, int(state.get("min_size", self.min_size)))
        self.inserted, self.sampled = int(state["inserted"]), int(state["sampled"])


class PhaseLimiter(RateLimiter):
    """Grants the steps of one phase after another, where each step is learned from in one phase only.

    While the learner computes with one phase, the fleet may gather the next, and no more.

    Args:
        first_steps: Steps of random actions before the first policy.
        phase_steps: Steps of a phase.
        waiting: Returns how many of the inserted steps still wait for their phase.
    """

    def __init__(self, first_steps: int, phase_steps: int, waiting: Callable[[], int]) -> None:
        super().__init__(1.0, first_steps, float(phase_steps))
        self._phase_steps, self._waiting = phase_steps, waiting

    def steps_granted(self) -> int:
        """Returns the transitions that the fleet may have inserted since the start: until a phase waits."""
        left = self.inserted - self._waiting()
        return max(self.min_size, left + self._phase_steps) if left else self.min_size
