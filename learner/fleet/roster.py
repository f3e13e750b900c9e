"""The actors of the fleet: which of them live, whose spec rules, and what each is assigned."""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from broker.contract import errors, messages, specs, topics
from broker.program import logs
from learner import config
from learner.fleet import actors, budget, energy, names, work

_log = logging.getLogger(__name__)
SILENCE_S = 10.0
"""An actor that said nothing for so long is not counted as live."""
EXPIRE_PERIOD_S = 0.5
"""Between two looks for who fell silent: in every turn of an idle loop they took a tenth of its time (500 actors)."""
ASSIGN_PERIOD_S = 0.02
"""Least time between two assignments of one actor that differ in nothing but the pace."""
LOOK_PERIOD_S = 0.1
"""Between two looks at a large fleet, and two times that it is sent receipts. A few assignments each time, because a
hundred hold up the loop for 50 ms; and not more often, because each time costs the broker something, too."""
POLICIES_PER_S = 100.0
"""Deliveries of a policy, which is a hundred times as large as the rest."""
GATHER_S = 0.003
"""A part of the 10 ms between two commits, of which each message waits for half on average."""
LONGER = 4
"""The factor by which a message of a large fleet may hold more steps: actors gather them in memory."""
GRANT_PERIODS = 2
"""Messages of an actor between two assignments that differ in nothing but the pace."""
BOOTS_AT_ONCE = 8
"""Boots of an actor that are granted their share in one session before anything of them has come. Each of more is
granted one message, the later the more there are: what they were granted cannot be taken back, because it may still
come. An actor sends what earlier boots left first, so that once a boot is heard, only so many before it count."""
BOOT_PERIOD_S = 1.0
AGAIN = 0.1
"""The share of a message period until an actor is looked at again that can be granted no more. A learner that falls
behind has hundreds of those, and looking at all of them each time took a tenth of a core."""


class Account(NamedTuple):
    """Steps that a boot was granted, and those of them that arrived."""

    actor_id: str
    boot: int
    granted: int
    recorded: int


