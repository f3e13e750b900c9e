"""Decides when a policy is published, and tells who needs to know that one was."""

from __future__ import annotations

import math
import time
from concurrent import futures
from typing import Any

import numpy as np

from broker.contract import topics
from learner import algorithms, config
from learner.experience.buffers import memory
from learner.fleet import roster, session
from learner.policies import canary, publisher, trial_record
from learner.quantize import gate
from learner.run.loop import policy_scores


class Publishing:
    """Publishes the network as it is after some updates, unless the gate holds it back.

    A policy is made of a copy, and so updates may go on meanwhile.

    Where policies are tried by canaries, none is made while a trial goes on, nor while too few actors are there for
    one: what waits is the network, and so always the newest. The first one of a run goes to all, for there is nothing
    to compare it with.

    Args:
        settings: How many updates lie between two policies; on policy one follows on each phase.
        algorithm: Has the network.
        kept: Has observations, for ranges and for the gate.
        rng: Draws them.
        policies: Makes, judges and sends them.
        fleet: Announces them.
        actors: Know how often the fleet can take a policy.
        scores: Of published policies; asked for here. Those on trial get none before they are proven.
        trials: Of policies; None sends each to all at once.
        record: Where it is written which policy was proven, and how trials ended; for `trials`.

    Attributes:
        is_on_policy: Whether the next updates learn from what the policy does.
        making: What the gate says of the policy that is being made; None while none is.
    """

    def __init__(
        self,
        settings: config.Settings,
        algorithm: algorithms.Algorithm,
        kept: memory.Observed,
        rng: np.random.Generator,
        policies: publisher.Publisher,
        fleet: session.Session,
        actors: roster.Roster,
        scores: policy_scores.PolicyScores,
        trials: canary.Canary | None = None,
        record: trial_record.TrialRecord | None = None,
    ) -> None:
        self._algorithm, self._memory, self._rng = algorithm, kept, rng
        self.is_on_policy = isinstance(settings.algorithm, config.OnPolicyConfig)
        self._period_updates = 1 if self.is_on_policy else settings.train.publish_period_updates
        self._publisher, self._session, self._roster, self._scores = policies, fleet, actors, scores
        self._trials, self._record = trials, record
        self._state: algorithms.State | None = None  # behind the newest one, if that is to be scored or tried
        self._updates, self._at = algorithm.updates, -math.inf
        self.making: futures.Future[gate.Verdict] | None = None

    @property
    def is_due(self) -> bool:
        """Returns whether a policy is to be made now."""
        if self.making is not None:
            return False
        if self._publisher.newest is None:
            return True
        due = self._algorithm.updates - self._updates >= self._period_updates
        due &= time.monotonic() - self._at >= self._roster.policy_s
        due &= self._scores.solved is None  # nothing may replace what was found good
        return due and (self._trials is None or self._trials.may_begin)

    @property
    def is_awaited(self) -> bool:
        """Returns whether updates wait for a policy that the fleet cannot take yet: the next ones learn from it."""
        if not self.is_on_policy:
            return False
        is_behind = self._publisher.newest is not None and self._algorithm.updates > self._updates
        return is_behind and self._scores.solved is None

    @property
    def has_observations(self) -> bool:
        """Returns whether there is anything that ranges can be found from."""
        return self._memory.has_observations

    def begin(self) -> futures.Future[gate.Verdict]:
        """Has a policy made and, if the gate lets it pass, sent; `advance` goes on when that is done.

        Returns:
            `making`.
        """
        self._updates, self._at = self._algorithm.updates, time.monotonic()
        policy = self._algorithm.policy_layers()
        sample = self._publisher.sample(policy)
        seen = self._memory.observations(sample.total, self._rng)
        on_trial = self._trials is not None and self._publisher.main is not None
        channel = topics.CANARY_CHANNEL if on_trial else topics.MAIN_CHANNEL
        self._state = self._algorithm.state() if on_trial or self._scores.is_due() else None
        self.making = making = self._publisher.publish(policy, *sample.split(seen), channel)
        return making

    def advance(self) -> None:
        """Takes note of a policy that has been made, and follows the trial that goes on; call again and again."""
        if self.making is not None and self.making.done():
            made, self.making = self.making, None
            self._finish(made.result())
        if self._trials is not None and (outcome := self._trials.advance()) is not None:
            self.announce()
            if outcome.verdict == "promoted":
                self._score(self._publisher.main)

    def _finish(self, verdict: gate.Verdict) -> None:
        """Announces the policy if it went out, and has it scored if that is due."""
        if not verdict.passed:
            return
        if self._trials is not None and self._publisher.newest is not self._publisher.main:
            self._trials.begin()
            return
        self.announce()
        self._score(self._publisher.newest)

    def _score(self, policy: publisher.Published | None) -> None:
        """Has a policy scored if one is due, and what was behind it is known."""
        if policy is not None and self._state is not None and self._scores.is_due():
            self._scores.begin(policy, self._state)

    def end_trial(self) -> bool:
        """Breaks off the trial that goes on, if one does: no actor is left with a policy that nobody will judge."""
        if self._trials is None or self._trials.end("the session ends") is None:
            return False
        self.announce()
        return True

    def announce(self) -> None:
        """Says which policy is the newest that goes to all."""
        self._session.announce(self._roster.the_spec.fingerprint, self._publisher.main_version)
        if self._record is not None and self._trials is not None and self._publisher.main is not None:
            self._record.note(self._publisher.main, self._trials.outcomes)

    def metrics(self) -> dict[str, float]:
        """Returns how trials go, for a row of metrics; nothing where there are none."""
        return self._trials.metrics() if self._trials is not None else {}

    def summary(self) -> dict[str, Any]:
        """Returns how trials ended, for the summary; None where there are none."""
        return {"canary": self._trials.summary() if self._trials is not None else None}

    def roll_back(self) -> None:
        """Follows the algorithm, which has gone back to an earlier state."""
        self._updates = min(self._updates, self._algorithm.updates)
