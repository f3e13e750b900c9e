"""The workers of a run as the learner's loop sees them: they take in experience in the place of its own `Ingest`.

Each is asked for one report after the other; what it says has been committed to its ledger. One that dies is started
again in its place: it goes on from that ledger, whose sums also tell what the dead one could no longer report.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from broker.contract import errors, messages, topics
from broker.program import stopwatch
from learner.experience import age, ledger, validate
from learner.fleet import gathering
from learner.run.workers import cluster, plan

_log = logging.getLogger(__name__)
BEGIN_S = 90.0
"""Seconds in which Ray must have started a worker's process."""
REBUILD_S = 3600.0
"""Seconds in which it must have rebuilt its replay: one that is large, from a slow disk, takes minutes."""
ANSWER_S = 30.0
"""Seconds in which it must answer; one that stands still for longer is ended, and started again."""
GAP_S = 0.1
"""Least seconds between two reports of a worker: each call of Ray takes either side a millisecond or two."""
_REPORT_S = 1.0
"""Seconds for which a report waits for news, which ends the wait: where there is none, questions alone cost."""
_DEATHS, _DEATHS_S = 5, 60.0
"""Deaths of one worker, and seconds, within which so many are no accident."""
_SLICE_S = 0.5
"""Seconds after which a wait for an answer has the learner's heartbeat sent."""
_LIFE_BITS, _SHARD_BITS = 48, 56
"""The bits of a transition's id at which the life of a place, and its shard, begin."""
_NOTHING = np.zeros(0, np.int32)
_LIVES = 1 << (_SHARD_BITS - _LIFE_BITS)


class Asked(NamedTuple):
    """A question on its way to a worker; `life` counts those that had its place before."""

    worker: cluster.Worker
    answer: futures.Future[Any]
    life: int


