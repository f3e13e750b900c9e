"""Tells people what a run waits for, and, where it learned nothing, why."""

from __future__ import annotations

import logging

from learner import config
from learner.experience import ingestion
from learner.fleet import actors, roster
from learner.run.loop import first_steps, pace, policy_scores
from learner.run.reports import notices

_log = logging.getLogger(__name__)


class Waiting:
    """Says what is waited for while nothing moves.

    Args:
        settings: The budget.
        fleet: Who works.
        validator: Knows what was refused.
        steps: Counts steps and samples.
        gathering: Knows how many of the first steps came.
        scores: Knows whose answer is awaited.
        failures: Knows whose environment failed.
    """

    def __init__(
        self,
        settings: config.TrainConfig,
        fleet: roster.Roster,
        validator: ingestion.Counts,
        steps: pace.Pace,
        gathering: first_steps.FirstSteps,
        scores: policy_scores.PolicyScores,
        failures: notices.Notices,
    ) -> None:
        self._settings, self._roster, self._validator, self._pace = settings, fleet, validator, steps
        self._first_steps, self._scores, self._notices = gathering, scores, failures

    def notice(self, now_s: float) -> None:
        """Logs what is waited for, if nothing has moved for some time."""
        sampled = self._pace.limiter.sampled
        # Of a slow environment updates are few; before the first one, it is the question when that will be
        if self._notices.is_stuck((sampled, self._pace.env_steps if sampled else 0), now_s):
            _log.info("%s", self._awaited(now_s))

    def _awaited(self, now_s: float) -> str:
        working = self._roster.working()
        if not working:
            return "waiting for actors: none is here"
        if scores := self._scores.describe(now_s):
            return f"waiting for {scores}"
        if not self._pace.env_steps:
            return f"waiting for the first steps of {actors.names(working)}"
        if self._first_steps.are_complete:
            return f"waiting for new steps of {actors.names(working)}"
        return self._first_steps.describe(now_s)

    def nothing_learned(self) -> str:
        """Returns why there was no update, in a run that had none."""
        refused = ", ".join(f"{reason} {count}" for reason, count in self._validator.refused.items())
        env_steps = self._pace.env_steps
        if self._first_steps.are_complete:
            spent = self._pace.budget_spent
            what = f"{self._settings.max_env_steps:,} steps were over" if spent else "time ended"
            return f"the {what} before the networks were compiled"
        if self._notices.environments:
            worst, known = max(self._notices.environments.items(), key=lambda one: one[1].count)
            return f"the environment of actor {worst} failed {notices.describe(known)}"
        if env_steps:
            return f"{env_steps:,} of {self._pace.limiter.min_size:,} first steps came before the end"
        if refused:
            return f"no experience was accepted: {refused}"
        return f"no experience came from {actors.names(self._roster.working()) or 'any actor: none is here'}"
