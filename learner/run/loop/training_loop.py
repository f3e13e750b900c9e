"""The learner's loop: take in experience, set the pace, update, publish, score, save.

Everything is decided in one thread, one step after the other, so that the loop can be read. Updates come several per
TensorFlow call, which computes on a thread of its own, as policies are made: the loop takes in what arrives meanwhile,
so that a receipt need not wait for them, nor they for the fleet. In lock-step nothing arrives meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from learner import algorithms, config
from learner.audit import auditor, drift, holding
from learner.experience import ingestion
from learner.experience.buffers import memory
from learner.files import checkpoint, records, run_directory
from learner.fleet import roster, session
from learner.operate.orders import standing
from learner.policies import publisher
from learner.run.loop import (
    assigning,
    checkpoints,
    first_steps,
    pace,
    policy_scores,
    publishing,
    receiving,
    recovery,
    updating,
    waiting,
)
from learner.run.reports import actor_hours, breakdown, energy, metrics, notices, progress

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of a run, each of which has one responsibility; `build` makes them."""

    session: session.Session
    roster: roster.Roster
    validator: ingestion.Counts
    ingest: ingestion.Ingestion
    algorithm: algorithms.Algorithm
    publisher: publisher.Publisher
    publishing: publishing.Publishing
    receiver: receiving.Receiver
    pace: pace.Pace
    first_steps: first_steps.FirstSteps
    assigner: assigning.Assigner
    updater: updating.Updater[Any]
    recovery: recovery.Recovery
    auditor: auditor.Auditor
    drift: drift.Drift
    holding: holding.Holding
    scores: policy_scores.PolicyScores
    checkpoints: checkpoints.Checkpoints
    records: records.Records
    progress: progress.Progress
    metrics: metrics.Metrics
    actor_hours: actor_hours.ActorHours
    breakdown: breakdown.Breakdown
    notices: notices.Notices
    orders: standing.StandingOrders
    tracker: energy.Tracker | None
    waiting: waiting.Waiting


