"""Decides when a policy is published, and tells who needs to know that one was."""

from __future__ import annotations

import math
import time
from concurrent import futures

import numpy as np

from learner import algorithms, config
from learner.experience import replay
from learner.fleet import roster, session
from learner.policies import publisher
from learner.quantize import calibrate, gate
from learner.run.loop import policy_scores


class Publishing:
    """Publishes the network as it is after some updates, unless the gate holds it back.

    Args:
        settings: How many updates lie between two policies.
        algorithm: Has the network.
        memory: Has observations, for ranges and for the gate.
        rng: Draws them.
        policies: Makes, judges and sends them.
        fleet: Announces them.
        actors: Know how often the fleet can take a policy.
        scores: Of published policies; asked for here.
    """

    def __init__(
        self,
        settings: config.TrainConfig,
        algorithm: algorithms.Algorithm,
        memory: replay.Replay,
        rng: np.random.Generator,
        policies: publisher.Publisher,
        fleet: session.Session,
        actors: roster.Roster,
        scores: policy_scores.PolicyScores,
    ) -> None:
        self._settings, self._algorithm, self._replay, self._rng = settings, algorithm, memory, rng
        self._publisher, self._session, self._roster, self._scores = policies, fleet, actors, scores
        self._updates, self._at = algorithm.updates, -math.inf

    @property
    def is_due(self) -> bool:
        """Returns whether a policy is to be made now."""
        if self._publisher.newest is None:
            return True
        due = self._algorithm.updates - self._updates >= self._settings.publish_period_updates
        due &= time.monotonic() - self._at >= self._roster.policy_s
        return due and self._scores.solved is None  # nothing may replace what was found good

    def begin(self) -> futures.Future[gate.Verdict]:
        """Has a policy made and, if the gate lets it pass, sent; `finish` when that is done."""
        self._updates, self._at = self._algorithm.updates, time.monotonic()
        policy = self._algorithm.policy_layers()
        seen = self._replay.observations(calibrate.sample_size(policy), self._rng)
        return self._publisher.publish(policy, *calibrate.split(seen))

    def finish(self, verdict: gate.Verdict) -> None:
        """Announces the policy if it went out, and has it scored if that is due."""
        if not verdict.passed or self._publisher.newest is None:
            return
        self.announce()
        if self._scores.is_due():
            self._scores.begin(self._publisher.newest, self._algorithm.state())

    def announce(self) -> None:
        """Says which policy is the newest."""
        self._session.announce(self._roster.the_spec.fingerprint, self._publisher.version)

    def roll_back(self) -> None:
        """Follows the algorithm, which has gone back to an earlier state."""
        self._updates = min(self._updates, self._algorithm.updates)
