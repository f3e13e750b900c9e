"""Decides which process has an actor's name where several go by it: one that was restarted, or a second machine.

A process with a higher boot has the name at once, since one that crashed starts again so. One with a lower boot has it
when the one before is gone: its counter was lost. If both prove to live, two machines share one bundle, and whichever
came later is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace

from broker.contract import messages
from learner.fleet import actors

_log = logging.getLogger(__name__)
PROOF_S = 1.0
"""Signs of life so far apart come from a process that lives: what a socket or a broker held back comes at once."""
CONTESTED_S = 60.0
"""Seconds after a second process of one name was refused, for which another one waits until the first is gone."""
_RIVALS = 4
_PROCESS_FIELDS = ("state", "live", "seen_at", "boot", "recorded", "refused", "assignment", "version", "since_s")


class Names:
    """Keeps the rivals of each actor, and what those that were refused are to be told."""

    def __init__(self) -> None:
        self._rejections: dict[tuple[str, int], tuple[messages.Assignment | None, str]] = {}

    def claim(
        self, actor: actors.Actor, state: messages.ActorState, *, retained: bool, now_s: float, silence_s: float
    ) -> bool:
        """Gives a process the actor's name, if it is due it; returns whether it is.

        Args:
            actor: The actor, whose name another process has.
            state: What this process says.
            retained: Whether that may be yesterday's.
            now_s: Monotonic time.
            silence_s: Seconds without a sign of life, after which a process counts as gone.
        """
        key = state.boot, state.session
        rival = actor.rivals.get(key)
        if rival is None and state.boot > actor.boot and now_s - actor.contested_at > CONTESTED_S:
            if state.online and actor.live:
                self._set_aside(actor)
            return state.online or not actor.live
        if retained or (rival is not None and state.heartbeat <= rival.heartbeat):
            return False
        if not state.online:
            actor.rivals.pop(key, None)
            return False
        if rival is None:
            rival = self._rival(actor, key, actors.Actor(actor.actor_id, actor.slot, boot=state.boot, since_s=now_s), 0)
        if not rival.first_s <= now_s <= rival.last_s + silence_s:
            rival.first_s = now_s
        rival.heartbeat, rival.last_s = state.heartbeat, now_s
        if now_s - rival.first_s < PROOF_S:
            return False
        if not actor.live:
            self._hand_over_name(actor, key)
            return True
        if actor.seen_at <= rival.first_s:
            return False  # it may be gone: it has been silent for as long as the other one speaks
        actor.contested_at = now_s
        if rival.process.since_s >= actor.since_s:
            self._refuse(actor, rival)
            return False
        later = self._set_aside(actor)
        self._hand_over_name(actor, key)
        self._refuse(actor, later)
        return True

    def _rival(self, actor: actors.Actor, key: tuple[int, str], process: actors.Actor, heartbeat: int) -> actors.Rival:
        while len(actor.rivals) >= _RIVALS:
            del actor.rivals[min(actor.rivals, key=lambda other: actor.rivals[other].last_s)]
        made = actor.rivals[key] = actors.Rival(process, heartbeat)
        return made

    def _set_aside(self, actor: actors.Actor) -> actors.Rival:
        """Makes the process that has the name a rival; it keeps its account."""
        assert actor.state is not None
        process = replace(actor, rivals={})
        return self._rival(actor, (actor.boot, actor.state.session), process, actor.state.heartbeat)

    def _hand_over_name(self, actor: actors.Actor, key: tuple[int, str]) -> None:
        """Gives the name to a rival, with the account it has."""
        process = actor.rivals.pop(key).process
        for name in _PROCESS_FIELDS:
            setattr(actor, name, getattr(process, name))
        actor.due_at = -math.inf

    def _refuse(self, actor: actors.Actor, rival: actors.Rival) -> None:
        boot, old = rival.process.boot, rival.process.assignment
        todo = "enrol one of them under a name of its own: actorq-broker enroll NAME"
        if not rival.is_refused:
            rival.is_refused = True
            _log.warning("actor %s: two machines go by this name, and the later is refused; %s", actor.actor_id, todo)
        refused = f"another machine goes by the name {actor.actor_id!r}, and was there before; {todo}"
        self._rejections[actor.actor_id, boot] = old, refused

    def rejections(self) -> Iterator[tuple[str, int, messages.Assignment | None, str]]:
        """Yields actor, boot, old assignment and reason of processes that were refused since the last call."""
        while self._rejections:
            (actor_id, boot), (old, refused) = self._rejections.popitem()
            yield actor_id, boot, old, refused
