"""Makes messages of steps: when the trajectory is full it becomes a message in the spool; counts on the way."""

from __future__ import annotations

import collections
import random
import time
from typing import Any

from broker.contract import messages
from broker.program import stopwatch
from edge_actor.experience import spool, trajectory

_RETURNS = 20
_PERIOD_S = 1.0  # before the learner says how long


class Recorder:
    """Joins the trajectory and the spool of one boot, and counts what passes through them.

    Attributes:
        trajectory: Where rollout.py writes.
        order: Epoch and version of the policy that acts; change it only after a flush.
        steps, episodes: All that were taken, recorded or not, up to the last flush.
        times: `record`: from rows to the segments of a message. Counted by steps, elsewhere.
    """

    def __init__(self, record: trajectory.Trajectory, outbox: spool.Spool) -> None:
        self.trajectory = record
        self.order = messages.Order(0, 0)
        self.steps = self.episodes = 0
        self.times = stopwatch.Stopwatch("record")
        self._spool = outbox
        self._returns: collections.deque[float] = collections.deque(maxlen=_RETURNS)
        self._assignment: messages.Assignment | None = None
        self._flushed_at = time.monotonic()

    def assign(self, assignment: messages.Assignment) -> None:
        """Follows an assignment's message size and record rate."""
        before = self._assignment
        if before is not None and before.epoch != assignment.epoch:
            self.flush()  # these steps belong to the run before
        self._assignment = assignment
        shape = (assignment.message_steps, assignment.record_fraction)
        if before is None or shape != (before.message_steps, before.record_fraction):
            self.flush()
            self.trajectory.configure(*shape)
        if before is None or before.session != assignment.session:
            # A fleet is told all at once, and must not send all at once
            self._flushed_at = time.monotonic() - random.random() * assignment.message_period_s

    @property
    def recorded(self) -> int:
        """Steps that this boot recorded."""
        return self._spool.steps + self.trajectory.recorded

    @property
    def return_mean(self) -> float | None:
        """The mean return of the last 20 episodes that ended; None before the first."""
        returns = list(self._returns)
        return sum(returns) / len(returns) if returns else None

    def vitals(self) -> dict[str, Any]:
        """Returns what was taken and recorded, by fields of `messages.Vitals`."""
        return {
            "steps": self.steps,
            "episodes": self.episodes,
            "steps_recorded": self._spool.steps,
            "steps_unrecorded": max(0, self.steps - self._spool.steps),
            "return_mean": self.return_mean,
        }

    def record(self, wanted: bool) -> None:
        """Records steps from now on, or no longer does."""
        if wanted != self.trajectory.recording:
            self.flush()
            self.trajectory.recording = wanted

    def flush_if_due(self) -> None:
        """Makes a message if it is full, or old enough where messages age."""
        a, record = self._assignment, self.trajectory
        if record.free == 0 or (a is not None and record.recorded >= a.message_steps):
            self.flush()
            return
        period_s = a.message_period_s if a else _PERIOD_S
        ages = period_s > 0 and not (a is not None and a.lockstep_version)
        if ages and time.monotonic() - self._flushed_at > period_s:
            self.flush()

    def flush(self, *, cut: bool = False) -> None:
        """Makes a message of what is there, all chosen by one policy. With `cut` its episodes are truncated there."""
        self._flushed_at = time.monotonic()
        record = self.trajectory
        if cut:
            record.cut()
        if not record.used:
            return
        self.steps += record.steps
        with self.times.time("record", 0):
            segments = record.flush()
        self.episodes += len(segments.finished)
        self._returns.extend(segments.finished.tolist())
        if segments.steps:
            self._spool.add(segments, self._assignment.epoch if self._assignment else 0, *self.order)
