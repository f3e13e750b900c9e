"""One actor as the learner sees it, and the other processes that go by its name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.contract import messages


@dataclass(slots=True)
class Actor:
    """One actor as the learner sees it; `recorded` counts steps of (this session, `boot`) that arrived.

    `since_s` is when its process was first heard of. `rivals` are other processes that went by its name lately: gone,
    most of them.
    `credits` is what its boots were granted in this session, rounded up to whole rows, less what arrived of it.
    """

    actor_id: str
    slot: int
    state: messages.ActorState | None = None
    live: bool = False
    seen_at: float = -math.inf
    boot: int = 0
    recorded: int = 0
    credits: dict[int, int] = field(default_factory=dict)
    granted_at: float = -math.inf  # a boot's first grant
    refused: str = ""
    assignment: messages.Assignment | None = None
    due_at: float = -math.inf  # when its pace is looked at again
    version: int = 0  # the newest policy of this session that it acted on
    since_s: float = -math.inf
    contested_at: float = -math.inf
    rivals: dict[tuple[int, str], Rival] = field(default_factory=dict)

    @property
    def is_paused(self) -> bool:
        """Returns whether an order keeps it from acting."""
        return self.state is not None and self.state.vitals.paused

    def process(self, boot: int) -> Actor | None:
        """Returns the account of a boot: this one, or a rival's; None if there is none."""
        if boot == self.boot:
            return self
        return next((rival.process for rival in self.rivals.values() if rival.process.boot == boot), None)


@dataclass(slots=True)
class Rival:
    """A process that does not have its actor's name, or has lost it to another; and its signs of life since then."""

    process: Actor
    heartbeat: int
    first_s: float = math.inf
    last_s: float = -math.inf
    is_refused: bool = False


def facts(actor: Actor) -> dict[str, str | int | float | bool]:
    """Returns what an actor last said of itself and its board; nothing before it was heard."""
    if actor.state is None:
        return {}
    born, vitals = actor.state.birth, actor.state.vitals
    known: dict[str, str | int | float | bool] = {
        "power_source": vitals.power_source,
        "power_modelled": vitals.power_modelled,
    }
    if born is not None:
        names = ("env_id", "n_envs", "board", "python", "runtime", "rate_hz")
        known |= {name: getattr(born, name) for name in names} | {"delegate": vitals.delegate or born.delegate}
    return known


def names(actors: Sequence[Actor]) -> str:
    """Returns the names of the first few, for people."""
    shown = ", ".join(actor.actor_id for actor in actors[:3])
    return f"{shown} and {len(actors) - 3} more" if len(actors) > 3 else shown
