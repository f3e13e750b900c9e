"""Takes in what arrives: states into the roster, experience into replay, reports into scores."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from broker.contract import messages
from broker.program import stopwatch
from learner.audit import auditor, drift
from learner.experience import ingestion, ledger, opening, rate_limiter, validate
from learner.fleet import budget, receipts, roster, session
from learner.policies import canary, publisher
from learner.run.loop import policy_scores
from learner.run.reports import notices, progress

ARRIVALS = 64  # messages that are taken in at once, at most: about 10 ms, then updates have their turn
WAY_MAX_S = 60.0  # from actor to learner; what says more has no clock


class Receiver:
    """Passes each message on to the stage that it is for.

    Args:
        fleet: What arrives comes from here.
        actors: Takes in states.
        ingesting: Takes in experience.
        owed: Sends receipts for it.
        limiter: Counts transitions that entered replay.
        counted: Counts episodes and policy lag.
        publisher: Is told which policy an actor acts on.
        scores: Takes in reports.
        failures: Takes in how environments fail.
        checks: Looks at a sample of the experience.
        drifting: Follows the experience.
        opener: Opens messages of frames; None where there are none.
        trials: Follow the experience, too, where policies are tried.

    Attributes:
        ingest: As given.
        times: `wait`: for experience, without which there is no update to make; `broker`: from an actor's making of a
            heartbeat to its arrival here, where both have one clock.
    """

    def __init__(
        self,
        fleet: session.Session,
        actors: roster.Roster,
        ingesting: ingestion.Ingestion,
        owed: receipts.Receipts,
        limiter: rate_limiter.RateLimiter,
        counted: progress.Progress,
        publisher: publisher.Publisher,
        scores: policy_scores.PolicyScores,
        failures: notices.Notices,
        checks: auditor.Auditor,
        drifting: drift.Drift,
        opener: opening.Opener | None = None,
        trials: canary.Canary | None = None,
    ) -> None:
        self._session, self._roster, self._limiter, self._progress = fleet, actors, limiter, counted
        self._publisher, self._scores, self._notices = publisher, scores, failures
        self.ingest = ingesting
        self._receipts, self._auditor, self._drift, self._trials = owed, checks, drifting, trials
        self._opener = opener
        gathered = fleet.times.totals()["receive"]
        self._measured_at, self._measured = time.monotonic(), (0, gathered.runs, gathered.seconds, 0.0)
        self.times = stopwatch.Stopwatch("wait", "broker")

    def receive(self, wait_s: float, *, starved: bool = False) -> None:
        """Takes in what has arrived; waits up to `wait_s` for an arrival, a commit or an update to end.

        Args:
            wait_s: At most.
            starved: Whether no update can be made before more experience is here.
        """
        waited_s = self._session.waited_s
        if self.ingest.is_full:
            self.commit(wait=True)
        for arrival in itertools.islice(self._session.drain(min(wait_s, self.ingest.due_in_s)), ARRIVALS):
            message = arrival.message
            if isinstance(message, messages.ActorState):
                self._receive_state(arrival.actor_id, message, arrival.retained)
            elif isinstance(message, messages.Report):
                self._receive_report(arrival.actor_id, message)
            else:
                if self._opener is None:
                    self._receive_experience(arrival.actor_id, arrival.topic, message)
                else:
                    if self._opener.is_full:
                        self._receive_experience(*self._opener.pop())
                    self._opener.add(arrival.actor_id, arrival.topic, message)
                if self.ingest.is_full:
                    break
        if self._opener is not None:
            self._receive_opened(self._opener, wait=False)
        self.commit(wait=False)
        self._publisher.tidy()
        if starved:
            self.times.add("wait", self._session.waited_s - waited_s)

    def commit(self, *, wait: bool) -> None:
        """Inserts what is durable into replay, and sends receipts.

        Args:
            wait: Until all that was received is.
        """
        if wait and self._opener is not None:
            self._receive_opened(self._opener, wait=True)
        for experience in self.ingest.commit(wait=wait):
            self.count(experience)
        self._receipts.send(at_once=wait)

    def close(self) -> None:
        """Ends the thread that opens messages, if there is one."""
        if self._opener is not None:
            self._opener.close()

    def count(self, experience: messages.Experience) -> None:
        """Counts a message that has entered replay."""
        self._limiter.insert(len(experience.reward))
        ours = experience.epoch == self._session.epoch
        # What is on trial is the newest of its channel
        newest = max(self._publisher.main_version, experience.version) if ours else None
        self._progress.count(experience, newest)

    def measure(self, now_s: float) -> None:
        """Measures every few seconds what taking in costs, and has the fleet's budget follow from it."""
        elapsed_s = now_s - self._measured_at
        if elapsed_s < budget.WINDOW_S:
            return
        receive = self._session.times.totals()["receive"]
        own = self.ingest.times.totals()
        loop_s = receive.seconds + self.ingest.loop_s + self._receipts.spent_s
        opened_s = self._opener.spent_s if self._opener is not None else 0.0
        before, self._measured = self._measured, (own["decode"].runs, receive.runs, loop_s, opened_s)
        self._measured_at = now_s
        self._roster.budget.steer(
            budget.Seen(
                actors=len(self._roster.working()),
                seconds=elapsed_s,
                messages=own["decode"].runs - before[0],
                taken=receive.runs - before[1],
                # Two stages beside each other: the slower one says what can be taken in
                busy_s=max(loop_s - before[2], opened_s - before[3]),
                waiting=self._session.waiting,
                delays_s=self._session.broker_delays_s(),
            )
        )

    def _receive_state(self, actor_id: str, state: messages.ActorState, retained: bool) -> None:
        now = time.monotonic()
        actor = self._roster.observe(actor_id, state, retained=retained, now_s=now)
        for name, rejection in self._roster.rejections():
            self._session.count_refused("state.second_machine")
            self._session.tell(self._session.topics.assignment(name), rejection)
        if not retained:
            self._notices.observe(actor_id, state, now)
            self._note_way(state.vitals.created_s)
            self.ingest.ages.hear(actor_id, state.boot, state.vitals.created_s)
        version = state.vitals.policy_version
        self._session.compare_epochs(actor_id, state.vitals.policy_epoch)
        if state.vitals.policy_epoch == self._session.epoch and version > actor.version and not retained:
            actor.version = version
            self._publisher.acts(version, now)

    def _note_way(self, created_s: float) -> None:
        """Takes note of how long a state was on its way. Clocks of two machines cannot tell."""
        way_s = time.time() - created_s
        if self._session.is_local and 0.0 <= way_s < WAY_MAX_S:
            self.times.add("broker", way_s)

    def _receive_opened(self, opener: opening.Opener, *, wait: bool) -> None:
        try:
            for one in opener.opened(wait=wait):
                self._receive_experience(*one)
        except BaseException:
            opener.drop()  # a receipt for what is behind it would cover it, too
            raise

    def _receive_experience(
        self, actor_id: str, topic: str, payload: bytes, opened: Callable[[], validate.Opened] | None = None
    ) -> None:
        trials = self._trials
        newest = self._publisher.version if trials is None else trials.newest_version(actor_id)
        validated = self.ingest.receive(actor_id, topic, payload, newest, opened)
        if validated is None or (experience := validated.experience) is None:
            return
        # Refused or not, they used up its grant
        self._roster.count_received(actor_id, experience.boot, experience.assigned_epoch, len(experience.reward))
        if validated.entry.verdict == ledger.OK:
            self._auditor.consider(actor_id, experience)
            self._drift.consider(actor_id, experience)
            if trials is not None:
                trials.consider(actor_id, experience)

    def _receive_report(self, actor_id: str, report: messages.Report) -> None:
        if not self._scores.receive(actor_id, report):
            self._session.count_refused("report.unasked")
            self._session.note_outcome(self._session.topics.report(actor_id), 0, None)
