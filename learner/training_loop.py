"""The learner's loop: take in experience, set the pace, update, publish, score, save. The wiring on this side.

Everything is decided in one thread, one step after the other, so that the loop can be read. Updates come several per
TensorFlow call, which computes on a thread of its own, as policies are made: the loop takes in what arrives meanwhile,
so that a receipt need not wait for them, nor they for the fleet. In lock-step nothing arrives meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from broker import messages
from learner import (
    checkpoint,
    config,
    console,
    dead_letters,
    ingest,
    intake,
    ledger,
    metrics,
    progress,
    publish,
    rate_limiter,
    replay,
    roster,
    run_directory,
    scoring,
    session,
)
from learner.algorithms import registry
from learner.quantize import calibrate

NORMALIZER_OBSERVATIONS = 1024
ARRIVALS = 64  # messages that are taken in at once, at most: about 10 ms, then updates have their turn
_T = TypeVar("_T")


class TrainingLoop:
    """Training on a fleet whose spec is known.

    Args:
        settings: Of the run.
        directory: Run directory.
        here: This learner's session on the fleet.
        actors: Who is there.
        saved: Checkpoint to go on from.
        screen: For people.
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
        screen: console.Console,
        started_s: float,
        stop: threading.Event,
    ) -> None:
        self.settings, self.algorithm_settings = train, algorithm = settings.train, settings.algorithm
        self.directory = directory
        self.session, self.roster, self.spec = here, actors, actors.the_spec
        self.scoring = scoring.Scoring(here.command, train, here.id)
        self.progress = progress.Progress()
        self.rng = np.random.default_rng(train.seed)
        self.replay = replay.of(self.spec, algorithm)
        self._samples_per_call = algorithm.batch_size * algorithm.updates_per_call
        self.limiter = rate_limiter.RateLimiter(
            train.samples_per_insert,
            train.learning_starts,
            error_buffer=max(2.0 * self._samples_per_call, train.samples_per_insert * train.message_steps),
        )
        self.update_metrics: dict[str, float] = {}
        self.solved: scoring.Score | None = None
        self.last_score: scoring.Score | None = None
        self.wall_s = self.finished_unix_s = 0.0
        self._started, self._stop = started_s, stop
        self._lockstep_goal = train.learning_starts
        self._receipted_at = -math.inf
        self._first_epoch = here.epoch
        self._computing = concurrent.futures.ThreadPoolExecutor(1, "compute")
        version = self._restore_counters(saved) if saved else 0
        book = self._open_ledger(resumed=saved is not None, say=screen.say)
        self.ingest = ingest.Ingest(
            here.macs,
            self.spec,
            (self._first_epoch, here.epoch),
            book.marks(),
            dead_letters.DeadLetters(directory.path / dead_letters.NAME),
            self.replay.fits,
            train.max_policy_lag,
            actors.may_send,
            here.judge,
        )
        self._owed_before = directory.owed_steps() if saved else 0
        self._owed = -1  # noted, of this session
        actors.expect_earlier(self._owed_before)
        self.intake = intake.Intake(self.ingest, book, self.replay, screen.say)
        book.on_commit = here.wake
        here.announce(self.spec.fingerprint, version)
        self._assign(lockstep_version=0)
        screen.say("compiling the networks; the actors gather their first steps meanwhile")
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
            screen.say,
            send_deltas=train.delta,
            precision=train.precision,
            weight_bits=train.weight_bits,
            expire_after_s=train.policy_expire_s,
        )
        self.publisher.prepare(self.algorithm.policy_layers())
        self.metrics = metrics.Metrics(directory.path, screen, started_s)
        self._scored = self.algorithm.state()  # behind the policy that is being scored
        self._published_updates, self._published_at = self.algorithm.updates, -math.inf
        self._screen, self._saved_at = screen, time.monotonic()
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
            while self.solved is None and not self._stop.is_set() and not self._budget_spent:
                if settings.max_wall_s and time.monotonic() - self._started > settings.max_wall_s:
                    break
                turn()
                self._tick()
                if time.monotonic() - self._saved_at > settings.checkpoint_period_s:
                    self.save()
            self.wall_s, self.finished_unix_s = time.monotonic() - self._started, time.time()
            if not self._stop.is_set():
                self._finish()
        finally:
            self.publisher.settle(at_once=True)
            self.save()
            self.metrics.close()
            self.intake.close()
            self._computing.shutdown()

    @property
    def _budget_spent(self) -> bool:
        """In lock-step only whole cycles count: what has arrived of the next one depends on time."""
        if self.settings.deterministic:
            return self._lockstep_goal > self.settings.max_env_steps
        return self.env_steps >= self.settings.max_env_steps

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
            if self._stop.is_set():
                return
            self._drain(0.1)
            self._tick()
        while self._may_update():
            self._update()
        self._publish()
        samples = self.settings.publish_period_updates * self.algorithm_settings.batch_size
        self._lockstep_goal += max(1, round(samples / self.settings.samples_per_insert))
        while self.scoring.busy and not self._stop.is_set():
            self._drain(0.1)
            self._tick()

    def _may_update(self) -> bool:
        return len(self.replay) > 0 and self.limiter.may_sample(self._samples_per_call)

    def _update(self) -> None:
        if not self.update_metrics and self.algorithm.updates == 0:
            self.algorithm.normalize(self.replay.observations(NORMALIZER_OBSERVATIONS, self.rng))
        settings = self.algorithm_settings
        batch = self.replay.sample(settings.updates_per_call, settings.batch_size, self.rng)
        self.limiter.sample(self._samples_per_call)
        began = time.monotonic()
        update = self._meanwhile(lambda: self.algorithm.update(batch))
        self.replay.update_priorities(batch.ids, update.td_error)
        if self.update_metrics:
            self.limiter.took(self._samples_per_call, time.monotonic() - began)
        else:  # the first one compiled. All that stays: Python need not look through it for garbage again
            gc.freeze()
        self.update_metrics = update.metrics

    def _publish(self) -> None:
        self._published_updates, self._published_at = self.algorithm.updates, time.monotonic()
        policy = self.algorithm.policy_layers()
        seen = self.replay.observations(calibrate.rows(policy), self.rng)
        verdict = self._meanwhile(lambda: self.publisher.publish(policy, *calibrate.split(seen)))
        if not verdict.passed or self.publisher.newest is None:
            return
        self.session.announce(self.spec.fingerprint, self.publisher.version)
        if self.settings.evaluate_episodes and not self.scoring.busy and self.solved is None:
            self._scored = self.algorithm.state()
            self.scoring.begin(self.publisher.newest)

    def _meanwhile(self, compute: Callable[[], _T]) -> _T:
        """The result of what computes on a thread of its own, while what arrives is taken in here."""
        computing = self._computing.submit(compute)
        computing.add_done_callback(lambda _: self.session.wake())
        try:
            while not computing.done():
                self._drain(0.1)
                if not self.settings.deterministic:
                    self._assign(lockstep_version=0)
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
            self.scoring.begin(newest, confirm=True)
            deadline = time.monotonic() + scoring.TIMEOUT_S
            while self.scoring.busy and time.monotonic() < deadline and not self._stop.is_set():
                self._drain(0.1)
                self._tick()
            found, last = self.scoring.unconfirmed, self.last_score
            if found is not None and found.policy is newest and (last is None or last.policy is not newest):
                self.last_score = found  # better than none at all

    # -- what arrives -----------------------------------------------------------------------------------------------

    def _drain(self, wait_s: float) -> None:
        """Takes in what has arrived; waits up to `wait_s` for an arrival, a commit or an update to end."""
        if self.intake.is_full:
            self._feed(wait=True)
        for arrival in itertools.islice(self.session.drain(min(wait_s, self.intake.rest_s)), ARRIVALS):
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
        for experience in self.intake.settle(wait=wait):
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
        version = state.vitals.policy_version
        if state.vitals.policy_epoch == self.session.epoch and version > actor.version and not retained:
            actor.version = version
            self.publisher.acts(version, now)

    def _take_experience(self, actor_id: str, topic: str, payload: bytes) -> None:
        experience = self.intake.take(actor_id, topic, payload, self.publisher.version)
        if experience is not None:  # refused or not, they used up its grant
            self.roster.take(actor_id, experience.boot, experience.assigned_epoch, len(experience.reward))

    def _take_report(self, actor_id: str, report: messages.Report) -> None:
        if not self.scoring.awaits(report, actor_id):
            self.session.refused["report.unasked"] += 1
            self.session.judge(self.session.topics.report(actor_id), 0, None)
            return
        if report.error:
            self._screen.say(f"an actor could not {report.kind[:40]}: {report.error[:500]}")
        if (score := self.scoring.take(report)) is None:
            return
        self.last_score = score
        if score.confirming and score.mean("published") >= self.settings.solved_return:
            self.solved = score
            if score.alone:
                self._screen.say(
                    f"{score.by} alone says that the policy is good: no other actor was there to confirm it"
                )

    # -- what goes out ----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Heartbeat, pace, scores and metrics, each when due."""
        now = time.monotonic()
        self.session.beat()
        self.roster.expire(now)
        self.session.brokers.gather(self.roster.gather_s)
        self._assign(self.publisher.version if self.settings.deterministic else 0)
        self.scoring.advance(self.roster.working(), now, self.session.brokers.changes)
        if (row := self.progress.row(self)) is not None:
            self.metrics.write(row)

    def _assign(self, lockstep_version: int) -> None:
        now = time.monotonic()
        if self.settings.deterministic:
            goal = self.env_steps if self._budget_spent else self._lockstep_goal
        elif not self.roster.look(now):
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

    def save(self) -> None:
        """Writes a checkpoint, of a state in which all that was taken in is in replay and has its receipt."""
        self._saved_at = time.monotonic()
        self._feed(wait=True)
        newest = self.publisher.newest
        meta = {
            "env_id": self.roster.env_id,
            "fingerprint": self.spec.fingerprint,
            "first_epoch": self._first_epoch,
            "version": self.publisher.version,
            "episodes": self.progress.episodes,
            "rng": self.rng.bit_generator.state,
            "limiter": self.limiter.state(),
            "lockstep_goal": self._lockstep_goal,
            "published": run_directory.policy_name(newest.manifest) if self.solved and newest else "",
        }
        checkpoint.save(self.directory.checkpoints, self.algorithm.updates, meta, {"algorithm": self.algorithm.state()})

    def _restore_counters(self, saved: checkpoint.Checkpoint) -> int:
        """Takes back all but the algorithm; returns the last policy version."""
        saved.check(self.spec, self.roster.env_id)
        meta = saved.meta
        self.rng.bit_generator.state = meta["rng"]
        self.limiter.restore(meta["limiter"])
        self.progress.episodes = int(meta["episodes"])
        self._lockstep_goal = int(meta["lockstep_goal"])
        self._first_epoch = int(meta["first_epoch"])
        return int(meta["version"])

    def _open_ledger(self, *, resumed: bool, say: Callable[[str], None]) -> ledger.Ledger:
        """The run's ledger; it knows what reached replay after the checkpoint, too."""
        path, keep = self.directory.path / ledger.NAME, self.settings.keep_experience
        about = {"env_id": self.roster.env_id, "spec": json.dumps(dataclasses.asdict(self.spec))}
        if not resumed:
            return ledger.Ledger(path, keep=keep, about=about)
        book = ledger.resume(path, keep=keep, before=(self.env_steps, self.progress.episodes), about=about, say=say)
        self.limiter.inserted, self.progress.episodes = book.totals()
        return book
