"""Tells people what holds a run up: whose environment fails, what is waited for, and how long yet."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from broker.contract import messages

_log = logging.getLogger(__name__)
FIRST_S, AGAIN_S = 5.0, 10.0
_DIFFERS_S, _FAILS_ON_S = 5.0, 30.0
_COUNT_MAX = 1 << 53  # of what one actor says: any larger number is no count, and no float
_MESSAGE_LENGTH = 300


@dataclass(slots=True)
class Failures:
    """The failures of one actor's environment, in all its boots; `message` is the newest."""

    count: int = 0
    message: str = ""
    boot: int = 0
    of_boot: int = 0
    said_count: int = 0
    said_message: str = ""
    said_at: float = -math.inf

    def is_news(self, now_s: float) -> bool:
        """Returns whether people should hear of it: another message or twice as many soon, or more after a while."""
        ago_s = now_s - self.said_at
        differs = self.message != self.said_message or self.count >= 2 * self.said_count
        return self.count > self.said_count and ago_s >= (_DIFFERS_S if differs else _FAILS_ON_S)


class Notices:
    """Logs what is news, and counts all.

    Attributes:
        environments: Those that failed, by actor.
    """

    def __init__(self) -> None:
        self.environments: dict[str, Failures] = {}
        self._moved: object = None
        self._due_s = -math.inf

    @property
    def env_failures(self) -> int:
        """The times that environments failed, as far as their actors said."""
        return sum(one.count for one in self.environments.values())

    def metrics(self) -> dict[str, float]:
        """Returns the count of failures, for a row of metrics."""
        return {"env_failures": self.env_failures}

    def summary(self) -> dict[str, Any]:
        """Returns count and message by actor, for the summary."""
        return {
            "env_failures": {
                actor_id: {"count": one.count, "message": one.message} for actor_id, one in self.environments.items()
            }
        }

    def observe(self, actor_id: str, state: messages.ActorState, now_s: float) -> None:
        """Counts how often an actor's environment failed, and logs it when that is news."""
        of_boot = min(max(0, state.vitals.env_failures), _COUNT_MAX)
        if not of_boot:
            return
        known = self.environments.setdefault(actor_id, Failures())
        if state.boot != known.boot:
            known.boot, known.of_boot = state.boot, 0
        known.count += max(0, of_boot - known.of_boot)
        known.of_boot = max(of_boot, known.of_boot)
        known.message = state.vitals.env_failure[:_MESSAGE_LENGTH] or known.message
        if known.is_news(now_s):
            known.said_count, known.said_message, known.said_at = known.count, known.message, now_s
            _log.warning("the environment of actor %s failed %s", actor_id, describe(known))

    def is_stuck(self, moved: object, now_s: float) -> bool:
        """Returns whether it is time to say what is waited for.

        Args:
            moved: Anything that differs once something moved.
            now_s: Monotonic time.
        """
        if moved != self._moved:
            self._moved, self._due_s = moved, now_s + FIRST_S
        if now_s < self._due_s:
            return False
        self._due_s = now_s + AGAIN_S
        return True


def describe(known: Failures) -> str:
    """Returns how often, and how, for people."""
    times = "once" if known.count == 1 else f"{known.count:,} times"
    return f"{times}: {known.message or 'its actor does not say how'}"


def duration(seconds: float) -> str:
    """Returns a time yet to come, as people say it."""
    if not math.isfinite(seconds):
        return "an unknown time"
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"about {seconds / unit:.0f} {name}"
    return f"about {seconds:.0f} s"
