"""One actor as its own states tell of it, and its last hour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.contract import messages
from learner.fleet import roster
from learner.operate.watch import history

CLOCK_ERROR_S = 30.0
"""A heartbeat is under way for less, so that a clock which is off by more is wrong."""
_RATE_S = 0.5
"""Two states closer together tell no rate: an actor says its state twice in a row when its policy changes."""


@dataclass(slots=True)
class Member:
    """An actor. Times are Unix times of this machine.

    `heard_s` is when it was last heard, None if all that is known was retained. `refused` is what its learner said, and
    `drift` what that found, by kind. `refusals_s` and `failures_s` are when it last told of refusals and failures of
    its environment that it had not told of before. `revision` is the view's when anything of this was last different.
    """

    actor_id: str
    state: messages.ActorState | None = None
    heard_s: float | None = None
    period_s: float = 0.0
    refused: str = ""
    steps_per_s: float | None = None
    clock_error_s: float | None = None
    refusals_s: float = -math.inf
    failures_s: float = -math.inf
    drift: Mapping[str, str] = field(default_factory=dict)
    alarms: dict[str, str] = field(default_factory=dict)
    revision: int = 0
    history: history.History = field(default_factory=history.History)
    _rate_from: tuple[float, int] = (0.0, 0)  # Unix time, steps

    def is_live(self, now_s: float) -> bool:
        """Returns whether it said lately that it is there; the learner of a large fleet lets it speak less often."""
        silence_s = roster.SILENCE_S + 2.0 * self.period_s
        return (
            self.state is not None
            and self.state.online
            and self.heard_s is not None
            and now_s - self.heard_s <= silence_s
        )

    def observe(self, state: messages.ActorState, *, retained: bool, now_s: float) -> bool:
        """Takes in a state, unless a newer one is known; returns whether it did.

        Of two states the one with the higher (boot, heartbeat) is true, but a process of a lower boot has the name once
        the one before is gone: its counter was lost.
        """
        old = self.state
        same = old is not None and (state.boot, state.session) == (old.boot, old.session)
        is_older = old is not None and (state.boot, state.heartbeat) <= (old.boot, old.heartbeat)
        if is_older and (same or retained or self.is_live(now_s)):
            return False
        self.state = state
        if not retained:
            self._note(state, old if same else None, now_s)
            self.heard_s = now_s
        return True

    def _note(self, state: messages.ActorState, old: messages.ActorState | None, now_s: float) -> None:
        vitals = state.vitals
        if old is None:
            self._rate_from, self.steps_per_s = (now_s, vitals.steps), None
        elif state.online and (elapsed_s := now_s - self._rate_from[0]) >= _RATE_S:
            self.steps_per_s = max(0, vitals.steps - self._rate_from[1]) / elapsed_s
            self._rate_from = now_s, vitals.steps
        before = old.vitals if old is not None else messages.Vitals()
        if sum(vitals.refused.values()) > sum(before.refused.values()):
            self.refusals_s = now_s
        if vitals.env_failures > before.env_failures:
            self.failures_s = now_s
        if state.online:  # a will has the time of its connection
            self.clock_error_s = vitals.created_s - now_s if vitals.created_s else None
            self.history.note(now_s, {**_figures(vitals), "steps_per_s": self.steps_per_s})

    def row(self, now_s: float) -> dict[str, Any]:
        """Returns what the page shows of it, as JSON has it."""
        state = self.state
        row: dict[str, Any] = {
            "actor": self.actor_id,
            "live": self.is_live(now_s),
            "heard_s": self.heard_s,
            "alarms": self.alarms,
            "steps_per_s": self.steps_per_s,
        }
        if state is None:
            return row
        vitals = state.vitals
        if born := state.birth:
            born_with = ("env_id", "n_envs", "board", "release", "python", "runtime", "rate_hz")
            row |= {name: getattr(born, name) for name in born_with}
        names = ("steps", "episodes", "deadlines_missed", "messages_held", "steps_dropped", "env_failures")
        row |= {name: getattr(vitals, name) for name in names}
        row |= _figures(vitals)
        return row | {
            "kernels": vitals.delegate or (state.birth.delegate if state.birth else ""),
            "policy": f"{vitals.policy_epoch}.{vitals.policy_version}",
            "schema": state.schema,
            "throttled": vitals.throttled,
            "power_source": vitals.power_source,
            "power_modelled": vitals.power_modelled,
            "refusals": sum(vitals.refused.values()),
            "refused": vitals.refused,
            "created_s": vitals.created_s,
        }


def _figures(vitals: messages.Vitals) -> dict[str, float | None]:
    return {key: getattr(vitals, key) for key in history.KEYS if key != "steps_per_s"}