class _Place:
    """One shard: the worker that has it, and what is known of it."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.worker: cluster.Worker | None = None
        self.is_live = False
        self.life = -1
        self.transitions = self.pending_steps = self.steps_held = self.steps = self.episodes = 0
        self.answer: futures.Future[Any] | None = None  # of the release, of `begin`, or a report
        self.asked_at = 0.0
        self.stage = ""
        self.died_at: deque[float] = deque(maxlen=_DEATHS)
        self.counts: dict[str, Any] = {}
        self.earlier: list[dict[str, Any]] = []  # counts of the workers before
        self.steps_too_old = self.steps_too_old_earlier = 0
        self.seconds: dict[str, tuple[int, float]] = {}


class Shards:
    """Takes in experience by workers; an `ingestion.Ingestion`.

    Args:
        place: Where they run.
        shards: How many.
        epoch: Of the learner's session.
        make_plan: Returns what the worker of a shard is told when it begins.
        on_received: Called with steps that were committed, by boot and assignment, whatever became of them.
        on_missed: Called with steps and episodes that entered replay, of which a worker could tell no more.
        wake: Ends the wait of the loop; called on any thread.

    Attributes:
        ages: Of what entered replay.
        held: Actors that are held back.
        on_sample: Called with actor and message of some of those that were accepted, whole.
        version: Returns the newest policy version published.
        receipt_s: Returns how long receipts may wait for others.
        meanwhile: Called again and again while an answer is waited for: the learner's heartbeat.
        times: The workers' stages, added up.
        restarts: Workers that were started again.
        put_aside: How many times experience was held back or quarantined: what was drawn before may have it.
    """

    def __init__(
        self,
        place: cluster.Cluster,
        shards: int,
        epoch: int,
        make_plan: Callable[[int], plan.Plan],
        on_received: Callable[[plan.Received], None],
        on_missed: Callable[[int, int], None],
        wake: Callable[[], None],
    ) -> None:
        self._cluster, self._make_plan = place, make_plan
        self._on_received, self._on_missed, self._wake = on_received, on_missed, wake
        self.on_sample: Callable[[str, messages.Experience], None] = lambda actor_id, experience: None
        self.places = [_Place(shard) for shard in range(shards)]
        self._new: list[messages.Experience] = []
        self.ages = age.Ages()
        self.held: set[str] = set()
        self.version: Callable[[], int] = lambda: 0
        self.receipt_s: Callable[[], float] = lambda: 0.0
        self.meanwhile: Callable[[], None] = lambda: None
        self.times = stopwatch.Stopwatch("decode", "ledger", "replay_insert")
        self.restarts = self.put_aside = 0
        self._epoch = epoch
        self._pids: dict[int, int] = {}  # of those that have begun
        self._marks: dict[tuple[str, int], int] = {}  # steps of each boot that the ledgers are known to have

    @property
    def loop_s(self) -> float:
        """Seconds of the loop that opening and inserting took: none, for workers do both."""
        return 0.0

    def begin(self, meanwhile: Callable[[], None] = lambda: None, stop: threading.Event | None = None) -> None:
        """Starts all workers, and waits until each has its ledger, its replay and its broker.

        Args:
            meanwhile: Called again and again until then, and whenever an answer is waited for later.
            stop: Ends the wait when set.

        Raises:
            ActorqError: One cannot begin; says why.
            Stopped: `stop` was set meanwhile.
        """
        self.meanwhile = meanwhile
        for one in self.places:
            self._start(one)
        while not all(one.is_live for one in self.places):
            self._advance()
            meanwhile()
            if stop is not None and stop.is_set():
                raise gathering.Stopped
            waiting = [one.answer for one in self.places if one.answer is not None and not one.is_live]
            futures.wait(waiting, _SLICE_S, futures.FIRST_COMPLETED)
        _log.info(
            "%d ingest workers have begun (%s), with %d transitions in replay",
            len(self.places),
            ", ".join(f"pid {self._pids[one.shard]}" for one in self.places),
            sum(one.transitions for one in self.places),
        )

    # -- an Ingestion -----------------------------------------------------------------------------------------------

    @property
    def pending_steps(self) -> int:
        """Steps that were received and are not yet in replay, by the newest reports."""
        return sum(one.pending_steps for one in self.places)

    @property
    def is_full(self) -> bool:
        """Returns whether nothing more should be received here: never, for nothing is."""
        return False

    @property
    def due_in_s(self) -> float:
        """Seconds until the loop has to ask for reports; an answer ends its wait."""
        return GAP_S if any(one.answer is None for one in self.places) else _SLICE_S

    @property
    def steps_held(self) -> int:
        """Steps that are held back and still in a ledger."""
        return sum(one.steps_held for one in self.places)

    def receive(
        self,
        actor_id: str,
        topic: str,
        payload: bytes,
        version: int,
        opened: Callable[[], validate.Opened] | None = None,
    ) -> validate.Validated | None:
        """Passes over a message: the learner itself hears no experience."""
        return None

    def commit(self, *, wait: bool) -> list[messages.Experience]:
        """Returns what has entered replay by the workers' reports since the last call, without observations.

        Args:
            wait: Until all that they have received is in replay.

        Raises:
            ActorqError: A worker cannot go on: its ledger, say.
        """
        if wait:
            with contextlib.suppress(errors.FleetBusy):  # a checkpoint is saved all the same: the ledgers have the rest
                for one in self.places:
                    if one.is_live:
                        self._ask(one, "flush")  # which ends the wait of the report that is under way
                    self._hear(one)
        else:
            self._advance()
        new, self._new = self._new, []
        return new

    def receipts(self) -> Iterator[tuple[str, messages.Receipt]]:
        """Yields nothing: workers send receipts themselves."""
        yield from ()

    def quarantine(self, transitions: Iterable[int]) -> list[ledger.Source]:
        """Keeps the messages that brought these transitions out of replay (see Ingest.quarantine)."""
        by_worker: dict[tuple[int, int], list[int]] = {}
        for one in transitions:
            own = one >> _SHARD_BITS, one >> _LIFE_BITS & (_LIVES - 1)
            by_worker.setdefault(own, []).append(one & ((1 << _LIFE_BITS) - 1))
        found: list[ledger.Source] = []
        self.put_aside += 1
        for (shard, life), ids in by_worker.items():
            # The next worker of the place counts its transitions anew, and would take others for these
            if self.places[shard].life % _LIVES == life and (asked := self.ask_later(shard, "quarantine", ids)):
                found += self.answer_of(shard, asked) or []
                self._hear(self.places[shard])
        return found

    def hold(self, actor_id: str, since: tuple[int, int] | None) -> int:
        """Holds an actor's experience back from now on (see Ingest.hold)."""
        self.held.add(actor_id)
        self.put_aside += 1
        steps: int = self._ask(self._of(actor_id), "hold", actor_id, since)
        self._hear(self._of(actor_id))
        return steps

    def release(self, actor_id: str) -> list[messages.Experience]:
        """Inserts what was held of an actor into replay; a later `commit` returns what had not been there before."""
        self.held.discard(actor_id)
        self._ask(self._of(actor_id), "release", actor_id)
        return []

    def discard(self, actor_id: str) -> int:
        """Never gives out what was held of an actor (see Ingest.discard)."""
        self.held.discard(actor_id)
        steps: int = self._ask(self._of(actor_id), "discard", actor_id)
        return steps

    def close(self) -> None:
        """Ends the workers, each of which commits what it has received; and the cluster, if it was started here."""
        self.on_sample = lambda actor_id, experience: None  # who looks at samples has ended before
        closing = [(one, one.worker.ask("close")) for one in self.places if one.worker is not None and one.is_live]
        futures.wait([answer for _, answer in closing], ANSWER_S)
        for one, last in closing:
            for answer in (one.answer, last):  # a report may be on its way
                told = answer.result() if answer is not None and answer.done() and not answer.exception() else None
                if isinstance(told, plan.Report):
                    self._note_report(one, told)
        for late in self._new:
            self._on_missed(len(late.reward), len(late.terminated))
        for one in self.places:
            if one.worker is not None:
                one.worker.kill()
        self._cluster.close()

    # -- their counts -----------------------------------------------------------------------------------------------

    @property
    def refused(self) -> Counter[str]:
        """Messages that did not enter replay, by reason."""
        return sum((Counter(one.get("messages_refused", {})) for one in self._all_counts()), Counter())

    def metrics(self) -> dict[str, float]:
        """Returns the counts of messages and steps, and of workers that were started again, for a row of metrics."""
        return {
            "messages": self._sum("experience_messages"),
            "messages_refused": sum(self.refused.values()),
            "steps_refused": self._sum("steps_refused"),
            "steps_missed": self._sum("steps_missed"),
            "worker_restarts": self.restarts,
        }

    def summary(self) -> dict[str, Any]:
        """Returns the same for the summary; messages refused by reason."""
        counts = self.metrics()
        return {"experience_messages": counts.pop("messages"), **counts, "messages_refused": dict(self.refused)}

    def _sum(self, name: str) -> int:
        return sum(one.get(name, 0) for one in self._all_counts())

    def _all_counts(self) -> Iterator[dict[str, Any]]:
        for one in self.places:
            yield from (one.counts, *one.earlier)

    # -- what replay asks -------------------------------------------------------------------------------------------

    def ask_later(self, shard: int, method: str, *arguments: Any) -> Asked | None:
        """Asks a worker without waiting; None if there is none now."""
        worker = self.places[shard].worker
        if worker is None or not self.places[shard].is_live:
            return None
        return Asked(worker, worker.ask(method, *arguments), self.places[shard].life)

    def answer_of(self, shard: int, asked: Asked) -> Any:
        """Returns what a worker answers; None if it died, or stands still, and is started again.

        Raises:
            ActorqError: It tells of an error.
        """
        try:
            answer = self._result(asked.answer)
        except (cluster.Died, TimeoutError) as error:
            self._note_death(self.places[shard], f"{error}" or "it does not answer", asked.worker)
            return None
        if isinstance(answer, plan.Failed):
            if answer.kind == plan.Alone.__name__:  # it ended before it heard the question
                self._note_death(self.places[shard], answer.what, asked.worker)
                return None
            raise answer.error()
        return answer

    def advance(self) -> None:
        """Takes in what workers report, and starts those again that died."""
        self._advance()

    def wait(self, seconds: float) -> None:
        """Waits until some worker answers what it was asked last."""
        asked = [one.answer for one in self.places if one.answer is not None]
        if asked:
            futures.wait(asked, seconds, futures.FIRST_COMPLETED)
        else:  # between two reports
            time.sleep(min(seconds, GAP_S))
        self.meanwhile()

    # -- each worker, one step after the other ----------------------------------------------------------------------

    def _start(self, one: _Place) -> None:
        one.is_live, one.stage = False, "release"
        one.life += 1
        one.transitions = one.pending_steps = 0
        one.worker = self._cluster.start_worker()
        self._wait_for(one, one.worker.ask("release_name"))

    def _wait_for(self, one: _Place, answer: futures.Future[Any]) -> None:
        one.answer, one.asked_at = answer, time.monotonic()
        answer.add_done_callback(lambda _: self._wake())

    def _advance(self) -> None:
        for one in self.places:
            if one.worker is None:
                continue
            if one.answer is None:
                if one.is_live and time.monotonic() - one.asked_at >= GAP_S:
                    self._wait_for(one, one.worker.ask("report", self._tell(), _REPORT_S))
                continue
            if not one.answer.done():
                self._note_silence(one)
                continue
            answered, one.answer = one.answer, None
            try:
                answer = answered.result()
            except cluster.Died as error:
                self._note_death(one, str(error), one.worker)
                continue
            if isinstance(answer, plan.Failed):
                if answer.kind == plan.Alone.__name__:  # nobody asked it for a minute: we stood still
                    self._note_death(one, answer.what, one.worker)
                    continue
                raise answer.error()
            if one.stage == "release":
                self._compare(one, answer)
                one.stage = "begin"
                self._wait_for(one, one.worker.ask("begin", self._make_plan(one.shard)))
                continue
            if one.stage == "begin":
                self._note_begun(one, answer)
            else:
                self._note_report(one, answer)

    def _tell(self) -> plan.Told:
        return plan.Told(self.version(), self.receipt_s())

    def _compare(self, one: _Place, release: str) -> None:
        if release != plan.release():
            raise errors.RunError(
                f"ingest worker {one.shard} is of another release: {release}, and the learner is {plan.release()}",
                todo="install one release on all machines of the Ray cluster",
            )

    def _note_begun(self, one: _Place, begun: plan.Begun) -> None:
        is_first = not self._pids.get(one.shard)
        self._pids[one.shard] = begun.pid
        one.transitions, one.is_live, one.stage = begun.transitions, True, "report"
        missed = begun.steps - one.steps, begun.episodes - one.episodes
        one.steps, one.episodes = begun.steps, begun.episodes
        if any(missed):
            self._on_missed(*missed)
        for (actor_id, boot), steps in begun.marks.items():
            known = self._marks.get((actor_id, boot), 0)
            self._marks[actor_id, boot] = max(known, steps)
            if not is_first and steps > known:  # it was committed, and its worker died before it said so
                self._on_received(plan.Received(actor_id, boot, self._epoch, steps - known, steps))
        if not is_first:
            _log.info(
                "ingest worker %d is back (pid %d) after %.1f s: its actors send again what has no receipt",
                *(one.shard, begun.pid, time.monotonic() - one.died_at[-1]),
            )

    def _note_report(self, one: _Place, report: plan.Report | None) -> None:
        if report is None:
            return
        for level, text in report.said:
            _log.log(level, "ingest worker %d: %s", one.shard, text)
        for came in report.received:
            key = came.actor_id, came.boot
            self._marks[key] = max(self._marks.get(key, 0), came.mark)
            self._on_received(came)
        for actor_id, experience in report.samples:
            self.on_sample(actor_id, experience)
        for found in report.inserted:
            one.steps += found.steps
            one.episodes += len(found.returns)
            self._new.append(_outline(found))
            self.ages.note_inserted((found.actor_id, age.Made(found.boot, at_ms)) for at_ms in found.created_ms)
        one.transitions, one.pending_steps = report.transitions, report.pending_steps
        one.steps_held, one.counts = report.steps_held, report.counts
        one.steps_too_old = report.steps_too_old
        self.ages.steps_too_old = sum(each.steps_too_old + each.steps_too_old_earlier for each in self.places)
        for stage, (runs, seconds) in report.seconds.items():
            before = one.seconds.get(stage, (0, 0.0))
            self.times.add(stage, seconds - before[1], runs - before[0])
        one.seconds = report.seconds

    def _note_silence(self, one: _Place) -> None:
        limit_s = ANSWER_S if one.is_live else BEGIN_S if one.stage == "release" else REBUILD_S
        if time.monotonic() - one.asked_at > limit_s:
            self._note_death(one, f"it has not answered for {limit_s:.0f} s", one.worker)

    def _note_death(self, one: _Place, why: str, worker: cluster.Worker | None) -> None:
        """Starts a worker again in the place of one that died, unless that was done already."""
        if worker is not one.worker:
            return
        now = time.monotonic()
        if len(one.died_at) == _DEATHS and now - one.died_at[0] < _DEATHS_S:
            raise errors.RunError(
                f"ingest worker {one.shard} has died {_DEATHS + 1} times within {_DEATHS_S:.0f} s: {_first_line(why)}",
                todo="see what it wrote above; the run goes on with --resume",
            )
        if one.stage == "release" and not self._pids.get(one.shard):
            raise errors.RunError(
                f"ingest worker {one.shard} cannot be started: {_first_line(why)}",
                todo="see that the cluster has a free CPU for each worker, and actorq-fleet installed on every machine",
            )
        one.died_at.append(now)
        _log.warning("ingest worker %d died, and is started again: %s", one.shard, _first_line(why))
        if one.worker is not None:
            one.worker.kill()
        one.earlier.append(one.counts)
        one.steps_too_old_earlier += one.steps_too_old
        one.counts, one.seconds, one.steps_too_old = {}, {}, 0
        self.restarts += 1
        self._start(one)

    def _hear(self, one: _Place) -> None:
        """Takes in all that a worker can tell now: of replay that has become empty nothing is drawn."""
        self._finish_report(one)
        if one.is_live:
            self._note_report(one, self._ask(one, "report", self._tell(), 0.0))

    def _finish_report(self, one: _Place) -> None:
        """Takes in the report that is under way: it must not come after one that is asked for later."""
        while one.is_live and one.answer is not None:
            futures.wait([one.answer], _SLICE_S)
            self.meanwhile()
            self._advance()

    def _result(self, answer: futures.Future[Any]) -> Any:
        """Returns what a worker answers, and has heartbeats sent meanwhile.

        Raises:
            TimeoutError: It does not answer in `ANSWER_S`.
            Died: Its process has ended.
        """
        end = time.monotonic() + ANSWER_S
        while not answer.done() and time.monotonic() < end:
            futures.wait([answer], _SLICE_S)
            self.meanwhile()
        return answer.result(0.0)

    def _of(self, actor_id: str) -> _Place:
        return self.places[topics.shard_of(actor_id, len(self.places))]

    def _ask(self, one: _Place, method: str, *arguments: Any) -> Any:
        """Asks a worker and waits for the answer; asks the next one if it dies.

        Raises:
            ActorqError: It tells of an error, or none comes back.
        """
        end = time.monotonic() + BEGIN_S + REBUILD_S + ANSWER_S
        while time.monotonic() < end:
            asked = self.ask_later(one.shard, method, *arguments)
            if asked is None:
                self._advance()
                if one.answer is not None and not one.is_live:
                    futures.wait([one.answer], 0.1)
                self.meanwhile()
                continue
            answer = self.answer_of(one.shard, asked)
            if answer is not None or one.is_live:
                return answer
        raise errors.RunError(
            f"ingest worker {one.shard} does not come back", todo="see what it wrote above; go on with --resume"
        )


def _outline(found: plan.Inserted) -> messages.Experience:
    """Returns a message that counts as those together do that entered replay; training computes with none of it."""
    episodes = len(found.returns)
    return messages.Experience(
        boot=found.boot,
        seq=0,
        oldest=0,
        step=0,
        fingerprint="",
        assigned_epoch=0,
        epoch=found.epoch,
        version=found.version,
        draw=0,
        length=_NOTHING,
        env_index=_NOTHING,
        row=_NOTHING,
        episode_length=_NOTHING,
        observation=_NOTHING,
        action=_NOTHING,
        terminated=np.ones(episodes, np.uint8),
        truncated=np.zeros(episodes, np.uint8),
        episode_return=np.array(found.returns, np.float32),
        reward=np.zeros(found.steps, np.float32),
    )


def _first_line(text: str) -> str:
    text = text.partition(" Some common causes include")[0]  # Ray's, of any death
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "nothing is known of it"


def number(shard: int, life: int, transition: int) -> int:
    """Returns the id of a transition among those of all shards, and of all lives of a shard's place."""
    return (shard << _SHARD_BITS) | (life % _LIVES << _LIFE_BITS) | transition
