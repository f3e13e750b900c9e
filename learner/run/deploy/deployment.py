"""One session that publishes a policy without training: it goes out, actors act on it, and score it beside the older.

Actors are asked for no experience: each is assigned to act greedily, and granted no step. What they hold from before
stays in their spools, since no receipt is sent; a learner that trains gets it.

With a share of canaries it goes to those first, and the returns of their own episodes beside the others' decide
(`learner/policies/canary.py`). For that they record a little, which is heard and not kept.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Any, NoReturn

import numpy as np

from broker.contract import errors, messages, signing, specs, topics
from broker.fleet import identity
from learner import config
from learner.files import records
from learner.fleet import actors, gathering, roster, session
from learner.policies import canary, publisher, retained_policy
from learner.quantize import compare, gate
from learner.run.deploy import listening, policy_file
from learner.run.loop import scoring

_log = logging.getLogger(__name__)
_TURN_S = 0.1
ACTING_S = 10.0
"""Seconds for which actors may take to act on a policy; who does not by then is named."""
DELIVERY_S = 60.0  # for a broker that was lost, until the older policy has gone out again
TRIAL_S = 600.0
_LAST_S = 2.0  # for the rest of what was granted for a trial
_GREEDY = config.DqnConfig(epsilon_start=0.0, epsilon_end=0.0)


def run(
    file: policy_file.PolicyFile, settings: config.TrainConfig, stop: threading.Event, trial_s: float = TRIAL_S
) -> dict[str, Any]:
    """Publishes a policy to a fleet, and sends the older one again if actors score this one worse.

    Args:
        file: The policy.
        settings: Fleet, brokers, how many actors to wait for and how long, episodes of a score, share of canaries.
        stop: Ends it early; what was not scored by then is taken back, if the fleet had a policy before.
        trial_s: For which canaries may take until it is decided.

    Returns:
        What became of it (see docs/policy/any_policy.md).

    Raises:
        IdentityError: The fleet has no keys here.
        BrokerUnreachable: No broker answered.
        FleetBusy: A learner is live on the fleet, or took it over.
        SpecError: No actor has an environment that the policy is for.
        EnvironmentFailure: No actor came in time, or none could score the policy, or a trial led to nothing.
        gathering.Stopped: `stop` was set.
    """
    identity.Fleet.open(settings.fleet, create=False)
    fleet = session.Session.open(settings)
    try:
        return _Deployment(file, settings, fleet, stop, trial_s).run()
    except errors.FleetBusy as busy:
        raise errors.FleetBusy(
            busy.what,
            where=busy.where,
            todo="end that learner, whose policies would replace this one, and deploy again; or name another --fleet",
        ) from busy
    finally:
        fleet.close()


class _Deployment:
    """The steps of a deployment, in order; see `run`."""

    def __init__(
        self,
        file: policy_file.PolicyFile,
        settings: config.TrainConfig,
        fleet: session.Session,
        stop: threading.Event,
        trial_s: float,
    ) -> None:
        self._file, self._settings, self._fleet, self._stop = file, settings, fleet, stop
        self._trial_s = trial_s
        self._listener: listening.Listener | None = None  # while a trial goes on
        self._trials: canary.Canary | None = None
        self._roster = roster.Roster(fleet.id, fleet.epoch, settings.env, settings.actors, unfit=file.unfit)
        self._scoring = scoring.Scoring(fleet.command, settings, fleet.id)
        self._error = ""  # of the newest report
        self._score: scoring.Score | None = None
        self._not_taken = 0

    def run(self) -> dict[str, Any]:
        retained = self._hear_retained()
        self._gather()
        older = self._usable(retained.newest())
        for topic in retained.topics:  # what goes out from now on is ours
            self._fleet.brokers.unsubscribe(topic)
        policies = publisher.Publisher(
            self._fleet,
            self._fleet.topics,
            self._roster.the_spec,
            self._file.head,
            self._fleet.epoch,
            0,
            config.GateConfig(),
            None,
            records.Records(),
            send_differences=False,
            precision=self._file.precision,
        )
        try:
            if self._settings.canary and older is not None:
                return self._try(policies, older)
            return self._deploy(policies, older)
        finally:
            policies.close()

    def _deploy(self, policies: publisher.Publisher, older: publisher.Published | None) -> dict[str, Any]:
        if self._stop.is_set():
            raise gathering.Stopped
        self._assign()
        policies.publish_file(self._file.model, self._file.head, self._file.precision).result()
        new = policies.newest
        assert new is not None
        acting = self._announce(new)
        self._log_score("the new policy", found := self._ask(new))
        if found is None:
            self._give_up(policies, older)
        before = self._ask(older, by=found.by) if older is not None else None
        if older is not None and not self._stop.is_set():
            self._log_score("the older policy", before)
        if self._stop.is_set():
            self._give_up(policies, older)
        returns = found.reports["published"].episode_return
        if before is not None and before.by != found.by:
            _log.warning("%s scored the older policy, and not %s: returns of two are not compared", before.by, found.by)
        paired = before is not None and before.by == found.by
        difference = returns - before.reports["published"].episode_return if before and paired else None
        interval = compare.interval(difference) if difference is not None else None
        is_worse = interval is not None and interval[1] < 0
        if is_worse and older is not None:
            acting = self._send_older(policies, older)
        return {
            **self._result(policies, new, acting, deployed=not is_worse),
            "scored_by": found.by,
            "seed": found.seed,
            **_returns(found),
            "older": _described(older, before) if older is not None else None,
            "difference": float(np.mean(difference)) if difference is not None else None,
            "difference_interval": interval,
            "canary": None,
        }

    def _result(
        self, policies: publisher.Publisher, new: publisher.Published, acting: list[str], *, deployed: bool
    ) -> dict[str, Any]:
        return {
            "policy": str(self._file.path),
            "sha256": new.manifest.sha256,
            "bytes": len(new.model),
            "precision": self._file.precision,
            "gate_passed": self._file.passed,
            "fleet": self._settings.fleet,
            "env_id": self._roster.env_id,
            "deployed": deployed,
            "epoch": self._fleet.epoch,
            "version": policies.version,
            "acting": acting,
            "experience_not_taken": self._not_taken,
        }

    # -- on trial ---------------------------------------------------------------------------------------------------

    def _try(self, policies: publisher.Publisher, older: publisher.Published) -> dict[str, Any]:
        """Has canaries act on the policy, beside the others on the older one, until it is decided.

        Raises:
            EnvironmentFailure: It was not: too few actors were left, or the time was up.
        """
        if self._stop.is_set():
            raise gathering.Stopped
        spec, file = self._roster.the_spec, self._file
        policies.publish_again(older).result()  # of this epoch, so that all that acts can be compared, and told apart
        self._fleet.announce("", policies.main_version)
        again = policies.main
        policies.publish_file(file.model, file.head, file.precision, topics.CANARY_CHANNEL).result()
        new = policies.newest
        assert new is not None
        assert again is not None
        trials = self._trials = canary.Canary(self._settings.canary, policies, self._roster)
        heads = {one.sent.version: specs.check_head(one.sent.head, spec.action) for one in (again, new)}
        listener = self._listener = listening.Listener(self._fleet, self._roster, spec, heads)
        trials.begin()
        outcome = self._outcome(trials)
        stopped, self._stop = self._stop.is_set(), threading.Event()  # what is under way must end
        main = policies.main
        assert main is not None
        acting = self._announce(main)
        until_s = time.monotonic() + _LAST_S
        while time.monotonic() < until_s and any(map(_records, self._roster.working())):
            self._poll()
        if stopped:
            raise gathering.Stopped
        if outcome.verdict == "broken off":
            raise errors.EnvironmentFailure(
                f"the trial led to nothing after {outcome.pairs} pairs of episodes: {outcome.why}",
                where=f"fleet {self._settings.fleet!r}{self._roster.refusals}",
                todo=f"the older policy is out again; acting on it: {', '.join(acting) or 'nobody yet'}. See that "
                "actors stay and that their episodes end, or give more --trial-s; refused meanwhile: "
                f"{dict(listener.refused) or 'nothing'}",
            )
        return {
            **self._result(policies, new, acting, deployed=outcome.verdict == "promoted"),
            "scored_by": ", ".join(outcome.actors),
            "seed": None,
            "return_mean": outcome.return_mean,
            "returns": None,
            "older": _described(older, None) | {"return_mean": outcome.incumbent_return_mean},
            "difference": None,
            "difference_interval": None,
            "canary": dataclasses.asdict(outcome),
            "experience_refused": dict(listener.refused),
        }

    def _outcome(self, trials: canary.Canary) -> canary.Outcome:
        until_s = time.monotonic() + self._trial_s
        while True:
            self._poll()
            if (outcome := trials.advance()) is not None:
                return outcome
            why = "stopped" if self._stop.is_set() else f"not decided within {self._trial_s:g} s"
            if (self._stop.is_set() or time.monotonic() > until_s) and (outcome := trials.end(why)) is not None:
                return outcome

    # -- before it goes out -----------------------------------------------------------------------------------------

    def _hear_retained(self) -> retained_policy.RetainedPolicy:
        """Subscribes to what brokers retain; it is here once the session has joined."""
        verifier = signing.LearnerVerifier(self._fleet.fleet.sealer.public_key)
        heard = retained_policy.RetainedPolicy(self._fleet.topics, verifier)
        for topic in heard.topics:
            self._fleet.brokers.subscribe(topic, heard.hear)
        return heard

    def _gather(self) -> None:
        """Waits for actors whose environment the policy is for."""
        try:
            gathering.gather(self._settings, self._fleet, self._roster, self._stop)
        except errors.EnvironmentFailure as failure:
            if not self._roster.refusals:
                raise
            raise errors.SpecError(
                f"the policy does not fit what actors run: {self._roster.refusals.removeprefix('; ')}",
                where=str(self._file.path),
                todo="deploy one that was made for their environment, with its wrappers; or start actors that run it",
            ) from failure
        _log.info("%s here, %s", actors.names(self._roster.working()), self._roster.env_id)

    def _usable(self, found: messages.Policy | None) -> publisher.Published | None:
        """Returns what the fleet had before, if it can go out again."""
        if found is None:
            _log.info("the fleet has no policy yet: there is none to compare this one with")
            return None
        sent, spec = found.manifest, self._roster.the_spec
        if sent.fingerprint != spec.fingerprint or sent.head not in spec.action.heads:
            _log.warning("the fleet's policy %s is for another environment: it cannot go out again", found.order)
            return None
        unknown = np.zeros(0, np.float32)
        sent = dataclasses.replace(sent, expires_s=0.0)  # actors would not score it
        return publisher.Published(sent, found.model.tobytes(), gate.Verdict(True, ""), (), unknown)

    # -- while it is out --------------------------------------------------------------------------------------------

    def _announce(self, newest: publisher.Published) -> list[str]:
        """Says which policy is the newest; returns who acts on it, after a while."""
        order = newest.sent.order
        self._fleet.announce("", order.version)  # no fingerprint: actors send what they hold to whom names one
        until_s, working = time.monotonic() + ACTING_S, self._roster.working()
        acting: list[actors.Actor] = []
        while not self._stop.is_set() and time.monotonic() < until_s:
            self._poll()
            working = self._roster.working()
            acting = [one for one in working if one.state and _acts_on(one.state.vitals) == order]
            if working and len(acting) == len(working):
                break
        late = [one for one in working if one not in acting]
        if late:
            _log.warning("not within %g s: %s; they take it when they can", ACTING_S, actors.names(late))
        if acting:
            _log.info("policy %s acts on %s", order, actors.names(acting))
        return [one.actor_id for one in acting]

    def _ask(self, policy: publisher.Published, by: str = "") -> scoring.Score | None:
        """Returns the score of a policy, by this actor if it is still there; None if none came in time."""
        asking = self._scoring
        asking.begin(policy)
        working = self._roster.working()
        limit_s = max(scoring.TIMEOUT_S, 2.0 * asking.limits(working[0])[1]) if working else scoring.TIMEOUT_S
        asking.set_end(time.monotonic() + limit_s)
        failures, self._score = asking.failures, None
        while asking.busy and not self._stop.is_set() and time.monotonic() < asking.end_s:
            working = self._roster.working()
            if working and asking.failures - failures >= len(working):  # each has had its turn
                break
            asked = [one for one in working if one.actor_id == by] or working
            asking.advance(asked, time.monotonic(), self._fleet.brokers.changes)
            self._poll()
        return self._score

    def _send_older(self, policies: publisher.Publisher, older: publisher.Published) -> list[str]:
        policies.publish_again(older).result()
        assert policies.newest is not None
        until_s = time.monotonic() + DELIVERY_S
        while not self._fleet.brokers.connected and time.monotonic() < until_s:
            self._poll()
        _log.warning("the older policy %s goes out again, as %s", older.sent.order, policies.newest.sent.order)
        return self._announce(policies.newest)

    def _give_up(self, policies: publisher.Publisher, older: publisher.Published | None) -> NoReturn:
        """Takes back what nobody could score."""
        stopped = self._stop.is_set()
        acting: list[str] = []
        if older is not None:
            self._stop = threading.Event()  # what is under way must end
            acting = self._send_older(policies, older)
        elif stopped:
            _log.warning("the new policy stays out, and was not scored: the fleet had none before")
        if stopped:
            raise gathering.Stopped
        raise errors.EnvironmentFailure(
            f"no actor could score the policy: {self._error or 'none answered in time'}",
            where=f"fleet {self._settings.fleet!r}{self._roster.refusals}",
            todo=f"the older policy is out again; acting on it: {', '.join(acting) or 'nobody yet'}"
            if older
            else "it is out all the same, for there was none before",
        )

    # -- what arrives -----------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        self._fleet.beat()
        for arrival in self._fleet.drain(_TURN_S):
            message = arrival.message
            if isinstance(message, messages.ActorState):
                self._fleet.compare_epochs(arrival.actor_id, message.vitals.policy_epoch)
                now_s = time.monotonic()
                self._roster.observe(arrival.actor_id, message, retained=arrival.retained, now_s=now_s)
            elif isinstance(message, messages.Report):
                self._receive_report(arrival.actor_id, message)
            elif self._listener is not None and self._trials is not None:
                newest = self._trials.newest_version(arrival.actor_id)
                experience = self._listener.receive(arrival.actor_id, arrival.topic, message, newest)
                if experience is not None:
                    self._trials.consider(arrival.actor_id, experience)
            else:
                self._not_taken += 1
        if self._listener is not None:
            self._listener.send_receipts()
        self._roster.expire(time.monotonic())
        self._assign()

    def _receive_report(self, actor_id: str, report: messages.Report) -> None:
        if not self._scoring.awaits(report, actor_id):
            self._fleet.note_outcome(self._fleet.topics.report(actor_id), 0, None)
            return
        if report.error:
            self._error = f"{actor_id}: {report.error[:500]}"
            _log.warning("actor %s gave no score: %s", actor_id, report.error[:500])
        self._score = self._scoring.receive(report) or self._score

    def _assign(self) -> None:
        """Has actors act greedily, and record what a trial hears. Others of the fleet are left as they are."""
        working, listener, trials = self._roster.working(), self._listener, self._trials
        for actor in working:
            if actor.assignment is not None and trials is None:
                continue
            ahead = listener.ahead(actor) if listener is not None and trials is not None and trials.is_trying else 0
            assigned = self._roster.assign(
                actor,
                steps_left=ahead * len(working),
                env_steps=0,
                lockstep_version=0,
                settings=self._settings,
                exploration=_GREEDY,
                now_s=time.monotonic(),
            )
            if assigned is not None:
                self._fleet.retain(self._fleet.topics.assignment(actor.actor_id), assigned)
        for actor in self._roster.actors.values() if trials is not None else ():
            if not actor.live and (moved := self._roster.moved(actor)) is not None:
                self._fleet.retain(self._fleet.topics.assignment(actor.actor_id), moved)

    @staticmethod
    def _log_score(what: str, score: scoring.Score | None) -> None:
        if score is None:
            _log.warning("%s has no score", what)
        else:
            _log.info("%s returns %.1f, by %s", what, score.mean("published"), score.by)


def _records(actor: actors.Actor) -> bool:
    """Returns whether an actor may still record steps, or those are still to come."""
    return actor.assignment is not None and actor.recorded < actor.assignment.steps_granted


def _acts_on(vitals: messages.Vitals) -> messages.Order:
    return messages.Order(vitals.policy_epoch, vitals.policy_version)


def _returns(score: scoring.Score | None) -> dict[str, Any]:
    values = score.reports["published"].episode_return if score else None
    return {
        "return_mean": float(values.mean()) if values is not None else None,
        "returns": [float(value) for value in values] if values is not None else None,
    }


def _described(older: publisher.Published, score: scoring.Score | None) -> dict[str, Any]:
    """Returns what the fleet had before."""
    sent = older.sent
    return {"epoch": sent.epoch, "version": sent.version, "sha256": sent.sha256, **_returns(score)}