class TrainingLoop:
    """Trains on a fleet whose spec is known.

    Args:
        settings: The run's.
        parts: What the loop is made of.
        started_s: Monotonic time at which the process began.
        stop: Ends training when set.
    """

    def __init__(self, settings: config.Settings, parts: Parts, started_s: float, stop: threading.Event) -> None:
        self._settings, self.parts = settings.train, parts
        self._started, self._stop = started_s, stop
        self._computing = futures.ThreadPoolExecutor(1, "compute")
        self._saved_at = time.monotonic()
        self._wall_s = self._finished_unix_s = 0.0

    def train(self) -> None:
        """Trains until the published policy is good, the budget is spent, or the session is asked to stop.

        Raises:
            FleetBusy: Another learner has taken the fleet over.
            StorageError, RunError: The ledger or the last checkpoint cannot be written, training computes NaN, or
                another learner goes on with the run.
        """
        parts = self.parts
        advance = self._run_cycle if self._settings.deterministic else self._advance
        parts.breakdown.begin()
        try:
            while not (parts.scores.solved or self._stop.is_set() or parts.pace.budget_spent or self._is_time_up):
                advance()
                self._tick()
                if time.monotonic() - self._saved_at > self._settings.checkpoint_period_s:
                    self.save()
            self._await_policy()
            parts.breakdown.end()
            self._wall_s, self._finished_unix_s = time.monotonic() - self._started, time.time()
            if not self._stop.is_set():
                self._finish()
        finally:
            with contextlib.ExitStack() as ending:  # the last one first, and each whatever became of those before
                ending.callback(self._computing.shutdown)
                ending.callback(parts.ingest.close)
                ending.callback(parts.receiver.close)
                ending.callback(parts.orders.close)
                ending.callback(parts.auditor.close)
                ending.callback(parts.drift.close)
                ending.callback(parts.metrics.close)
                ending.callback(parts.actor_hours.close)
                ending.callback(self.save, last=True)
                ending.callback(parts.publisher.close)
                ending.callback(self._end_trial)

    def save(self, *, last: bool = False) -> None:
        """Writes a checkpoint, of a state in which all that was received is in replay and has its receipt.

        Args:
            last: Whether no other one will follow.

        Raises:
            OSError: It is the last one, and the disk does not take it. Of others that is logged and counted.
            InUse: Another learner goes on with the run.
        """
        parts = self.parts
        self._saved_at = time.monotonic()
        try:
            parts.checkpoints.check_ours()
        except run_directory.InUse:
            if not last:
                raise
            _log.warning("nothing more is saved: another learner goes on with this run")  # what ended this one is said
            return
        parts.receiver.commit(wait=True)
        state = parts.algorithm.state()
        if not checkpoint.is_finite(state):
            self._recover(None)
            state = parts.algorithm.state()
        parts.recovery.keep(state)
        newest = parts.publisher.newest
        published = run_directory.policy_name(newest.manifest) if parts.scores.solved and newest else ""
        parts.checkpoints.save(state, parts.algorithm.updates, parts.publisher.version, published, last=last)

    def summaries(self) -> Iterator[dict[str, Any]]:
        """Yields what each stage says of the session, for the summary."""
        settings, parts = self._settings, self.parts
        updates = parts.algorithm.updates
        yield {
            "env_id": parts.roster.env_id,
            "algorithm": settings.algorithm,
            "seed": settings.seed,
            "solved_return": settings.solved_return if math.isfinite(settings.solved_return) else None,
            "precision": settings.precision,
            "updates": updates,
            "learner_wall_s": round(self._wall_s, 3),
            "finished_unix_s": round(self._finished_unix_s or time.time(), 3),
            "nothing_learned": None if updates else parts.waiting.nothing_learned(),
        }
        yield parts.publisher.summary()
        yield parts.publishing.summary()
        yield parts.pace.summary()
        yield parts.progress.summary()
        yield parts.breakdown.summary()
        yield parts.scores.summary()
        yield parts.updater.summary()
        yield parts.validator.summary()
        yield parts.ingest.ages.summary()
        yield parts.session.summary()
        yield parts.roster.budget.summary()
        yield parts.recovery.metrics()
        yield parts.auditor.summary()
        yield parts.drift.summary()
        yield parts.holding.summary()
        yield parts.records.summary()
        yield parts.notices.summary()

    def details(self) -> dict[str, Any]:
        """Returns what the report draws of the session beside its summary: fleet, and distributions."""
        parts = self.parts
        return {
            "fleet": parts.roster.table(),
            "publish_to_acting_ms": parts.publisher.timings.acting_percentiles(),
            "policy_lag_steps": dict(parts.progress.lags),
        }

    @property
    def _is_time_up(self) -> bool:
        return self.parts.pace.is_time_up(self.parts.scores.took_s, self.parts.updater.call_s)

    def _advance(self) -> None:
        """Takes in what has arrived, then makes one call of updates if it is due, then one policy if it is due."""
        parts = self.parts
        due = parts.updater.may_update and not parts.publishing.is_awaited
        parts.receiver.receive(0.0 if due else 0.02, starved=not due)
        if due and parts.updater.may_update:  # an ingest worker may have died meanwhile, with all that replay had
            self._update()
        elif not parts.publishing.is_awaited and not self._prepare_first():
            return
        if parts.publishing.is_due:
            self._publish()

    def _run_cycle(self) -> None:
        """Takes in exactly the granted steps, makes exactly the updates they allow, one policy, and its score."""
        parts = self.parts
        if self._prepare_first():  # of a resumed session: nobody acts before there is a policy
            self._publish()
        while parts.pace.env_steps < parts.pace.lockstep_goal:
            if self._stop.is_set() or self._is_time_up:
                return
            parts.receiver.receive(0.1, starved=True)
            self._tick()
        self._prepare_first()
        while parts.updater.may_update:
            self._update()
        self._publish()
        parts.pace.begin_cycle()
        while parts.scores.busy and not self._stop.is_set() and not self._is_time_up:
            parts.receiver.receive(0.1)
            self._tick()

    def _prepare_first(self) -> bool:
        """Makes ready for a policy that has to act before there is anything to learn from; returns whether one has."""
        parts = self.parts
        if not (parts.updater.awaits_policy and parts.first_steps.are_complete):
            return False
        parts.updater.begin()
        return True

    def _update(self) -> None:
        parts = self.parts
        batch = parts.updater.draw()
        began = time.monotonic()
        update = self._meanwhile(self._computing.submit(parts.updater.compute, batch), parts.updater.work)
        if recovery.is_sound(update):
            parts.updater.note(batch, update, time.monotonic() - began)
        else:
            self._recover(batch)

    def _recover(self, batch: memory.Batch | None) -> None:
        """Goes on from the last good state; the batch spoilt the newest, if one is known."""
        parts = self.parts
        parts.recovery.roll_back(batch)
        parts.publishing.roll_back()
        parts.progress.restart_rates(parts.algorithm.updates, parts.pace.env_steps)

    def _publish(self) -> None:
        """Has a policy made, and sent unless the gate holds it back. On policy and in lock-step waits for that."""
        publishing = self.parts.publishing
        if not publishing.has_observations:
            return  # all that was there is held back
        publishing.begin().add_done_callback(lambda _: self.parts.session.wake())
        if self._settings.deterministic or publishing.is_on_policy:
            self._await_policy()

    def _await_policy(self) -> None:
        """Waits for the policy that is being made, if one is."""
        if (making := self.parts.publishing.making) is not None:
            self._meanwhile(making, "a policy to be made")
            self.parts.publishing.advance()

    def _meanwhile(self, computing: futures.Future[_T], what: str) -> _T:
        """Returns the result of `what`, which another thread computes while what arrives is taken in here."""
        parts = self.parts
        began = time.monotonic()
        log_at = began + notices.FIRST_S
        computing.add_done_callback(lambda _: parts.session.wake())
        try:
            while not computing.done():
                parts.receiver.receive(0.1)
                if not self._settings.deterministic:
                    parts.assigner.assign()
                if (now := time.monotonic()) > log_at:
                    log_at = now + notices.AGAIN_S
                    _log.info("waiting for %s: %.0f s so far", what, now - began)
        finally:
            futures.wait([computing])  # a checkpoint must not see half an update
        return computing.result()

    def _tick(self) -> None:
        """Does what is due with time: heartbeat, assignments, scores, audits and metrics."""
        parts, now = self.parts, time.monotonic()
        parts.session.beat()
        parts.orders.leave(now)
        parts.roster.expire(now)
        parts.publishing.advance()
        parts.receiver.measure(now)
        parts.session.brokers.gather(parts.roster.gather_s)
        parts.assigner.assign(parts.publisher.version if self._settings.deterministic else 0)
        parts.scores.advance(parts.roster.working(), now, parts.session.brokers.changes)
        parts.first_steps.begin_early(now)
        parts.holding.advance()
        parts.waiting.notice(now)
        if (row := parts.progress.row(parts.algorithm.updates, parts.pace.env_steps)) is not None:
            parts.metrics.write(row | metrics.merged(self._stage_metrics()))
            parts.actor_hours.note(parts.roster.actors.values())

    def _stage_metrics(self) -> Iterator[dict[str, float]]:
        parts = self.parts
        yield parts.publisher.metrics()
        yield parts.publishing.metrics()
        yield parts.pace.metrics()
        yield parts.roster.metrics()
        yield parts.validator.metrics()
        yield parts.ingest.ages.metrics()
        yield parts.session.metrics()
        yield parts.notices.metrics()
        yield parts.recovery.metrics()
        yield parts.auditor.metrics()
        yield parts.drift.metrics()
        yield parts.holding.metrics()
        yield parts.records.metrics()
        yield parts.updater.metrics()
        yield parts.scores.metrics()
        yield parts.breakdown.metrics()
        if parts.tracker is not None:
            yield parts.tracker.metrics()

    def _finish(self) -> None:
        """Makes the policy that was found good the newest; where none was, scores the last one."""
        parts = self.parts
        self._end_trial()
        if (newest := parts.publisher.newest) is None:
            return
        if (solved := parts.scores.solved) is not None:
            # Training went on meanwhile, and may have spoilt it: the network that was found good is what shall remain
            parts.algorithm.restore(parts.scores.state | {"updates": np.array(parts.algorithm.updates, np.int32)})
            if solved.policy.manifest.sha256 != newest.manifest.sha256:
                parts.publisher.publish_again(solved.policy).result()
                parts.publishing.announce()
        elif self._settings.evaluate_episodes and newest.layers:  # else it was a session before that proved it
            self._score_last(newest)

    def _end_trial(self) -> None:
        """Has all actors follow what was proven."""
        if self.parts.publishing.end_trial():
            self.parts.assigner.assign()

    def _score_last(self, newest: publisher.Published) -> None:
        scores = self.parts.scores
        end_s = scores.begin_last(newest, self.parts.roster.working())
        if not end_s:
            return
        while scores.busy and time.monotonic() < end_s and not self._stop.is_set():
            self.parts.receiver.receive(0.1)
            self._tick()
        scores.end_last(newest)