class Roster:
    """Actors by id.

    Args:
        session: This learner's session.
        epoch: Its epoch.
        env_id: The task; empty takes the fleet's. Where it is named, only actors that run it decide the spec.
        quorum: So many live actors must have the same spec until it becomes the fleet's.
        fingerprint: Of the spec that the fleet must have; empty: any.
        unfit: Why the learner cannot train on what an actor has; empty if it can.
        allowed: What the fleet may say.
        shards: So many workers take in the fleet's experience; 0: the learner does.

    Attributes:
        budget: As given.
        work: What the actors spend their time on.
        energy: What their boards draw.
    """

    def __init__(
        self,
        session: str,
        epoch: int,
        env_id: str,
        quorum: int = 1,
        fingerprint: str = "",
        unfit: Callable[[messages.Birth], str] = lambda birth: "",
        allowed: budget.Budget | None = None,
        shards: int = 0,
    ) -> None:
        self._session = session
        self.budget = allowed or budget.Budget()
        self.epoch = epoch
        self._quorum, self._fingerprint, self._unfit, self._shards = quorum, fingerprint, unfit, shards
        self.actors: dict[str, actors.Actor] = {}
        self.work = work.Work()
        self.energy = energy.Energy()
        self._spec: specs.EnvSpec | None = None
        self._earlier_steps: float = 0
        self._earlier: dict[str, float] = {}  # by actor: what may still come of sessions before this one
        self._working: list[actors.Actor] | None = None
        self._queue: list[tuple[float, int, str]] = []  # due_at, slot, actor; void, if its actor is due at another time
        self._due: dict[str, float] = {}  # of those to be looked at
        self._looked_at = self._expired_at = -math.inf
        self._somebody_waits = False
        self._allowance = math.inf  # assignments that change nothing but the pace; kept by `may_assign`
        self._names = names.Names()
        self.env_id = env_id
        self._canaries: frozenset[str] = frozenset()

    def set_canaries(self, names: frozenset[str]) -> None:
        """Has these actors, and no others, follow the channel of policies that are on trial; who changes is due now."""
        changed, self._canaries = self._canaries ^ names, names
        for name in sorted(changed & self.actors.keys()):
            self.actors[name].due_at = -math.inf
            self._enqueue(self.actors[name])
        self._somebody_waits |= bool(changed)

    def moved(self, actor: actors.Actor) -> messages.Assignment | None:
        """Returns the assignment of an actor that is away, if it names another channel than it should by now.

        Retained, it is there when the actor comes back, whether or not a learner is.
        """
        old = actor.assignment
        if old is None or old.channel == self._channel_of(actor):
            return None
        actor.assignment = replace(old, channel=self._channel_of(actor))
        return actor.assignment

    def _channel_of(self, actor: actors.Actor) -> str:
        return topics.CANARY_CHANNEL if actor.actor_id in self._canaries else topics.MAIN_CHANNEL

    @property
    def period_s(self) -> float:
        """The seconds between two messages of each actor, and to each, in a fleet of this size."""
        return len(self.working()) / self.budget.messages_per_s

    @property
    def gather_s(self) -> float:
        """The seconds that messages may stay in the socket, so that they are read together: in a large fleet only."""
        return GATHER_S if self.period_s > 1.0 else 0.0

    @property
    def receipt_s(self) -> float:
        """The seconds that receipts may wait for others, so that they go out together: in a large fleet only."""
        return LOOK_PERIOD_S if self.period_s > 1.0 else 0.0

    @property
    def policy_s(self) -> float:
        """The least seconds between two policies, each of which goes to every actor."""
        return len(self.working()) / POLICIES_PER_S

    @property
    def grant_s(self) -> float:
        """The seconds that a grant must last: until the next assignment has come, and a message more."""
        return (GRANT_PERIODS + 1) * self.period_s

    @property
    def the_spec(self) -> specs.EnvSpec:
        """The fleet's spec: the first that enough live actors have."""
        if self._spec is None:
            raise errors.SpecError("no actor has told its spec yet")
        return self._spec

    @property
    def decided(self) -> bool:
        """Returns whether the fleet has a spec."""
        return self._spec is not None

    @property
    def refusals(self) -> str:
        """Those who were refused, and why, to be appended to a sentence."""
        return "".join(f"; actor {a.actor_id}: {a.refused}" for a in self.actors.values() if a.refused)

    def metrics(self) -> dict[str, float]:
        """Returns the number of live actors, for a row of metrics."""
        return {"actors_live": len(self.working()), **self.budget.metrics(), **self.energy.metrics()}

    def table(self) -> list[dict[str, Any]]:
        """Returns who the actors are and what they did, by slot, for the report."""
        return [
            {
                "actor_id": actor.actor_id,
                **actors.facts(actor),
                "steps": actor.recorded,
                "refused": actor.refused,
                **self.energy.of_actor(actor.actor_id),
            }
            for actor in sorted(self.actors.values(), key=lambda actor: actor.slot)
            if actor.state is not None
        ]

    def observe(self, actor_id: str, state: messages.ActorState, *, retained: bool, now_s: float) -> actors.Actor:
        """Takes in a state message. A retained one may be yesterday's: only a fresh one makes an actor live.

        Of one process the highest heartbeat is true: what comes later with a lower one is the will of a connection that
        has been replaced, or took another way. Another process may take the name (see names.py).
        """
        actor = self.actors.setdefault(actor_id, actors.Actor(actor_id, slot=len(self.actors)))
        if actor.state is not None and (state.boot, state.session) != (actor.boot, actor.state.session):
            silence_s = SILENCE_S + 2.0 * self.period_s
            if not self._names.claim(actor, state, retained=retained, now_s=now_s, silence_s=silence_s):
                return actor
            self._working = None
            self._enqueue(actor)
        elif actor.state is not None and state.heartbeat <= actor.state.heartbeat:
            return actor
        is_new = state.boot != actor.boot
        if is_new:
            actor.boot, actor.recorded, actor.refused, actor.since_s = state.boot, 0, "", now_s
            actor.assignment, actor.due_at = None, -math.inf
        was_live, was_paused = actor.live, actor.is_paused
        actor.state = state
        self.work.note(actor_id, state)
        if not retained:
            self.energy.note(actor_id, state, now_s)
        actor.live = state.online and (actor.live or not retained)
        if not retained:
            actor.seen_at = now_s
        if is_new or actor.live != was_live or actor.is_paused != was_paused:
            self._working = None
        if actor.live and (is_new or not was_live):
            self._somebody_waits = True
            self._enqueue(actor)
            self._admit(actor)
        elif was_live and not actor.live:
            _log.info("actor %s went offline", actor_id)
        return actor

    def _empty_assignment(self, actor_id: str, boot: int, refused: str) -> messages.Assignment:
        """Returns an assignment that grants nothing."""
        zero = {"epsilon_start": 0.0, "epsilon_end": 0.0, "epsilon_decay_steps": 1, "epsilon_offset": 0, "seed": 0}
        own = {"session": self._session, "epoch": self.epoch, "boot": boot, "channel": topics.MAIN_CHANNEL}
        shard = topics.shard_of(actor_id, self._shards)
        values: dict[str, Any] = {**own, **zero, "slot": 0, "steps_granted": 0, "refused": refused, "shard": shard}
        return messages.Assignment(**values)

    def rejections(self) -> Iterator[tuple[str, messages.Assignment]]:
        """Yields, by actor, what processes that go by another's name are to be told, once and not retained."""
        for actor_id, boot, old, refused in self._names.rejections():
            yield actor_id, replace(old, refused=refused) if old else self._empty_assignment(actor_id, boot, refused)

    def _admit(self, actor: actors.Actor) -> None:
        birth = actor.state.birth if actor.state else None
        if birth is None:
            return
        if self._spec is None:
            self._decide(actor, birth)
            return
        self._compare(actor, birth, self._spec)

    def _decide(self, actor: actors.Actor, birth: messages.Birth) -> None:
        """Takes the spec of this actor as the fleet's, once enough others have the same."""
        why = self._unfit(birth)
        if self._fingerprint not in ("", birth.spec.fingerprint):
            why = f"the run was made for another environment than {birth.env_id}, {birth.spec.describe()}"
        if why:
            actor.refused = why
            _log.warning("actor %s refused: %s", actor.actor_id, why)
            return
        about = f"{birth.env_id}, {birth.spec.describe()}"
        if self._spec_of(actor) == "":
            _log.info("actor %s runs %s, and has to wait for actors that run %s", actor.actor_id, about, self.env_id)
            return
        alike = [a for a in self.actors.values() if a.live and self._spec_of(a) == birth.spec.fingerprint]
        if len(alike) < self._quorum:
            _log.info("actor %s is here: %s; %d of %d that agree", actor.actor_id, about, len(alike), self._quorum)
            return
        self._spec, self.env_id, self._working = birth.spec, self.env_id or birth.env_id, None
        for other in self.actors.values():
            if other.live and not other.refused and other.state and other.state.birth:
                self._compare(other, other.state.birth, self._spec)

    def _spec_of(self, actor: actors.Actor) -> str:
        """Fingerprint of its spec; empty, if it has no say in what the fleet's shall be."""
        birth = actor.state.birth if actor.state else None
        if birth is None or actor.refused or self.env_id not in ("", birth.env_id):
            return ""
        return birth.spec.fingerprint

    def _compare(self, actor: actors.Actor, birth: messages.Birth, spec: specs.EnvSpec) -> None:
        if birth.spec.fingerprint != spec.fingerprint:
            actor.refused = (
                f"the fleet trains on {spec.describe()}, this actor's environment {birth.env_id} "
                f"has {birth.spec.describe()}"
            )
            _log.warning("actor %s refused: %s", actor.actor_id, actor.refused)
            return
        if birth.env_id != self.env_id:
            _log.info(
                "actor %s runs %s where the task is %s; the specs agree", actor.actor_id, birth.env_id, self.env_id
            )
        _log.info(
            "actor %s joined: %s x%d, %s, %s, %s",
            actor.actor_id,
            birth.env_id,
            birth.n_envs,
            birth.spec.describe(),
            birth.board,
            birth.runtime,
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
                _log.warning("actor %s fell silent", actor.actor_id)

    def working(self) -> list[actors.Actor]:
        """Returns the live actors whose experience is wanted, and that no order keeps from acting, by slot."""
        if self._working is None:
            found = [a for a in self.actors.values() if a.live and not a.refused and a.state and a.state.birth]
            found = [actor for actor in found if not actor.is_paused]
            if self._spec is None:  # so far: of the spec that most have
                groups = Counter(self._spec_of(actor) for actor in found)
                del groups[""]
                most = max(groups, key=lambda spec: groups[spec], default="")
                found = [actor for actor in found if most and self._spec_of(actor) == most]
            self._working = sorted(found, key=lambda actor: actor.slot)
        return self._working

    def may_send(self, actor_id: str, boot: int, assigned_epoch: int, steps: int) -> bool:
        """Returns whether so many steps more were granted to a boot, by this session or an earlier one of the run."""
        if steps <= self._credit(actor_id, boot, assigned_epoch):
            return True
        if actor_id in self.actors:
            _log.warning(
                "actor %s sends more than it was granted; the rest is refused, and counted as `grant`",
                actor_id,
                extra=logs.once(),
            )
        return False

    def count_received(self, actor_id: str, boot: int, assigned_epoch: int, steps: int) -> None:
        """Counts what came of a grant, whether refused for its content or not; what was refused as `grant` is none."""
        left, actor = self._credit(actor_id, boot, assigned_epoch) - steps, self.actors.get(actor_id)
        if left < 0:
            return
        if assigned_epoch != self.epoch:
            self._earlier[actor_id] = left
        elif actor is not None:
            actor.credits[boot] = int(left)
            if len(actor.credits) > BOOTS_AT_ONCE:
                for old in [one for one in sorted(actor.credits) if one < boot][:-BOOTS_AT_ONCE]:
                    del actor.credits[old]
            if (process := actor.process(boot)) is not None:
                process.recorded += steps

    def _credit(self, actor_id: str, boot: int, assigned_epoch: int) -> float:
        if assigned_epoch != self.epoch:
            return self._earlier.get(actor_id, self._earlier_steps)
        actor = self.actors.get(actor_id)
        return actor.credits.get(boot, 0) if actor is not None else 0

    def set_earlier_steps(self, steps: float) -> None:
        """Sets how many steps each actor may hold, at most, of the run's sessions before this one."""
        self._earlier_steps = steps

    def accounts(self) -> Iterator[Account]:
        """Yields what each boot was granted in this session, and recorded."""
        for actor_id, actor in self.actors.items():
            for boot, credit in actor.credits.items():
                process = actor.process(boot)
                if process is not None and process.assignment is not None:
                    yield Account(actor_id, boot, process.assignment.steps_granted, process.recorded)
                else:
                    yield Account(actor_id, boot, credit, 0)

    @property
    def earlier_left(self) -> Mapping[str, float]:
        """What actors may still send of the run's sessions before, of those that sent some."""
        return self._earlier

    def owed_steps(self, actor_id: str) -> int:
        """Returns the most steps that an actor may still hold of what it was granted in this session."""
        return sum(self.actors[actor_id].credits.values())

    def assign_due(
        self, *, lockstep_version: int, now_s: float, **rest: Any
    ) -> Iterator[tuple[str, messages.Assignment]]:
        """Yields new assignments of those that are due one, by actor; arguments as for `assign`.

        Those who have waited for the longest come first, so that nobody is passed over for ever.
        """
        looked_at = []
        try:
            while self._queue:
                due_at, _, actor_id = self._queue[0]
                actor = self.actors[actor_id]
                if due_at == self._due.get(actor_id) != actor.due_at:
                    self._enqueue(actor)
                is_void = self._due.get(actor_id) != due_at
                if not is_void and actor.live and self._is_early(actor, lockstep_version, now_s):
                    return  # and so are all that follow
                heapq.heappop(self._queue)
                if is_void:
                    continue
                del self._due[actor_id]
                if not actor.live:  # until it is heard again
                    if (moved := self.moved(actor)) is not None:
                        yield actor_id, moved
                    continue
                looked_at.append(actor)
                assignment = self.assign(actor, lockstep_version=lockstep_version, now_s=now_s, **rest)
                if assignment is not None:
                    yield actor_id, assignment
        finally:
            for actor in looked_at:  # not before, lest one that is due at once is looked at for ever
                self._enqueue(actor)

    def _enqueue(self, actor: actors.Actor) -> None:
        """Has an actor looked at when it is due; ten thousand that are not due cost nothing."""
        if self._due.get(actor.actor_id) != actor.due_at:
            self._due[actor.actor_id] = actor.due_at
            heapq.heappush(self._queue, (actor.due_at, actor.slot, actor.actor_id))

    def _is_early(self, actor: actors.Actor, lockstep_version: int, now_s: float) -> bool:
        """Returns whether its assignment can be wrong in nothing but the pace, and it is too soon to change that."""
        return self._is_paced(actor, lockstep_version) and (self._allowance < 1 or now_s < actor.due_at)

    def _is_paced(self, actor: actors.Actor, lockstep_version: int) -> bool:
        old = actor.assignment
        if old is None or (old.lockstep_version, old.refused) != (lockstep_version, actor.refused):
            return False
        return old.channel == self._channel_of(actor)

    def may_assign(self, now_s: float) -> bool:
        """Returns whether it is time to see who needs an assignment; with hundreds of actors not in every turn."""
        elapsed_s = now_s - self._looked_at
        if not self._somebody_waits and elapsed_s < min(LOOK_PERIOD_S, self.period_s / 10):
            return False
        # Spread over time: all at once, they would hold up receipts, and all actors would send at once as well. That
        # they may say less is to reach them soon
        allowed = max(budget.MESSAGES_PER_S, self.budget.messages_per_s) / GRANT_PERIODS * elapsed_s
        self._allowance = min(max(4.0, 2.0 * allowed), self._allowance + allowed)
        self._looked_at, self._somebody_waits = now_s, False
        return True

    def assign(
        self,
        actor: actors.Actor,
        *,
        steps_left: int,
        env_steps: int,
        lockstep_version: int,
        settings: config.TrainConfig,
        exploration: config.AlgorithmConfig,
        now_s: float,
    ) -> messages.Assignment | None:
        """Returns the assignment an actor should hold now; None if the one it has will do.

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
        message_steps = min(longer * settings.message_steps, exploration.capacity // max(1, self._shards))
        share = math.ceil(max(0, steps_left) / n)
        unheard = len(actor.credits) - BOOTS_AT_ONCE
        if old is None and now_s - actor.granted_at < BOOT_PERIOD_S * unheard:
            return None
        if not actor.recorded and unheard > 0:
            share = min(share, message_steps)
        granted = actor.recorded + share
        actor.due_at = now_s + max(ASSIGN_PERIOD_S, GRANT_PERIODS * self.period_s)
        if old is None:
            noise, epsilon = exploration.noise, exploration.epsilon
            new = messages.Assignment(
                session=self._session,
                epoch=self.epoch,
                boot=actor.boot,
                channel=self._channel_of(actor),
                slot=actor.slot,
                epsilon_start=epsilon.start,
                epsilon_end=epsilon.end,
                epsilon_decay_steps=max(1, epsilon.decay_steps // n),
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
                shard=topics.shard_of(actor.actor_id, self._shards),
            )
        else:
            changes: dict[str, Any] = {
                "channel": self._channel_of(actor),
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
        if old is None:
            n_envs = actor.state.birth.n_envs if actor.state and actor.state.birth else 1
            actor.credits[actor.boot], actor.granted_at = n_envs - 1, now_s
        actor.credits[actor.boot] += new.steps_granted - (old.steps_granted if old else 0)
        actor.assignment = new
        return new
