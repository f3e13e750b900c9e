"""Sends actors their assignments, each when it is due, and notes what they may hold of what they were granted."""

from __future__ import annotations

import time
from collections.abc import Iterator

from broker.contract import messages
from learner import config
from learner.experience import ingestion
from learner.files import run_directory
from learner.fleet import roster, session
from learner.run.loop import pace
from learner.run.reports import progress


class Assigner:
    """Shares the steps that may be recorded among the actors.

    Args:
        settings: The run's.
        fleet: Sends assignments.
        actors: Makes them.
        steps: How many steps may be recorded.
        arriving: Has steps that were received and are not in replay yet.
        rates: Steps per second.
        directory: Where owed steps are noted.
        earlier_steps: The most that an actor may hold of the run's sessions before this one.
    """

    def __init__(
        self,
        settings: config.Settings,
        fleet: session.Session,
        actors: roster.Roster,
        steps: pace.Pace,
        arriving: ingestion.Ingestion,
        rates: progress.Progress,
        directory: run_directory.RunDirectory,
        earlier_steps: float,
    ) -> None:
        self._settings = settings
        self._session, self._roster, self._pace, self._ingest = fleet, actors, steps, arriving
        self._progress, self._directory, self._earlier_steps = rates, directory, earlier_steps
        self._noted_steps = -1  # of this session

    def assign(self, lockstep_version: int = 0) -> None:
        """Sends the assignments that are due.

        Args:
            lockstep_version: See messages.Assignment.
        """
        now = time.monotonic()
        if not self._settings.train.deterministic:
            if not self._roster.may_assign(now):
                return
            self._pace.limiter.widen(self._roster.grant_s, self._progress.env_steps_per_s)
        due = list(self._due(self._pace.steps_granted, lockstep_version, now))
        self._note_owed([actor_id for actor_id, _ in due])
        self._session.retain_all((self._session.topics.assignment(actor_id), assigned) for actor_id, assigned in due)

    def _due(self, granted: int, lockstep_version: int, now_s: float) -> Iterator[tuple[str, messages.Assignment]]:
        return self._roster.assign_due(
            steps_left=granted - self._pace.env_steps - self._ingest.pending_steps,
            env_steps=self._pace.env_steps,
            lockstep_version=lockstep_version,
            settings=self._settings.train,
            exploration=self._settings.algorithm,
            now_s=now_s,
        )

    def _note_owed(self, actor_ids: list[str]) -> None:
        """Before anybody is granted more than ever: the session after this one must know what may still come.

        In powers of two, so that it is written a few times in all.
        """
        owed = max(map(self._roster.owed_steps, actor_ids), default=0) + self._ingest.pending_steps
        if actor_ids and owed > self._noted_steps:
            self._noted_steps = 1 << owed.bit_length()
            self._directory.note_owed_steps(self._earlier_steps + self._noted_steps)
