"""The whole fleet as it is now. Bounded: a member for each enrolled actor, an hour of each, and nothing else."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from broker.contract import messages
from learner.fleet import roster
from learner.operate.watch import alarms, history, members


class FleetView:
    """What was heard of a fleet. Safe from any thread.

    Args:
        clock: Unix time.

    Attributes:
        revision: Grows with every change; each member has that of its own last one.
        refused: What came and was not taken in, by reason.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._members: dict[str, members.Member] = {}
        self._learner: messages.LearnerState | None = None
        self._learner_heard_s: float | None = None
        self._history = history.History()
        self._noted_s = 0.0
        self.revision = 0
        self.refused: Counter[str] = Counter()

    def hear_actor(self, actor_id: str, state: messages.ActorState, *, retained: bool) -> None:
        """Takes in what an actor said of itself."""
        with self._lock:
            member = self._member(actor_id)
            if member.observe(state, retained=retained, now_s=self._clock()):
                self._change(member)

    def hear_assignment(self, actor_id: str, assignment: messages.Assignment) -> None:
        """Takes in how often an actor is to speak, and whether its learner refuses it."""
        with self._lock:
            member = self._member(actor_id)
            member.period_s = assignment.message_period_s
            if member.refused != assignment.refused:
                member.refused = assignment.refused
                self._change(member)

    def hear_learner(self, state: messages.LearnerState, *, retained: bool) -> None:
        """Takes in what the learner said; of two, who has the higher epoch has the fleet."""
        with self._lock:
            old = self._learner
            if old is not None and (state.epoch, state.heartbeat) < (old.epoch, old.heartbeat):
                return
            self._learner = state
            if not retained:
                self._learner_heard_s = self._clock()

    def hear_drift(self, found: Mapping[str, Mapping[str, str]]) -> None:
        """Takes in how actors drift, by name and kind, as their learner found; `tick` tells of it."""
        with self._lock:
            for name, member in self._members.items():
                member.drift = found.get(name, {})

    def count_refused(self, reason: str) -> None:
        """Counts what came and cannot be shown."""
        with self._lock:
            self.refused[reason] += 1

    def keep(self, enrolled: Collection[str]) -> None:
        """Forgets those who are not enrolled any longer."""
        with self._lock:
            for name in self._members.keys() - set(enrolled):
                del self._members[name]
                self.revision += 1

    def tick(self) -> None:
        """Looks who fell silent, or has an alarm less; to be called every half second or so."""
        with self._lock:
            now_s = self._clock()
            for member in self._members.values():
                if member.alarms != alarms.of(member, now_s):
                    self._change(member)
            if now_s - self._noted_s >= 1.0:
                self._noted_s = now_s
                self._history.note(now_s, self._totals(now_s))

    def rows(self, since: int = -1) -> tuple[int, list[dict[str, Any]], list[str]]:
        """Returns the revision, the rows of members that changed after the revision `since`, and all members' names."""
        with self._lock:
            now_s = self._clock()
            found = [member.row(now_s) for member in self._members.values() if member.revision > since]
            return self.revision, found, list(self._members)

    def fleet(self) -> dict[str, Any]:
        """Returns the learner and sums over all actors."""
        with self._lock:
            now_s = self._clock()
            told, heard_s = self._learner, self._learner_heard_s
            silent = heard_s is None or now_s - heard_s > roster.SILENCE_S
            births = [one.state.birth for one in self._members.values() if one.state and one.is_live(now_s)]
            tasks = Counter(birth.env_id for birth in births if birth)
            learner = told and {
                "live": told.online and not silent,
                "heard_s": heard_s,
                "epoch": told.epoch,
                "version": told.version,
                # A learner that names no task takes that of its actors
                "env_id": told.env_id or (tasks.most_common(1)[0][0] if tasks else ""),
            }
            counts = Counter(kind for member in self._members.values() for kind in member.alarms)
            live = sum(member.is_live(now_s) for member in self._members.values())
            return {
                "now_s": now_s,
                "learner": learner,
                "actors": len(self._members),
                "live": live,
                "alarms": dict(counts),
                "refused": dict(self.refused),
                **self._totals(now_s),
            }

    def history(self, actor_id: str = "") -> dict[str, list[float | None]] | None:
        """Returns the last hour of an actor, or of the fleet; None if nobody has that name."""
        with self._lock:
            if not actor_id:
                return self._history.series(self._clock())
            member = self._members.get(actor_id)
            return member.history.series(self._clock()) if member else None

    def _totals(self, now_s: float) -> dict[str, float | None]:
        live = [member for member in self._members.values() if member.is_live(now_s) and member.state]
        vitals = [member.state.vitals for member in live if member.state]
        returns = [one.return_mean for one in vitals if one.return_mean is not None]
        powers = {one.board_id or str(n): one.power_w for n, one in enumerate(vitals) if one.power_w is not None}
        return {
            "steps_per_s": sum(member.steps_per_s or 0.0 for member in live),
            "return_mean": float(np.mean(returns)) if returns else None,
            "policy_lag": max((one.policy_lag for one in vitals), default=None),
            "power_w": sum(powers.values()) if powers else None,
        }

    def _member(self, actor_id: str) -> members.Member:
        if actor_id not in self._members:
            self._members[actor_id] = members.Member(actor_id)
        return self._members[actor_id]

    def _change(self, member: members.Member) -> None:
        self.revision += 1
        member.revision, member.alarms = self.revision, alarms.of(member, self._clock())
