"""The learner's loop: take in experience, set the pace, update, publish, score, save. The wiring on this side.

Everything is decided in one thread, one step after the other, so that the loop can be read. Updates come several per
TensorFlow call, which computes on a thread of its own, as policies are made: the loop takes in what arrives meanwhile,
so that a receipt need not wait for them, nor they for the fleet. In lock-step nothing arrives meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from broker.contract import errors, messages
from learner import config
from learner.algorithms import registry
from learner.experience import dead_letters, ingest, ledger, rate_limiter, replay, validate
from learner.files import checkpoint, records, run_directory
from learner.fleet import roster, session
from learner.policies import publish
from learner.quantize import calibrate
from learner.run import console, metrics, notices, progress, recovery, scoring

_log = logging.getLogger(__name__)
NORMALIZER_OBSERVATIONS = 1024
CALL_NUMBERS = 4_000_000  # observed, in one call of updates: convolutions take seconds, and no call can be ended
SCORES_S = 2.5  # two evaluations, and some margin, by what the newest one took
FINAL_SCORE_S = 5.0  # beyond max_wall_s, for the score of the last policy
ENOUGH_BATCHES = 2  # to begin with, where steps come slowly
_COUNT_MAX = 1 << 53
ARRIVALS = 64  # messages that are taken in at once, at most: about 10 ms, then updates have their turn
_T = TypeVar("_T")


class TrainingLoop:
    """Training on a fleet whose spec is known.

    Args:
        settings: Of the run.
        directory: Run directory.
        here: This learner's session on the fleet.
        actors: Who is there.
        saved: Checkpoint to go on from; None begins anew, with what the run's ledger holds, if it has one.
        display: Shows progress.
        started_s: Monotonic time at which the process began.
        stop: Ends training when set.
    """

    def __init__(
        self,
        settings: config.Settings,
        directory: run_directory.RunDirectory,
        here: session.Session,
        actors: roster.Roster,
        saved: checkpoint.Checkpoint | None,
        display: console.Console,
        started_s: float,
        stop: threading.Event,
    ) -> None:
        self.settings, self.algorithm_settings = train, algorithm = settings.train, settings.algorithm
        self.directory = directory
        self.session, self.roster, self.spec = here, actors, actors.the_spec
        self.scoring = scoring.Scoring(here.command, train, here.id)
        self.scoring.end_s = self._end_s = started_s + train.max_wall_s if train.max_wall_s else math.inf
        self.notices = notices.Notices()
        self.progress = progress.Progress()
        self.rng = np.random.default_rng(train.seed)
        self.replay = replay.of(self.spec, algorithm)
        numbers = algorithm.batch_size * self.spec.observation.size
        self._updates_per_call = max(1, min(algorithm.updates_per_call, CALL_NUMBERS // numbers))
        self._samples_per_call = algorithm.batch_size * self._updates_per_call
        self.limiter = rate_limiter.RateLimiter(
            train.samples_per_insert,
            train.learning_starts,
            error_buffer=max(2.0 * self._samples_per_call, train.samples_per_insert * train.message_steps),
        )
        self.update_metrics: dict[str, float] = {}
        self._finishing = False
        self._call_s = 0.0  # that the newest call of updates took
        self._gathered: tuple[float, int] | None = None  # when the first steps had come, and how many
        self.solved: scoring.Score | None = None
        self.last_score: scoring.Score | None = None
        self.wall_s = self.finished_unix_s = 0.0
        self._started, self._stop = started_s, stop
        self._lockstep_goal = train.learning_starts
        self._receipted_at = -math.inf
        self._epochs = frozenset({here.epoch})  # of this run's sessions
        self._computing = concurrent.futures.ThreadPoolExecutor(1, "compute")
        version = self._restore_counters(saved) if saved else 0
        self.records = records.Records()
        book = self._open_ledger(saved)
        self.ingest = validate.Validator(
            here.macs,
            self.spec,
            self._epochs,
            book.marks(),
            dead_letters.DeadLetters(directory.path / dead_letters.NAME, kept=self.records),
            self.replay.fits,
            train.max_policy_lag,
            may_send=actors.may_send,
            on_outcome=here.note_outcome,
        )
        self._owed_before = directory.owed_steps() if len(self._epochs) > 1 else 0
        self._owed = -1  # noted, of this session
        actors.set_earlier_steps(self._owed_before)
        self.intake = ingest.Ingest(self.ingest, book, self.replay)
        self.intake.rebuild_replay()
        book.on_commit = here.wake
        here.announce(self.spec.fingerprint, version)
        self._assign(lockstep_version=0)
        _log.info("compiling the networks; the actors gather their first steps meanwhile")
        self.algorithm = registry.make(settings, self.spec)
        if saved:
            self.algorithm.restore(saved.parts["algorithm"])
        self.publisher = publish.Publisher(
            here,
            here.topics,
            self.spec,
            self.algorithm.head,
            here.epoch,
            version,
            settings.gate,
            directory,
            send_deltas=train.delta,
            precision=train.precision,
            weight_bits=train.weight_bits,
            expire_after_s=train.policy_expire_s,
            kept=self.records,
        )
        self.publisher.prepare(self.algorithm.policy_layers())
        self.metrics = metrics.Metrics(directory.path, display, started_s, self.records)
        self._scored = self.algorithm.state()  # behind the policy that is being scored
        self.recovery = recovery.Recovery(self.algorithm, self._scored, self.intake)
        self._published_updates, self._published_at = self.algorithm.updates, -math.inf
        self._saved_at = time.monotonic()
        self.progress.restart_rates(self.algorithm.updates, self.env_steps)

    @property
    def env_steps(self) -> int:
        """Environment steps of the fleet that reached replay, over the whole run."""
        return self.limiter.inserted

    @property
    def epsilon(self) -> float:
        """Share of random actions that the schedule sets now."""
        schedule = self.algorithm_settings
        done = min(1.0, self.env_steps / max(1, schedule.epsilon_decay_steps))
        return schedule.epsilon_start + done * (schedule.epsilon_end - schedule.epsilon_start)

    def train(self) -> None:
        """Trains until the published policy is good, the budget is spent, or the session is asked to stop."""
        settings = self.settings
        turn = self._turn_in_lockstep if settings.deterministic else self._turn
        try:
            while not (self.solved or self._stop.is_set() or self._budget_spent or self._time_is_up):
                turn()
                self._tick()
                if time.monotonic() - self._saved_at > settings.checkpoint_period_s:
                    self.save()
            self.wall_s, self.finished_unix_s = time.monotonic() - self._started, time.time()
            if not self._stop.is_set():
                self._finish()
        finally:
            with contextlib.ExitStack() as ending:  # the last one first, and each whatever became of those before
                ending.callback(self._computing.shutdown)
                ending.callback(self.intake.close)
                ending.callback(self.metrics.close)
                ending.callback(self.save, last=True)
                ending.callback(self.publisher.settle, at_once=True)

    @property
    def _budget_spent(self) -> bool:
        """In lock-step only whole cycles count: what has arrived of the next one depends on time."""
        if self.settings.deterministic:
            return self._lockstep_goal > self.settings.max_env_steps
        return self.env_steps >= self.settings.max_env_steps

    @property
    def _time_is_up(self) -> bool:
        """Or would be before the next updates had ended; what a last score takes is set aside if it is not much."""
        score_s = SCORES_S * self.scoring.took_s
        if score_s > 0.25 * self.settings.max_wall_s:
            score_s = 0.0
        return time.monotonic() > self._end_s - max(score_s, self._call_s - FINAL_SCORE_S)

    # -- one turn ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """What has arrived, then one call of updates if it is due, then one policy if it is due."""
        due = self._may_update()
        self._drain(0.0 if due else 0.02)
        if not due:
            return
        self._update()
        due = self.algorithm.updates - self._published_updates >= self.settings.publish_period_updates
        due &= time.monotonic() - self._published_at >= self.roster.policy_s
        due &= self.solved is None  # while this update computed: nothing may replace what was found good
        if due or self.publisher.newest is None:
            self._publish()

    def _turn_in_lockstep(self) -> None:
        """Exactly the granted steps, then exactly the updates they allow, then one policy, then its score."""
        while self.limiter.inserted < self._lockstep_goal:
            if self._stop.is_set() or self._time_is_up:
                return
            self._drain(0.1)
            self._tick()
        while self._may_update():
            self._update()
        self._publish()
        samples = self.settings.publish_period_updates * self.algorithm_settings.batch_size
        self._lockstep_goal += max(1, round(samples / self.settings.samples_per_insert))
        while self.scoring.busy and not self._stop.is_set() and not self._time_is_up:
            self._drain(0.1)
            self._tick()

    def _may_update(self) -> bool:
        return len(self.replay) > 0 and self.limiter.may_sample(self._samples_per_call)

    def _update(self) -> None:
        if self.algorithm.updates == 0:
            self.algorithm.normalize(self.replay.observations(NORMALIZER_OBSERVATIONS, self.rng))
        settings = self.algorithm_settings
        batch = self.replay.sample(self._updates_per_call, settings.batch_size, self.rng)
        self.limiter.sample(self._samples_per_call)
        began = time.monotonic()
        what = f"{self._updates_per_call} gradient steps of {settings.batch_size} transitions to compute"
        update = self._meanwhile(lambda: self.algorithm.update(batch), what)
        if not recovery.is_sound(update):
            self._recover(batch)
            return
        self.replay.update_priorities(batch.ids, update.td_error)
        if self.update_metrics:
            self._call_s = time.monotonic() - began
            self.limiter.took(self._samples_per_call, self._call_s)
        else:  # the first one compiled. All that stays: Python need not look through it for garbage again
            gc.freeze()
        self.update_metrics = update.metrics

    def _recover(self, batch: replay.Batch | None) -> None:
        """Goes on from the last good state; the batch spoilt the newest, if one is known."""
        self.recovery.roll_back(batch)
        self._published_updates = min(self._published_updates, self.algorithm.updates)
        self.progress.restart_rates(self.algorithm.updates, self.env_steps)

    def _publish(self) -> None:
        self._published_updates, self._published_at = self.algorithm.updates, time.monotonic()
        policy = self.algorithm.policy_layers()
        seen = self.replay.observations(calibrate.sample_size(policy), self.rng)
        verdict = self._meanwhile(lambda: self.publisher.publish(policy, *calibrate.split(seen)), "a policy to be made")
        if not verdict.passed or self.publisher.newest is None:
            return
        self.session.announce(self.spec.fingerprint, self.publisher.version)
        rested = time.monotonic() >= self.scoring.rests_until_s
        if self.settings.evaluate_episodes and rested and not self.scoring.busy and self.solved is None:
            self._scored = self.algorithm.state()
            self.scoring.begin(self.publisher.newest)

    def _meanwhile(self, compute: Callable[[], _T], what: str) -> _T:
        """The result of `what`, which computes on a thread of its own while what arrives is taken in here."""
        began = time.monotonic()
        say_at = began + notices.FIRST_S
        computing = self._computing.submit(compute)
        computing.add_done_callback(lambda _: self.session.wake())
        try:
            while not computing.done():
                self._drain(0.1)
                if not self.settings.deterministic:
                    self._assign(lockstep_version=0)
                if (now := time.monotonic()) > say_at:
                    say_at = now + notices.AGAIN_S
                    _log.info("waiting for %s: %.0f s so far", what, now - began)
        finally:
            concurrent.futures.wait([computing])  # a checkpoint must not see half an update
        return computing.result()

    def _finish(self) -> None:
        """Makes the policy that was found good the newest; where none was, scores the last one."""
        if (newest := self.publisher.newest) is None:
            return
        if self.solved is not None:
            # Training went on meanwhile, and may have spoilt it: the network that was found good is what shall remain
            self.algorithm.restore(self._scored | {"updates": np.array(self.algorithm.updates, np.int32)})
            if self.solved.policy.manifest.sha256 != newest.manifest.sha256:
                self.publisher.publish_again(self.solved.policy)
                self.session.announce(self.spec.fingerprint, self.publisher.version)
        elif self.settings.evaluate_episodes:
            self._score_last(newest)

    def _score_last(self, newest: publish.Published) -> None:
        """Asks for the score of the last policy, and waits for it: within `max_wall_s`, where that is set."""
        now, working = time.monotonic(), self.roster.working()
        limit_s = 2.0 * self.scoring.limits(working[0])[1] if working else scoring.TIMEOUT_S
        self.scoring.end_s = end_s = min(now + limit_s, self._end_s + FINAL_SCORE_S)
        score_s = SCORES_S * self.scoring.took_s
        if end_s - now < limit_s and end_s - now <= score_s:
            takes = f", and a score takes {score_s:.0f} s" if score_s else ""
            _log.warning("the last policy is not scored: the time is up%s", takes)
            return
        who = f"{_names(working)} to score" if working else "an actor, of which none is here, to score"
        _log.info("waiting for %s the last policy, at most %.0f s", who, end_s - now)
        self._finishing = True
        self.scoring.begin(newest, confirm=True)
        while self.scoring.busy and time.monotonic() < end_s and not self._stop.is_set():
            self._drain(0.1)
            self._tick()
        found, last = self.scoring.unconfirmed, self.last_score
        if found is not None and found.policy is newest and (last is None or last.policy is not newest):
            self.last_score = found  # better than none at all
        if self.last_score is None or self.last_score.policy is not newest:
            _log.warning("the last policy has no score: none came in time")

    # -- what arrives -----------------------------------------------------------------------------------------------

    def _drain(self, wait_s: float) -> None:
        """Takes in what has arrived; waits up to `wait_s` for an arrival, a commit or an update to end."""
        if self.intake.is_full:
            self._feed(wait=True)
        for arrival in itertools.islice(self.session.drain(min(wait_s, self.intake.due_in_s)), ARRIVALS):
            message = arrival.message
            if isinstance(message, messages.ActorState):
                self._take_state(arrival.actor_id, message, arrival.retained)
            elif isinstance(message, messages.Report):
                self._take_report(arrival.actor_id, message)
            else:
                self._take_experience(arrival.actor_id, arrival.topic, message)
                if self.intake.is_full:
                    break
        self._feed(wait=False)
        self.publisher.settle()

    def _feed(self, *, wait: bool) -> None:
        """What is durable enters replay and gets receipts: one an actor, however many messages it covers."""
        for experience in self.intake.commit(wait=wait):
            self.limiter.insert(len(experience.reward))
            ours = experience.epoch == self.session.epoch
            self.progress.count(experience, self.publisher.version if ours else None)
        now = time.monotonic()
        if not wait and now - self._receipted_at < self.roster.receipt_s:
            return
        self._receipted_at, receipts = now, self.intake.receipts()
        self.session.retain_all((self.session.topics.receipt(actor_id), receipt) for actor_id, receipt in receipts)

    def _take_state(self, actor_id: str, state: messages.ActorState, retained: bool) -> None:
        now = time.monotonic()
        actor = self.roster.observe(actor_id, state, retained=retained, now_s=now)
        for name, rebuff in self.roster.rejections():
            self.session.refused["state.second_machine"] += 1
            self.session.tell(self.session.topics.assignment(name), rebuff)
        if not retained:
            self.notices.observe(actor_id, state, now)
        version = state.vitals.policy_version
        self.session.compare_epochs(actor_id, state.vitals.policy_epoch)
        if state.vitals.policy_epoch == self.session.epoch and version > actor.version and not retained:
            actor.version = version
            self.publisher.acts(version, now)

    def _take_experience(self, actor_id: str, topic: str, payload: bytes) -> None:
        experience = self.intake.receive(actor_id, topic, payload, self.publisher.version)
        if experience is not None:  # refused or not, they used up its grant
            self.roster.count_received(actor_id, experience.boot, experience.assigned_epoch, len(experience.reward))

    def _take_report(self, actor_id: str, report: messages.Report) -> None:
        if not self.scoring.awaits(report, actor_id):
            self.session.refused["report.unasked"] += 1
            self.session.note_outcome(self.session.topics.report(actor_id), 0, None)
            return
        failures, score = self.scoring.failures, self.scoring.take(report)
        if self.scoring.failures > failures:
            rest_s = self.scoring.rests_until_s - time.monotonic()
            goes_on = f"; training goes on, the next one is asked for in {rest_s:.0f} s" if rest_s > 0 else ""
            what = report.error[:500] or "its answer is incomplete"
            _log.warning("actor %s gave no score: %s%s", actor_id, what, "" if self._finishing else goes_on)
        if score is None:
            return
        self.last_score = score
        if score.confirming and score.mean("published") >= self.settings.solved_return:
            self.solved = score
            if score.alone:
                _log.warning("%s alone says that the policy is good: no other actor was there to confirm it", score.by)

    # -- what goes out ----------------------------------------------------------------------------------------------

    def _metrics(self) -> dict[str, float]:
        """What the stages count, for a row of metrics."""
        row: dict[str, float] = {
            "samples_per_insert": self.limiter.sampled / max(1, self.env_steps),
            "epsilon": self.epsilon,
            "policy_version": self.publisher.version,
            "policies_held_back": sum(self.publisher.held_back.values()),
            "actors_live": len(self.roster.working()),
            "messages": self.ingest.messages,
            "messages_refused": sum(self.ingest.refused.values()) + sum(self.session.refused.values()),
            "steps_refused": self.ingest.steps_refused,
            "steps_missed": self.ingest.steps_missed,
            "env_failures": self.notices.env_failures,
            "steps_quarantined": self.recovery.steps_quarantined,
            "recoveries": self.recovery.recoveries,
            "writes_failed": sum(self.records.failed.values()),
            "bytes_received": self.session.brokers.bytes_received,
            "bytes_sent": self.session.brokers.bytes_sent,
            **self.update_metrics,
        }
        timings, traffic = self.publisher.timings, self.publisher.channel.traffic
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
        if self.publisher.newest is not None:
            row |= {f"gate_{name}": value for name, value in self.publisher.newest.verdict.measures.items()}
        if self.last_score is not None:
            row["published_return_mean"] = self.last_score.mean("published")
        return row

    def _tick(self) -> None:
        """Heartbeat, pace, scores and metrics, each when due."""
        now = time.monotonic()
        self.session.beat()
        self.roster.expire(now)
        self.session.brokers.gather(self.roster.gather_s)
        self._assign(self.publisher.version if self.settings.deterministic else 0)
        self.scoring.advance(self.roster.working(), now, self.session.brokers.changes)
        self._gather(now)
        # Of a slow environment updates are few; before the first one, it is the question when that will be
        if self.notices.is_stuck((self.limiter.sampled, self.env_steps if self.limiter.sampled else 0), now):
            _log.info("%s", self._awaited(now))
        if (row := self.progress.row(self.algorithm.updates, self.env_steps, self._metrics)) is not None:
            self.metrics.write(row)

    def _gather(self, now_s: float) -> None:
        """Lets learning begin with fewer steps than was planned, where they come slowly."""
        if self.limiter.sampled or not self.env_steps or self.env_steps >= self.limiter.min_size:
            return
        if self._gathered is None:
            self._gathered = now_s, self.env_steps
        if self.settings.deterministic or self._early_s(now_s) > 0:
            return
        _log.info(
            "learning begins with %s steps instead of %s, because they come slowly; --learning-starts N holds to N",
            f"{self.env_steps:,}",
            f"{self.limiter.min_size:,}",
        )
        self.limiter.begin()

    def _steps_per_s(self, now_s: float) -> float:
        """Of the first steps, so far."""
        since_s, steps = self._gathered or (now_s, 0)
        return (self.env_steps - steps) / max(1e-9, now_s - since_s)

    def _early_s(self, now_s: float) -> float:
        """Seconds until learning may begin with fewer steps than was planned; inf if it never may."""
        if not self.settings.learning_starts_s or self._gathered is None:
            return math.inf
        missing = ENOUGH_BATCHES * self.algorithm_settings.batch_size - self.env_steps
        rate = self._steps_per_s(now_s)
        wait_s = 0.0 if missing <= 0 else missing / rate if rate else math.inf
        return max(wait_s, self._gathered[0] + self.settings.learning_starts_s - now_s)

    def _awaited(self, now_s: float) -> str:
        """What the loop waits for, for people."""
        if not self.roster.working():
            return "waiting for actors: none is here"
        if scores := self.scoring.describe(now_s):
            return f"waiting for {scores}"
        if not self.env_steps:
            return f"waiting for the first steps of {_names(self.roster.working())}"
        if self.env_steps >= self.limiter.min_size:
            return f"waiting for new steps of {_names(self.roster.working())}"
        rate = self._steps_per_s(now_s)
        whole_s = (self.limiter.min_size - self.env_steps) / rate if rate else math.inf
        early_s = math.inf if self.settings.deterministic else self._early_s(now_s)
        fewer = ", and begins with fewer" if early_s < whole_s else ""
        return (
            f"gathering: {self.env_steps:,} of {self.limiter.min_size:,} first steps; learning waits for "
            f"{notices.duration(min(whole_s, early_s))}{fewer}; --learning-starts N begins earlier"
        )

    @property
    def nothing_learned(self) -> str:
        """Why there was no update; empty if there was one."""
        if self.algorithm.updates:
            return ""
        refused = ", ".join(f"{reason} {count}" for reason, count in self.ingest.refused.items())
        if self.env_steps >= self.limiter.min_size:
            what = f"{self.settings.max_env_steps:,} steps were over" if self._budget_spent else "time ended"
            return f"the {what} before the networks were compiled"
        if self.notices.environments:
            worst, known = max(self.notices.environments.items(), key=lambda one: one[1].count)
            return f"the environment of actor {worst} failed {notices.describe(known)}"
        if self.env_steps:
            return f"{self.env_steps:,} of {self.limiter.min_size:,} first steps came before the end"
        if refused:
            return f"no experience was accepted: {refused}"
        return f"no experience came from {_names(self.roster.working()) or 'any actor: none is here'}"

    def _assign(self, lockstep_version: int) -> None:
        now = time.monotonic()
        if self.settings.deterministic:
            goal = self.env_steps if self._budget_spent else self._lockstep_goal
        elif not self.roster.may_assign(now):
            return
        else:
            self.limiter.widen(self.roster.grant_s, self.progress.env_steps_per_s)
            goal = min(self.limiter.steps_granted(), self.settings.max_env_steps)
        given = list(self._due_assignments(goal, lockstep_version, now))
        self._note_owed(given)
        self.session.retain_all((self.session.topics.assignment(id_), assignment) for id_, assignment in given)

    def _due_assignments(
        self, goal: int, lockstep_version: int, now: float
    ) -> Iterator[tuple[str, messages.Assignment]]:
        return self.roster.assign_due(
            steps_left=goal - self.env_steps - self.intake.pending_steps,
            env_steps=self.env_steps,
            lockstep_version=lockstep_version,
            settings=self.settings,
            exploration=self.algorithm_settings,
            now_s=now,
        )

    def _note_owed(self, given: list[tuple[str, messages.Assignment]]) -> None:
        """Before anybody is granted more than ever: the session after this one must know what may still come.

        In powers of two, so that it is written a few times in all.
        """
        owed = max((self.roster.owed_steps(actor_id) for actor_id, _ in given), default=0) + self.intake.pending_steps
        if given and owed > self._owed:
            self._owed = 1 << owed.bit_length()
            self.directory.note_owed_steps(self._owed_before + self._owed)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, *, last: bool = False) -> None:
        """Writes a checkpoint, of a state in which all that was taken in is in replay and has its receipt.

        Raises:
            OSError: It is the last one, and the disk does not take it. Of others that is said and counted.
        """
        self._saved_at = time.monotonic()
        self._feed(wait=True)
        state = self.algorithm.state()
        if not checkpoint.is_finite(state):
            self._recover(None)
            state = self.algorithm.state()
        self.recovery.keep(state)
        newest = self.publisher.newest
        meta = {
            "env_id": self.roster.env_id,
            "fingerprint": self.spec.fingerprint,
            "epochs": sorted(self._epochs),
            "version": self.publisher.version,
            "episodes": self.progress.episodes,
            "rng": self.rng.bit_generator.state,
            "limiter": self.limiter.state(),
            "lockstep_goal": self._lockstep_goal,
            "published": run_directory.policy_name(newest.manifest) if self.solved and newest else "",
        }
        with contextlib.nullcontext() if last else self.records.attempt("checkpoints"):
            checkpoint.save(self.directory.checkpoints, self.algorithm.updates, meta, {"algorithm": state})

    def _restore_counters(self, saved: checkpoint.Checkpoint) -> int:
        """Takes back all but the algorithm; returns the last policy version.

        Raises:
            RunError: A counter is missing or absurd.
        """
        meta = saved.meta
        try:
            saved.check(self.spec, self.roster.env_id)
            self.rng.bit_generator.state = meta["rng"]
            self.limiter.restore(meta["limiter"])
            self.progress.episodes = int(meta["episodes"])
            self._lockstep_goal = int(meta["lockstep_goal"])
            # Of a checkpoint without them, all since the first
            self._epochs |= set(meta["epochs"] if "epochs" in meta else range(meta["first_epoch"], self.session.epoch))
            version = int(meta["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._unusable(f"{type(error).__name__}: {error}") from error
        counts = version, self.limiter.inserted, self.limiter.sampled, self.progress.episodes, self._lockstep_goal
        if not all(0 <= count <= _COUNT_MAX for count in counts):
            raise self._unusable(f"it counts {', '.join(map(str, counts))}")
        return version

    def _unusable(self, why: str) -> errors.RunError:
        return errors.RunError(
            f"the checkpoint is whole, and cannot be gone on from: {why}",
            where=str(self.directory.checkpoints),
            todo="remove the newest one, and the one before is taken; or start a new run",
        )

    def _open_ledger(self, saved: checkpoint.Checkpoint | None) -> ledger.Ledger:
        """The run's ledger; it knows what reached replay after the checkpoint, too, or before there was one."""
        path, keep = self.directory.path / run_directory.LEDGER, self.settings.keep_experience
        about = {"env_id": self.roster.env_id, "spec": json.dumps(dataclasses.asdict(self.spec))}
        if saved is None and not path.exists():
            book = ledger.Ledger(path, keep=keep, about=about)
        else:
            before = self.env_steps, self.progress.episodes
            book = ledger.resume(path, keep=keep, before=before, about=about)
        found = ledger.about(path)
        if json.loads(found["spec"]) != json.loads(about["spec"]):
            book.close()
            raise errors.SpecError(
                "the run was made for another environment",
                where=f"run: {found['env_id']}; actors: {self.roster.env_id}, {self.spec.describe()}",
                todo="start the actors with the run's environment, or start a new run",
            )
        self.limiter.inserted, self.progress.episodes = book.totals()
        self._epochs = book.begin_session(self._epochs)  # before any assignment: all that is recorded finds it there
        return book


def _names(actors: list[roster.Actor]) -> str:
    """Of the first few, for people."""
    shown = ", ".join(actor.actor_id for actor in actors[:3])
    return f"{shown} and {len(actors) - 3} more" if len(actors) > 3 else shown
