"""A worker: takes in the experience of one shard by the classes with which a learner alone does so.

It hears its actors by a connection of its own; validates, commits to its ledger, inserts into its replay, and sends
receipts, in that order (learner/experience/ingest.py). The learner asks for what came of it, and for batches. All of it
lives in one process, which may be killed at any time: the next one goes on from the ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import io
import itertools
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, messages
from broker.fleet import identity
from broker.program import stopwatch
from learner.experience import age, dead_letters, ingest, ledger, validate
from learner.experience.buffers import replay
from learner.files import run_directory
from learner.fleet import receipts
from learner.run.workers import grants, listening, plan

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
ARRIVALS = 64
"""Messages that are taken in at once, at most; then the learner has its turn."""
LOCK_S = 15.0
"""Seconds for which a worker waits until the one before has let go of its ledger: killed ones do at once."""
ALONE_S = 60.0
"""Seconds without a question of the learner, after which a worker ends: whoever is next has its ledger."""
SAMPLE_S = 1.0
"""Least seconds between two messages of an actor that the learner gets as a whole."""
_WAIT_S = 0.1
"""Seconds that a worker waits for what arrives, is committed or ends it, each of which ends the wait."""
LINES = 100
"""Lines of its log that one report of a worker tells."""
AHEAD = 64
"""Policies by which an actor may be ahead of what a worker has heard of: it acts on one before the learner says so."""


def _told(method: Callable[..., _T]) -> Callable[..., _T | plan.Failed]:
    """Returns what a method raises of our errors, instead of raising it."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> _T | plan.Failed:
        try:
            return method(*args, **options)
        except errors.ActorqError as error:
            return plan.Failed.of(error)

    return call


