"""Decides which published policies are scored, and remembers what came of it: one that is good ends the run."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from broker.contract import messages
from learner import algorithms, config
from learner.fleet import actors
from learner.policies import publisher
from learner.quantize import compare
from learner.run.loop import pace, scoring

_log = logging.getLogger(__name__)
_TIMINGS = ("invoke_us_p50", "invoke_us_p99", "observation_to_action_us_p50", "observation_to_action_us_p99")


class PolicyScores:
    """Has policies scored, one at a time, and remembers the newest score.

    Args:
        settings: Episodes and target.
        asking: Asks actors.
        publisher: Has the newest policy.
        steps: The pace of the run, and when it ends.
        state: The algorithm's state behind the newest policy.

    Attributes:
        solved: The score that reached the target, and was confirmed; None as long as there is none.
        last: The newest score.
        state: The algorithm's state behind the policy that is being scored, or was last.
    """

    def __init__(
        self,
        settings: config.TrainConfig,
        asking: scoring.Scoring,
        publisher: publisher.Publisher,
        steps: pace.Pace,
        state: algorithms.State,
    ) -> None:
        self._settings, self._scoring, self._publisher, self._pace = settings, asking, publisher, steps
        self._scoring.set_end(steps.end_s)
        self._finishing = False
        self._env_steps = 0  # when the policy that is being scored, or was last, was made
        self.solved: scoring.Score | None = None
        self.last: scoring.Score | None = None
        self.state = state

    @property
    def busy(self) -> bool:
        """Returns whether a policy is being scored."""
        return self._scoring.busy

    @property
    def took_s(self) -> float:
        """The seconds that the newest answer that was a score took."""
        return self._scoring.took_s

    def is_due(self) -> bool:
        """Returns whether a policy that has just been published is to be scored."""
        rested = time.monotonic() >= self._scoring.rests_until_s
        return bool(self._settings.evaluate_episodes) and rested and not self.busy and self.solved is None

    def begin(self, policy: publisher.Published, state: algorithms.State) -> None:
        """Begins to score a policy that was made from this state of the algorithm."""
        self.state, self._env_steps = state, self._pace.env_steps
        self._scoring.begin(policy)

    def advance(self, actors: list[actors.Actor], now_s: float, connection: int) -> None:
        """Sends the next command if one is due (see Scoring.advance)."""
        self._scoring.advance(actors, now_s, connection)

    def describe(self, now_s: float) -> str:
        """Returns whose answer is awaited, on what, and how long yet; empty if none is."""
        return self._scoring.describe(now_s)

    def receive(self, actor_id: str, report: messages.Report) -> bool:
        """Takes in a report; returns false if nobody asked for it."""
        asking = self._scoring
        if not asking.awaits(report, actor_id):
            return False
        failures, score = asking.failures, asking.receive(report)
        if asking.failures > failures:
            rest_s = asking.rests_until_s - time.monotonic()
            goes_on = f"; training goes on, the next one is asked for in {rest_s:.0f} s" if rest_s > 0 else ""
            what = report.error[:500] or "its answer is incomplete"
            _log.warning("actor %s gave no score: %s%s", actor_id, what, "" if self._finishing else goes_on)
        if score is None:
            return True
        self.last = score
        if score.confirming and score.mean("published") >= self._settings.solved_return:
            self.solved = score
            if score.alone:
                _log.warning("%s alone says that the policy is good: no other actor was there to confirm it", score.by)
        return True

    def begin_last(self, newest: publisher.Published, working: list[actors.Actor]) -> float:
        """Begins to score the last policy, within `max_wall_s`, where that is set.

        Args:
            newest: That policy.
            working: Actors that may score it.

        Returns:
            The monotonic time until which its score is to be awaited; 0 if there is no time left for it.
        """
        now, asking = time.monotonic(), self._scoring
        limit_s = 2.0 * asking.limits(working[0])[1] if working else scoring.TIMEOUT_S
        end_s = min(now + limit_s, self._pace.end_s + pace.FINAL_SCORE_S)
        asking.set_end(end_s)
        score_s = pace.SCORES_S * self.took_s
        if end_s - now < limit_s and end_s - now <= score_s:
            takes = f", and a score takes {score_s:.0f} s" if score_s else ""
            _log.warning("the last policy is not scored: the time is up%s", takes)
            return 0.0
        who = f"{actors.names(working)} to score" if working else "an actor, of which none is here, to score"
        _log.info("waiting for %s the last policy, at most %.0f s", who, end_s - now)
        self._finishing, self._env_steps = True, self._pace.env_steps
        asking.begin(newest, final=True)
        return end_s

    def end_last(self, newest: publisher.Published) -> None:
        """Takes what is known of the last policy, though it may not be confirmed."""
        found = self._scoring.unconfirmed
        if found is not None and found.policy is newest and (self.last is None or self.last.policy is not newest):
            self.last = found  # better than none at all
        if self.last is None or self.last.policy is not newest:
            _log.warning("the last policy has no score: none came in time")

    def metrics(self) -> dict[str, float]:
        """Returns the newest score, if there is one, for a row of metrics."""
        return {} if self.last is None else {"published_return_mean": self.last.mean("published")}

    def summary(self) -> dict[str, Any]:
        """Returns what is known of the policy that solved the task, or else was scored last, for the summary."""
        score, precision = self.solved or self.last, self._settings.precision
        published = score.reports.get("published") if score else None
        float32 = score.reports.get("float32") if score else None
        policy = score.policy if score else self._publisher.newest
        measures = policy.verdict.measures if policy else {}
        return {
            "solved": self.solved is not None,
            "solved_env_steps": self._env_steps if self.solved else None,
            **_returns(precision, published),
            **_returns("fp32", float32),
            **_difference(published, float32),
            "score_seed": score.seed if score else None,
            "scored_by": score.scored_by if score else [],
            "greedy_agreement": measures.get("agreement"),
            "greedy_agreement_weighted": measures.get("agreement_weighted"),
            "ties": measures.get("ties"),
            "action_error_mean": measures.get("action_error_mean"),
            "action_error_p99": measures.get("action_error_p99"),
            "kl_mean": measures.get("kl_mean"),
            "kl_p99": measures.get("kl_p99"),
            f"policy_{precision}_bytes": len(policy.model) if policy else None,
            "policy_fp32_bytes": len(policy.float32) if policy and policy.layers else None,
            **{key: published.values.get(key) if published else None for key in _TIMINGS},
            "runtime": published.labels.get("runtime") if published else None,
            "delegate": published.labels.get("delegate") if published else None,
        }


def _returns(name: str, report: messages.Report | None) -> dict[str, Any]:
    values = report.episode_return if report else None
    return {
        f"{name}_return_mean": float(values.mean()) if values is not None else None,
        f"{name}_return_std": float(values.std()) if values is not None else None,
        f"{name}_returns": [float(v) for v in values] if values is not None else None,
    }


def _difference(published: messages.Report | None, float32: messages.Report | None) -> dict[str, Any]:
    """Returns how the returns of the same episodes differ, published less fp32."""
    difference = published.episode_return - float32.episode_return if published and float32 else None
    return {
        "return_difference": float(np.mean(difference)) if difference is not None else None,
        "return_difference_interval": compare.interval(difference) if difference is not None else None,
    }
