"""Which actors are in the fleet, which of them live, and what each is assigned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from broker import errors, messages, specs, topics
from learner import config

SILENCE_S = 10.0
"""An actor that said nothing for so long is not counted as live."""
EXPIRE_PERIOD_S = 0.5
"""Between two looks for who fell silent: in every turn of an idle loop they took a tenth of its time (500 actors)."""
ASSIGN_PERIOD_S = 0.02
"""Least time between two assignments of one actor that differ in nothing but the pace."""
LOOK_PERIOD_S = 0.1
"""Between two looks at a large fleet, and two times that it is sent receipts. A few assignments each time, because a
hundred hold up the loop for 50 ms; and not more often, because each time costs the broker something, too."""
MESSAGES_PER_S = 80.0
"""What all actors together are to send of each kind, and to be sent: a learner that trains has better things to do."""
POLICIES_PER_S = 100.0
"""So many deliveries of a policy, which is a hundred times as large as the rest."""
GATHER_S = 0.003
"""Of the 10 ms between two commits, which each message waits for on average half of."""
LONGER = 4
"""So many times as many steps a message of a large fleet holds at most: actors gather them in memory."""
GRANT_PERIODS = 2
"""So many messages of an actor come between two assignments that differ in nothing but the pace."""
AGAIN = 0.1
"""Of the time between two messages: until an actor is looked at again that can be granted no more. A learner that falls
behind has hundreds of those, and looking at all of them each time took a tenth of a core."""


@dataclass(slots=True)
class Actor:
    """One actor as the learner sees it; `recorded` counts steps of (this session, `boot`) that arrived."""

    actor_id: str
    slot: int
    state: messages.ActorState | None = None
    live: bool = False
    seen_at: float = -math.inf
    boot: int = 0
    recorded: int = 0
    refused: str = ""
    assignment: messages.Assignment | None = None
    due_at: float = -math.inf  # when its pace is looked at again
    version: int = 0  # the newest policy of this session that it acted on


class Roster:
    """Actors by id.

    Args:
        session: This learner's session.
        epoch: Its epoch.
        env_id: The task; empty takes the first actor's.
        log: Takes one line for people.
    """

    def __init__(self, session: str, epoch: int, env_id: str, log: Callable[[str], None]) -> None:
        self._session = session
        self._epoch = epoch
        self._log = log
        self.actors: dict[str, Actor] = {}
        self._spec: specs.EnvSpec | None = None
        self._working: list[Actor] | None = None
        self._looked_at = self._expired_at = -math.inf
        self._somebody_waits = False
        self._allowance = math.inf  # assignments that change nothing but the pace; kept by `look`
        self.env_id = env_id

    @property
    def period_s(self) -> float:
        """How often each actor may speak and be spoken to in a fleet of this size."""
        return len(self.working()) / MESSAGES_PER_S

    @property
    def gather_s(self) -> float:
        """How long what they send may stay in the socket, so that it is read together: in a large fleet only."""
        return GATHER_S if self.period_s > 1.0 else 0.0

    @property
    def receipt_s(self) -> float:
        """How long receipts may wait for others, so that they go out together: in a large fleet only."""
        return LOOK_PERIOD_S if self.period_s > 1.0 else 0.0

    @property
    def policy_s(self) -> float:
        """Least time between two policies, each of which goes to every actor."""
        return len(self.working()) / POLICIES_PER_S

    @property
    def grant_s(self) -> float:
        """How long a grant must last: until the next assignment has come, and a message more."""
        return (GRANT_PERIODS + 1) * self.period_s

    @property
    def the_spec(self) -> specs.EnvSpec:
        """The fleet's spec: that of the first live actor."""
        if self._spec is None:
            raise errors.SpecError("no actor has told its spec yet")
        return self._spec

    def observe(self, actor_id: str, state: messages.ActorState, *, retained: bool, now_s: float) -> Actor:
        """Takes in a state message. A retained one may be yesterday's: only a fresh one makes an actor live.

        The one with the highest boot and heartbeat is true: what comes later with a lower one is the will of a process
        or connection that has been replaced, or took another way.
        """
        actor = self.actors.setdefault(actor_id, Actor(actor_id, slot=len(self.actors)))
        if actor.state is not None and (state.boot, state.heartbeat) <= (actor.boot, actor.state.heartbeat):
            return actor
        is_new = state.boot != actor.boot
        if is_new:
            actor.boot, actor.recorded, actor.refused = state.boot, 0, ""
            actor.assignment, actor.due_at = None, -math.inf
        was_live = actor.live
        actor.state = state
        actor.live = state.online and (actor.live or not retained)
        if not retained:
            actor.seen_at = now_s
        if is_new or actor.live != was_live:
            self._working = None
        if actor.live and (is_new or not was_live):
            self._somebody_waits = True
            self._admit(actor)
        elif was_live and not actor.live:
            self._log(f"actor {actor_id} went offline")
        return actor

    def _admit(self, actor: Actor) -> None:
        birth = actor.state.birth if actor.state else None
        if birth is None:
            return
        if self._spec is None:
            self._spec, self.env_id = birth.spec, self.env_id or birth.env_id
        if birth.spec.fingerprint != self._spec.fingerprint:
            actor.refused = (
                f"the fleet trains on {self._spec.describe()}, this actor's environment {birth.env_id} "
                f"has {birth.spec.describe()}"
            )
            self._log(f"actor {actor.actor_id} refused: {actor.refused}")
            return
        if birth.env_id != self.env_id:
            self._log(f"actor {actor.actor_id} runs {birth.env_id} where the task is {self.env_id}; the specs agree")
        self._log(
            f"actor {actor.actor_id} joined: {birth.env_id} x{birth.n_envs}, {birth.spec.describe()}, "
            f"{birth.board}, {birth.runtime}"
        )

    def expire(self, now_s: float) -> None:
        """Marks actors that fell silent as not live. They speak as often as they were told to, or are to be."""
        if now_s - self._expired_at < EXPIRE_PERIOD_S:
            return
        self._expired_at, fleet_s = now_s, self.period_s  # before any of them is gone
        for actor in self.actors.values():
            told_s = actor.assignment.message_period_s if actor.assignment else 0.0
            if actor.live and now_s - actor.seen_at > SILENCE_S + 2.0 * max(told_s, fleet_s):
                actor.live, self._working = False, None
                self._log(f"actor {actor.actor_id} fell silent")

    def working(self) -> list[Actor]:
        """Live actors whose experience is wanted, by slot."""
        if self._working is None:
            found = (a for a in self.actors.values() if a.live and not a.refused and a.state and a.state.birth)
            self._working = sorted(found, key=lambda actor: actor.slot)
        return self._working

    def assign_due(
        self, *, lockstep_version: int, now_s: float, **rest: Any
    ) -> Iterator[tuple[str, messages.Assignment]]:
        """New assignments of those that are due one, by actor; arguments as for `assign`.

        Those who have waited for the longest come first, so that nobody is passed over for ever.
        """
        live = sorted((actor for actor in self.actors.values() if actor.live), key=lambda actor: actor.due_at)
        for actor in live:
            if self._is_early(actor, lockstep_version, now_s):
                return  # and so are all that follow
            assignment = self.assign(actor, lockstep_version=lockstep_version, now_s=now_s, **rest)
            if assignment is not None:
                yield actor.actor_id, assignment

    def _is_early(self, actor: Actor, lockstep_version: int, now_s: float) -> bool:
        """Whether its assignment can be wrong in nothing but the pace, and it is too soon to change that."""
        return self._is_paced(actor, lockstep_version) and (self._allowance < 1 or now_s < actor.due_at)

    @staticmethod
    def _is_paced(actor: Actor, lockstep_version: int) -> bool:
        old = actor.assignment
        return old is not None and (old.lockstep_version, old.refused) == (lockstep_version, actor.refused)

    def look(self, now_s: float) -> bool:
        """Whether it is time to see who needs an assignment; with hundreds of actors not in every turn."""
        elapsed_s = now_s - self._looked_at
        if not self._somebody_waits and elapsed_s < min(LOOK_PERIOD_S, self.period_s / 10):
            return False
        # Spread over time: all at once, they would hold up receipts, and all actors would send at once as well
        allowed = MESSAGES_PER_S / GRANT_PERIODS * elapsed_s
        self._allowance = min(max(4.0, 2.0 * allowed), self._allowance + allowed)
        self._looked_at, self._somebody_waits = now_s, False
        return True

    def assign(
        self,
        actor: Actor,
        *,
        steps_left: int,
        env_steps: int,
        lockstep_version: int,
        settings: config.TrainConfig,
        exploration: config.AlgorithmConfig,
        now_s: float,
    ) -> messages.Assignment | None:
        """The assignment an actor should hold now; None if the one it has will do.

        Args:
            actor: One of `self.actors`.
            steps_left: Steps that the whole fleet may still record; each working actor gets an equal share.
            env_steps: Steps of the fleet so far, for the exploration schedule.
            lockstep_version: See messages.Assignment.
            settings: Messages and seed.
            exploration: Its epsilon and noise.
            now_s: Monotonic time.
        """
        if self._is_early(actor, lockstep_version, now_s):
            return None
        old = actor.assignment
        n = max(1, len(self.working()))
        period_s = 0.0 if settings.deterministic else max(settings.message_period_s, self.period_s)
        ages = period_s > 0 and settings.message_period_s > 0
        longer = int(min(LONGER, period_s / settings.message_period_s)) if ages else 1
        message_steps = min(longer * settings.message_steps, exploration.replay_capacity)
        granted = actor.recorded + math.ceil(max(0, steps_left) / n)
        actor.due_at = now_s + max(ASSIGN_PERIOD_S, GRANT_PERIODS * self.period_s)
        if old is None:
            noise = exploration.noise
            new = messages.Assignment(
                session=self._session,
                epoch=self._epoch,
                boot=actor.boot,
                channel=topics.MAIN_CHANNEL,
                slot=actor.slot,
                slots=n,
                epsilon_start=exploration.epsilon_start,
                epsilon_end=exploration.epsilon_end,
                epsilon_decay_steps=max(1, exploration.epsilon_decay_steps // n),
                epsilon_offset=env_steps // n,
                noise_std=noise.std * noise.ladder ** (actor.slot % n / max(1, n - 1)),
                noise_correlation_steps=noise.correlation_steps,
                seed=settings.seed,
                steps_granted=granted,
                record_fraction=settings.record_fraction,
                message_steps=message_steps,
                message_period_s=period_s,
                lockstep_version=lockstep_version,
                refused=actor.refused,
            )
        else:
            changes: dict[str, Any] = {
                "steps_granted": max(old.steps_granted, granted),
                "message_steps": message_steps,
                "message_period_s": period_s,
                "lockstep_version": lockstep_version,
                "refused": actor.refused,
            }
            if all(getattr(old, name) == value for name, value in changes.items()):
                actor.due_at = now_s + AGAIN * self.period_s
                return None
            self._allowance -= self._is_paced(actor, lockstep_version)
            new = replace(old, **changes)
        actor.assignment = new
        return new