class Shard:
    """A worker, which has nothing to do before `begin`. Its methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._ending = threading.Event()
        self._failure: errors.ActorqError | None = None
        self._has_begun = False
        self._told = plan.Told()
        self._is_awaited = False  # the next report: the one that waits for news is to end
        self._asked_at = self._receipts_at = 0.0
        # Epoch, and steps that count, of what is not committed yet, by message
        self._assigned: dict[tuple[str, int, int], tuple[int, int]] = {}
        self._received: dict[tuple[str, int, int], tuple[int, int]] = {}  # steps, mark, by actor, boot and epoch
        self._accepted: deque[tuple[str, messages.Experience]] = deque()  # not yet in replay, in order
        self._inserted: dict[tuple[str, int, int, int], plan.Inserted] = {}  # by actor, boot, epoch and version
        self._samples: list[tuple[str, messages.Experience]] = []
        self._said: list[tuple[int, str]] = []
        self._sampled_at: dict[str, float] = {}

    def release_name(self) -> str:
        """Returns the release that this process runs; before anything else is passed."""
        return plan.release()

    def keep_record(self, level: int, text: str) -> None:
        """Has the next report tell what was logged; the first of very many."""
        if len(self._said) < LINES:
            self._said.append((level, text))

    @_told
    def begin(self, task: plan.Plan) -> plan.Begun:
        """Opens the ledger, rebuilds replay, and hears the shard's actors from now on.

        Raises:
            RunError: The ledger is missing, broken or in use.
            IdentityError: The fleet's keys are not on this machine.
            BrokerUnreachable: No broker answered.
        """
        train = task.train
        path = run_directory.ledgers(Path(task.run), train.ingest_workers)[task.shard]
        if not path.exists():
            raise lost(path, task.shard)
        fleet = identity.Fleet.open(train.fleet, Path(task.keys), create=False)
        self._task, self._held_open = task, locked(path)
        try:
            return self._begin(path, fleet)
        except errors.ActorqError:
            self._held_open.close()
            raise

    def _begin(self, path: Path, fleet: identity.Fleet) -> plan.Begun:
        task, train, spec = self._task, self._task.train, self._task.spec
        self._ledger = ledger.Ledger.open(path, keep=train.keep_experience)
        epochs = self._ledger.begin_session(task.epochs)
        steps, episodes = self._ledger.totals()
        settings = dataclasses.replace(
            task.algorithm, replay_capacity=task.algorithm.replay_capacity // train.ingest_workers
        )
        self._replay = replay.of(spec, settings)
        self._listening = listening.Listening(train, task.shard, task.epoch, fleet, fleet.tls())
        self._grants = grants.Grants(task.epoch, task.granted, task.received, task.earlier_steps, task.earlier)
        marks = self._ledger.marks()
        self._validator = _Validator(
            self._note_committed,
            self._listening.macs,
            spec,
            epochs,
            marks,
            dead_letters.DeadLetters(path.with_suffix(".dead_letters.jsonl")),
            self._replay.fits,
            train.max_policy_lag and train.max_policy_lag + AHEAD,
            may_send=self._grants.may_send,
            on_outcome=self._listening.note_outcome,
            head=task.head,
        )
        self._ingest = ingest.Ingest(self._validator, self._ledger, self._replay, age.Ages(train.max_experience_age_s))
        self._ingest.rebuild_replay()
        self._ingest.keep_holding(task.held | self._ledger.actors_held())
        self._ledger.on_commit = self._listening.wake
        self._listening.start()
        self._asked_at, self._has_begun = time.monotonic(), True
        threading.Thread(target=self._serve, name="serve", daemon=True).start()
        reached = {key: mark.steps for key, mark in marks.items()}
        return plan.Begun(steps, episodes, reached, len(self._replay), os.getpid())

    @_told
    def report(self, told: plan.Told, wait_s: float) -> plan.Report:
        """Returns what came since the last report; waits up to `wait_s` for something."""
        with self._news:
            self._told, self._asked_at = told, time.monotonic()
            self._news.wait_for(lambda: self._received or self._inserted or self._failure or self._is_awaited, wait_s)
            self._is_awaited = False
            self._check()
            return self._news_so_far()

    def _news_so_far(self) -> plan.Report:
        report = plan.Report(
            received=[plan.Received(*key, *found) for key, found in self._received.items()],
            inserted=list(self._inserted.values()),
            samples=self._samples,
            transitions=len(self._replay),
            pending_steps=self._ingest.pending_steps,
            steps_held=self._ingest.steps_held,
            steps_too_old=self._ingest.ages.steps_too_old,
            counts=self._counts(),
            said=self._said,
            seconds={
                name: (spent.runs, spent.seconds)
                for name, spent in stopwatch.added([self._ingest.times.totals(), self._ledger.times.totals()]).items()
            },
        )
        self._received, self._inserted, self._samples, self._said = {}, {}, [], []
        return report

    @_told
    def flush(self) -> None:
        """Commits all that was received, inserts it into replay, and sends its receipts."""
        with self._lock:
            self._check()
            self._commit(wait=True)
            self._end_wait()

    @_told
    def sample(self, n: int, seed: int) -> tuple[NDArray[Any], ...] | None:
        """Returns n transitions, in the order of the fields of `replay.Batch`; None if replay is empty."""
        with self._lock:
            self._check()
            if not len(self._replay):
                return None
            batch = self._replay.sample(1, n, np.random.default_rng(seed))
            return tuple(getattr(batch, field.name)[0] for field in dataclasses.fields(batch))

    @_told
    def observations(self, n: int, seed: int) -> NDArray[Any]:
        """Returns up to n different observations, as `Replay.observations`."""
        with self._lock:
            self._check()
            return self._replay.observations(n, np.random.default_rng(seed))

    @_told
    def quarantine(self, transitions: Sequence[int]) -> list[ledger.Source]:
        """Keeps messages out of replay, as `Ingest.quarantine`."""
        with self._lock:
            self._check()
            self._end_wait()
            return self._ingest.quarantine([one for one in transitions if one >= self._replay.oldest])

    @_told
    def hold(self, actor_id: str, since: tuple[int, int] | None) -> int:
        """Holds an actor's experience back, as `Ingest.hold`."""
        with self._lock:
            self._check()
            self._commit(wait=True)
            self._end_wait()
            return self._ingest.hold(actor_id, since)

    @_told
    def release(self, actor_id: str) -> None:
        """Inserts what was held, as `Ingest.release`; the next report has what had not been there before."""
        with self._lock:
            self._check()
            self._commit(wait=True)
            for one in self._ingest.release(actor_id):
                self._note_inserted(actor_id, one)
            self._end_wait()

    @_told
    def discard(self, actor_id: str) -> int:
        """Never gives out what was held, as `Ingest.discard`."""
        with self._lock:
            self._check()
            self._commit(wait=True)
            self._end_wait()
            return self._ingest.discard(actor_id)

    def close(self) -> plan.Report | None:
        """Commits what was received, disconnects and closes the ledger; returns what came since the last report."""
        self._ending.set()
        with self._news:
            if self._has_begun:
                self._listening.wake()
                self._news.wait_for(lambda: self._failure is not None, LOCK_S)
            return self._news_so_far() if isinstance(self._failure, plan.Alone) else None

    # -- the worker's thread ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        failure: errors.ActorqError = plan.Alone("the worker has ended")
        try:
            while not self._ending.is_set():
                if self._listening.is_superseded:
                    raise errors.FleetBusy("a learner of a higher epoch has taken this fleet over")
                if time.monotonic() - self._asked_at > ALONE_S:
                    raise plan.Alone("no learner has asked this worker for anything")
                self._poll()
            with self._lock:
                self._commit(wait=True)
        except errors.ActorqError as error:
            failure = error
        except Exception as error:
            _log.exception("a worker failed")
            failure = errors.RunError(f"ingest worker {self._task.shard} failed: {type(error).__name__}: {error}")
        finally:
            with self._news:
                self._listening.close()
                with contextlib.suppress(errors.ActorqError):
                    self._ingest.close()
                self._held_open.close()
                self._failure = failure
                self._news.notify_all()

    def _poll(self) -> None:
        with self._lock:
            wait_s = min(_WAIT_S, self._ingest.due_in_s)
        arrivals = list(itertools.islice(self._listening.drain(wait_s), ARRIVALS))
        with self._lock:
            for arrival in arrivals:
                if self._ingest.is_full:
                    self._commit(wait=True)
                self._receive(*arrival)
            self._commit(wait=False)

    def _receive(self, actor_id: str, topic: str, payload: bytes, retained: bool) -> None:
        heard, leaf = self._listening, topic.rpartition("/")[2]
        try:
            if topic == heard.topics.actor_state(actor_id):
                state = heard.state(actor_id, topic, payload)
                self._grants.hear_state(actor_id, state)
                if not retained:  # else it may be yesterday's, and its way no way
                    self._ingest.ages.hear(actor_id, state.boot, state.vitals.created_s)
            elif topic == heard.topics.assignment(actor_id):
                self._grants.hear_assignment(actor_id, heard.assignment(topic, payload))
            else:
                self._receive_experience(actor_id, topic, payload)
        except errors.MessageError as error:
            heard.count_refused(f"{leaf}.{error.reason}")

    def _receive_experience(self, actor_id: str, topic: str, payload: bytes) -> None:
        version = max(self._told.version, self._listening.version)
        validated = self._ingest.receive(actor_id, topic, payload, version + AHEAD)
        if validated is None or (experience := validated.experience) is None:
            return
        place = actor_id, experience.boot, experience.assigned_epoch, len(experience.reward)
        counted = self._grants.count_received(*place)
        self._assigned[actor_id, experience.boot, experience.seq] = experience.assigned_epoch, counted
        if validated.entry.verdict != ledger.OK:
            return
        self._accepted.append((actor_id, experience))
        now, share = time.monotonic(), self._task.train.audit_share
        if share and (now - self._sampled_at.get(actor_id, 0.0) > SAMPLE_S or random.random() < share):
            self._sampled_at[actor_id] = now
            self._samples.append((actor_id, experience))

    def _note_committed(self, entries: Sequence[ledger.Entry]) -> None:
        """Takes note of what the learner may be told of: what died with us before would come again."""
        for one in entries:
            found = self._assigned.pop((one.actor_id, one.boot, one.seq), None)
            if found is not None:
                epoch, counted = found
                key = one.actor_id, one.boot, epoch
                steps, mark = self._received.get(key, (0, 0))
                self._received[key] = steps + counted, max(mark, one.step + one.steps)

    def _note_inserted(self, actor_id: str, experience: messages.Experience) -> None:
        key = actor_id, experience.boot, experience.epoch, experience.version
        known = self._inserted.get(key)
        if known is None:
            known = self._inserted[key] = plan.Inserted(*key, 0, [], [])
        self._inserted[key] = known._replace(steps=known.steps + len(experience.reward))
        known.created_ms.append(experience.created_ms)
        flags = experience.terminated.tolist(), experience.truncated.tolist()
        for episode_return, terminated, truncated in zip(experience.episode_return.tolist(), *flags, strict=True):
            if terminated or truncated:
                known.returns.append(episode_return)

    def _commit(self, *, wait: bool) -> None:
        """Inserts what is durable into replay, and sends receipts; silent once another learner has the fleet."""
        for experience in self._ingest.commit(wait=wait):
            actor_id, accepted = self._accepted.popleft()
            assert accepted is experience
            self._note_inserted(actor_id, experience)
        now = time.monotonic()
        if wait or now - self._receipts_at >= self._told.receipt_s:
            self._receipts_at = now
            receipts.send(self._listening.retain_all, self._listening.topics, self._ingest.receipts())
        if self._inserted or self._received:
            self._news.notify_all()

    def _end_wait(self) -> None:
        """Has a report that waits for news tell what has changed."""
        self._is_awaited = True
        self._news.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _counts(self) -> dict[str, Any]:
        counts = self._validator.summary()
        counts["messages_refused"] = counts["messages_refused"] | dict(self._listening.refused)
        return counts


class _Validator(validate.Validator):
    """Tells what was committed."""

    def __init__(self, on_commit: Callable[[Sequence[ledger.Entry]], None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_commit = on_commit

    def note_committed(self, entries: Sequence[ledger.Entry]) -> None:
        super().note_committed(entries)
        self._on_commit(entries)


def lost(path: Path, shard: int) -> errors.RunError:
    """Returns the error for a shard whose ledger is not there."""
    return errors.RunError(
        f"the ledger of ingest worker {shard} is missing",
        where=str(path),
        todo="restore it, or begin a new run: without it what its actors sent could count twice",
    )


def locked(path: Path) -> io.BufferedWriter:
    """Locks a shard's ledger for as long as what it returns is open; waits for a worker that still ends.

    Raises:
        InUse: Another process has it.
    """
    lock = open(path.with_suffix(".lock"), "ab")  # noqa: SIM115
    for wait_s in _waits(LOCK_S):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(wait_s)
    lock.close()
    raise run_directory.InUse(
        "another process is using the ledger of an ingest worker", where=str(path), todo="end the learner that it is of"
    )


def _waits(most_s: float) -> Iterator[float]:
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        yield 0.1
