"""Scores of published policies, by actors: greedy, seeded, on the runtime that will run them.

Every score of a policy uses the same screening seeds. One that reaches the target is scored again on seeds that no
screening has seen, and only that counts. If it reaches it there too, its fp32 twin plays the same episodes.

No actor's word ends training alone: a target that one says is reached, another one has to confirm, as long as there is
another that answers. All take turns, so that one that lies, fails or is silent holds nothing up for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from broker.contract import messages
from learner import config
from learner.fleet import actors
from learner.policies import publisher

TIMEOUT_S = 120.0
RATED = 5.0
"""The factor by which an evaluation may take longer on an actor that holds a control rate."""
_ON_THE_WAY = 0.9  # of the time that is left: command and answer take some, too
_LONG_S, _REST = 5.0, 2.0
"""A score that takes so long is followed by so many times as long without: most of the time is for training."""
_REST_FIRST_S, _REST_LIMIT_S = 5.0, 3600.0
_CONFIRM_SEED_STRIDE = 100_000
_OWED = 64
_MUTE = 3
"""Failures in a row after which an actor is no witness: where it is the only other one, a score needs none."""


@dataclass(slots=True)
class Score:
    """The score of one policy; `reports` are those of the policy as it was published, and of `float32`.

    `witness` is the actor that said before that the target is reached, and `by` the one that the reports are from;
    `alone` says that there was no other one to confirm it, and `final` that it is the run's last.
    """

    policy: publisher.Published
    confirming: bool = False
    seed: int = 0
    reports: dict[str, messages.Report] = field(default_factory=dict)
    witness: str = ""
    by: str = ""
    alone: bool = False
    final: bool = False

    def mean(self, which: str) -> float:
        """Returns the mean return over the scored episodes."""
        return float(self.reports[which].episode_return.mean())

    @property
    def scored_by(self) -> list[str]:
        """Those who said so, the one that the reports are from last."""
        return [name for name in dict.fromkeys((self.witness, self.by)) if name]


class Scoring:
    """Asks actors for the score of one policy at a time.

    Args:
        send: Sends a Command to an actor; false if it cannot go out now.
        settings: Episodes, seeds and target.
        session: Part of command ids: an actor carries out each id once.

    Attributes:
        failures: Commands that brought no score.
        end_s: Monotonic time by which every answer must have come.
        took_s: How long the newest answer that was a score took.
        rests_until_s: Monotonic time before which no score should begin, because those before failed or took long: an
            actor that acts flat out takes no steps meanwhile.
        unconfirmed: The newest score that reached the target, and was still to be confirmed.
    """

    def __init__(
        self, send: Callable[[str, messages.Command], bool], settings: config.TrainConfig, session: str
    ) -> None:
        self._send = send
        self._session = session
        self._settings = settings
        self._current: Score | None = None
        self._awaited: tuple[str, str] = ("", "")  # command id and which of the reports
        self._deadline_s = 0.0
        self._asked = ("", 0, 0)  # actor, its boot, our connection
        self._owed: dict[str, str] = {}  # command ids without an answer, newest last, and the actor that got each
        self._commands = 0
        self._confirmations = 0
        self._asked_last: dict[str, int] = {}  # the number of the newest command to each actor
        self._failed: dict[str, int] = {}  # failures in a row, by actor
        self._tried: set[str] = set()  # who failed at the score at hand
        self._has_others = False  # beside the one asked last
        self.unconfirmed: Score | None = None
        self.failures = 0
        self.end_s = math.inf
        self.took_s = 0.0
        self.rests_until_s = -math.inf
        self._asked_at = 0.0
        self._actors = 1
        self._failed_in_a_row = 0

    @property
    def busy(self) -> bool:
        """Returns whether a policy is being scored."""
        return self._current is not None

    def set_end(self, end_s: float) -> None:
        """Sets the monotonic time by which every answer must have come."""
        self.end_s = end_s

    def begin(self, policy: publisher.Published, *, final: bool = False) -> None:
        """Starts scoring a policy; a `final` score has no screening, and fp32's beside it, whatever it is."""
        self._current = Score(policy, final=final)
        self._awaited = ("", "")
        self._tried.clear()
        if final:
            self._confirm()
        else:
            self._current.seed = self._settings.evaluate_seed

    def advance(self, actors: list[actors.Actor], now_s: float, connection: int = 0) -> None:
        """Sends the next command when none is awaited, or again when no answer will come any more. Not beyond `end_s`.

        Args:
            actors: Who works.
            now_s: Monotonic time.
            connection: Another number when a connection was made or lost: commands and answers do not outlive one.
        """
        score = self._current
        if score is None or not actors:
            return
        present = any((actor.actor_id, actor.boot, connection) == self._asked for actor in actors)
        if self._awaited[0] and present and now_s < self._deadline_s:
            return
        if now_s >= self.end_s:
            return
        if self._awaited[0]:
            self._fail(blame=present)
        asked = self._choose(score, actors)
        if asked is None:  # each has failed: the next policy is another matter
            self._current = None
            return
        which = "float32" if "published" in score.reports else "published"
        model = score.policy.model if which == "published" else score.policy.float32
        manifest = score.policy.manifest
        if which == "float32":
            manifest = publisher.describe_as(manifest, model, "float32")
        max_steps, max_s = self.limits(asked)
        max_s = min(max_s, _ON_THE_WAY * (self.end_s - now_s))
        self._commands += 1
        command = messages.Command(
            command_id=f"{self._session}-{self._commands}",
            kind="evaluate",
            boot=asked.boot,
            episodes=self._settings.evaluate_episodes,
            seed=score.seed,
            manifest=manifest,
            model=np.frombuffer(model, np.uint8),
            max_steps=max_steps,
            max_s=max_s,
        )
        if self._send(asked.actor_id, command):
            self._awaited, self._deadline_s = (command.command_id, which), now_s + max(TIMEOUT_S, 2 * max_s)
            self._asked_at, self._actors = time.monotonic(), len(actors)
            self._asked = (asked.actor_id, asked.boot, connection)
            self._has_others = any(self._may_confirm(actor, asked.actor_id) for actor in actors)
            self._asked_last[asked.actor_id] = self._commands
            self._owed[command.command_id] = asked.actor_id
            if len(self._owed) > _OWED:
                del self._owed[next(iter(self._owed))]

    def limits(self, actor: actors.Actor) -> tuple[int, float]:
        """Returns the steps and seconds after which an actor gives up an evaluation."""
        settings, birth = self._settings, actor.state.birth if actor.state else None
        rated = birth is not None and birth.rate_hz > 0
        return settings.evaluate_episodes * settings.evaluate_steps, settings.evaluate_s * (RATED if rated else 1.0)

    def describe(self, now_s: float) -> str:
        """Returns whose answer is awaited, on what, and how long yet; empty if none is."""
        score = self._current
        if score is None or not self._awaited[0]:
            return ""
        left_s = min(self._deadline_s, self.end_s) - now_s
        what = f"actor {self._asked[0]}, which scores policy {score.policy.manifest.version}"
        return f"{what}: at most {left_s:.0f} s more"

    def awaits(self, report: messages.Report, actor_id: str) -> bool:
        """Returns whether this is the first answer to a command, by the actor that got it: no other may speak for it.

        An answer that comes too late, when another actor was asked or another score begun, was asked for all the same.
        """
        return self._owed.get(report.command_id) == actor_id

    def receive(self, report: messages.Report) -> Score | None:
        """Takes in a report; returns the score when it is complete (screened and failed, or confirmed)."""
        self._owed.pop(report.command_id, None)
        score = self._current
        if score is None or report.command_id != self._awaited[0]:
            return None
        which, by = self._awaited[1], self._asked[0]
        complete = len(report.episode_return) == self._settings.evaluate_episodes
        if report.error or not complete or not np.isfinite(report.episode_return).all():
            self._fail(blame=True)
            return None
        self._awaited = ("", "")
        self._failed.pop(by, None)
        self._failed_in_a_row, self.took_s = 0, time.monotonic() - self._asked_at
        if self.took_s > _LONG_S and not self._settings.deterministic:
            self.rests_until_s = time.monotonic() + _REST * self.took_s
        score.reports[which], score.by = report, by
        is_good = score.mean("published") >= self._settings.solved_return
        if score.confirming and len(score.reports) < 2 and (is_good or score.final):
            return None  # fp32 is asked for next
        if is_good:
            if not score.confirming or (self._has_others and not score.witness):
                score.witness = by
                self.unconfirmed = replace(score)
                self._confirm()
                return None
            score.alone = score.witness in ("", by)
        self._current = None
        return replace(score)

    def _fail(self, *, blame: bool) -> None:
        """No answer came, or none that is a score: another actor is asked, and all of this step anew.

        Once every actor may have failed, each next score waits twice as long.
        """
        score, by = self._current, self._asked[0]
        self.failures += 1
        self._awaited = ("", "")
        self._failed_in_a_row += 1
        if (again := self._failed_in_a_row - self._actors) >= 0:
            now_s = time.monotonic()
            rest_s = max(_REST_FIRST_S, now_s - self._asked_at) * 2.0 ** min(again + 1, 20)
            self.rests_until_s = now_s + min(rest_s, _REST_LIMIT_S)
        if blame:
            self._tried.add(by)
            self._failed[by] = self._failed.get(by, 0) + 1
        if score is not None and score.by == by:
            score.reports = {}  # the rest of a pair must come from the same actor

    def _choose(self, score: Score, actors: list[actors.Actor]) -> actors.Actor | None:
        """Returns who is asked: of those that have not failed at this, the one that was asked longest ago."""
        if score.reports:  # the other half of a pair
            for actor in actors:
                if actor.actor_id == score.by:
                    return actor
            score.reports = {}
        able = [actor for actor in actors if actor.actor_id not in self._tried]
        if score.witness:
            others = [actor for actor in able if actor.actor_id != score.witness]
            if not others and any(self._may_confirm(actor, score.witness) for actor in actors):
                return None  # one failed, and may answer another time
            able = others or able
        last, mute = self._asked_last, self._is_mute
        return min(able, key=lambda one: (mute(one), last.get(one.actor_id, 0), one.slot), default=None)

    def _is_mute(self, actor: actors.Actor) -> bool:
        return self._failed.get(actor.actor_id, 0) >= _MUTE

    def _may_confirm(self, actor: actors.Actor, witness: str) -> bool:
        return actor.actor_id != witness and not self._is_mute(actor)

    def _confirm(self) -> None:
        score = self._current
        assert score is not None
        self._confirmations += 1
        score.confirming = True
        score.seed = self._settings.evaluate_seed + _CONFIRM_SEED_STRIDE * self._confirmations
        score.reports = {}
        self._tried.clear()
