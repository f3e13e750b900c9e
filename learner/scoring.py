"""Scores of published policies, by actors: greedy, seeded, on the runtime that will run them.

Every score of a policy uses the same screening seeds. One that reaches the target is scored again on seeds that no
screening has seen, as published and in fp32, and only that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from broker import messages
from learner import config, publish, roster

TIMEOUT_S = 120.0
_CONFIRM_SEED_STRIDE = 100_000
_OWED = 64


@dataclass(slots=True)
class Score:
    """One policy's way through scoring; `reports` of the policy as it was published, and of `float32`."""

    policy: publish.Published
    confirming: bool = False
    seed: int = 0
    reports: dict[str, messages.Report] = field(default_factory=dict)

    def mean(self, which: str) -> float:
        """Mean return over the scored episodes."""
        return float(self.reports[which].episode_return.mean())


class Scoring:
    """Runs at most one score at a time.

    Args:
        send: Sends a Command to an actor; false if it cannot go out now.
        settings: Episodes, seeds and target.
        session: Part of command ids: an actor carries out each id once.
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
        self.failures = 0

    @property
    def busy(self) -> bool:
        return self._current is not None

    def begin(self, policy: publish.Published, *, confirm: bool = False) -> None:
        """Starts scoring a policy; with `confirm` it skips the screening."""
        self._current = Score(policy)
        self._awaited = ("", "")
        if confirm:
            self._confirm()
        else:
            self._current.seed = self._settings.evaluate_seed

    def advance(self, actors: list[roster.Actor], now_s: float, connection: int = 0) -> None:
        """Sends the next command when none is awaited, or again when no answer will come any more.

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
        if self._awaited[0]:
            self.failures += 1
            actors = actors[1:] + actors[:1]  # the one that did not answer is asked last
        which = "float32" if "published" in score.reports else "published"
        model = score.policy.model if which == "published" else score.policy.float32
        manifest = score.policy.manifest
        if which == "float32":
            manifest = publish.describe_as(manifest, model, "float32")
        self._commands += 1
        command = messages.Command(
            command_id=f"{self._session}-{self._commands}",
            kind="evaluate",
            boot=actors[0].boot,
            episodes=self._settings.evaluate_episodes,
            seed=score.seed,
            manifest=manifest,
            model=np.frombuffer(model, np.uint8),
        )
        if self._send(actors[0].actor_id, command):
            self._awaited, self._deadline_s = (command.command_id, which), now_s + TIMEOUT_S
            self._asked = (actors[0].actor_id, actors[0].boot, connection)
            self._owed[command.command_id] = actors[0].actor_id
            if len(self._owed) > _OWED:
                del self._owed[next(iter(self._owed))]

    def awaits(self, report: messages.Report, actor_id: str) -> bool:
        """Whether this is the first answer to a command, by the actor that got it: no other may speak for it.

        An answer that comes too late, when another actor was asked or another score begun, was asked for all the same.
        """
        return self._owed.get(report.command_id) == actor_id

    def take(self, report: messages.Report) -> Score | None:
        """Takes in a report; returns the score when it is complete (screened and failed, or confirmed)."""
        self._owed.pop(report.command_id, None)
        score = self._current
        if score is None or report.command_id != self._awaited[0]:
            return None
        which = self._awaited[1]
        self._awaited = ("", "")
        complete = len(report.episode_return) == self._settings.evaluate_episodes
        if report.error or not complete or not np.isfinite(report.episode_return).all():
            self.failures += 1
            self._current = None
            return None
        score.reports[which] = report
        if not score.confirming:
            if score.mean("published") >= self._settings.solved_return:
                self._confirm()
                return None
        elif len(score.reports) < 2:
            return None
        self._current = None
        return replace(score)

    def _confirm(self) -> None:
        score = self._current
        assert score is not None
        self._confirmations += 1
        score.confirming = True
        score.seed = self._settings.evaluate_seed + _CONFIRM_SEED_STRIDE * self._confirmations
        score.reports = {}
