"""The age of experience: the seconds from its sealing on the actor until it enters replay.

A message says when it was finished, by its actor's clock: as its last step was taken, its first one up to a message
period before. An actor that does not know the time says nothing, and its experience has no age. Of the process whose
heartbeats come, the clock is compared with this one: they say when they were made, and the one that came quickest says
by how much the clocks differ. Up to CLOCK_ERROR_S that is called the way. What an earlier process of an actor left is
taken by the clocks as they are: nobody knows what its clock said then.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from broker.contract import messages

CLOCK_ERROR_S = 1.0
"""A heartbeat that seems to have taken no longer, and not to come from the future by as much, tells of no wrong clock.
"""
_HEARTBEATS = 128
"""The newest heartbeats of an actor that are compared. A learner that stood still for a minute gets sixty of them late,
and needs one that was not held up; an actor's clock that was set back in between is noticed once so many came since."""
_UNHEARD = 0, 0.0
_REMEMBERED = 4096
"""Messages whose ages the summary is made of: the newest."""


class Dated(Protocol):
    """A message as far as its age goes."""

    @property
    def boot(self) -> int: ...

    @property
    def created_ms(self) -> int: ...


class Made(NamedTuple):
    """The same of a message that is elsewhere."""

    boot: int
    created_ms: int


class Ages:
    """Tells how old messages are, and which are too old to be learned from.

    Args:
        limit_s: What is older when it comes does not enter replay; 0: no limit.
        clock: Unix time, in seconds.
        monotonic: Seconds since any time, by which it is noticed that `clock` was set.

    Attributes:
        steps_too_old: Steps that did not, of this session.
        messages_of_unknown_age: Messages that entered replay and did not say when they were finished.
    """

    def __init__(
        self,
        limit_s: float = 0.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._clock, self._monotonic = limit_s, clock, monotonic
        self._offset_s: float | None = None  # of our two clocks
        self._ways: dict[str, tuple[int, collections.deque[float]]] = {}  # boot, and seconds of its heartbeats
        self._errors: dict[str, tuple[int, float]] = {}  # boot, and by how much its clock is behind, in seconds
        self._newest: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._since_row: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self.steps_too_old = self.messages_of_unknown_age = 0

    def hear(self, actor_id: str, boot: int, created_s: float) -> None:
        """Takes note of a heartbeat that has just come, and not of a retained one.

        Args:
            actor_id: Whose.
            boot: Of which process.
            created_s: Unix time at which it was made, by its clock; 0: unknown.
        """
        if not 0.0 < created_s < 1 << 53:
            return
        offset_s = self._clock() - self._monotonic()
        if self._offset_s is None or abs(offset_s - self._offset_s) > CLOCK_ERROR_S:  # our clock was set
            self._offset_s = offset_s
            self._ways.clear()
            self._errors.clear()
        known = self._ways.get(actor_id)
        if known is None or known[0] != boot:
            known = self._ways[actor_id] = boot, collections.deque(maxlen=_HEARTBEATS)
        known[1].append(self._clock() - created_s)
        error_s = min(known[1])
        self._errors[actor_id] = boot, error_s if abs(error_s) > CLOCK_ERROR_S else 0.0

    def age_s(self, actor_id: str, message: Dated) -> float | None:
        """Returns how old a message is now; None if its actor did not know the time."""
        if not message.created_ms:
            return None
        boot, error_s = self._errors.get(actor_id, _UNHEARD)
        if boot != message.boot:
            error_s = 0.0
        return max(0.0, self._clock() - message.created_ms / 1e3 - error_s)

    def is_too_old(self, actor_id: str, message: messages.Experience) -> bool:
        """Returns whether a message that has just come is older than the limit, and counts it if so."""
        if not self._limit_s:
            return False
        age_s = self.age_s(actor_id, message)
        if age_s is None or age_s <= self._limit_s:
            return False
        self.steps_too_old += len(message.reward)
        return True

    def note_inserted(self, inserted: Iterable[tuple[str, Dated]]) -> None:
        """Takes note of messages, by actor, that have just entered replay for the first time."""
        for actor_id, message in inserted:
            if (age_s := self.age_s(actor_id, message)) is None:
                self.messages_of_unknown_age += 1
            else:
                self._newest.append(age_s)
                self._since_row.append(age_s)

    def metrics(self) -> dict[str, float]:
        """Returns median and 99th percentile of the messages since the last call, and counts, for a row of metrics."""
        found = {name: value for name, value in _percentiles(self._since_row) if value is not None}
        self._since_row.clear()
        return found | self._counts()

    def summary(self) -> dict[str, Any]:
        """Returns the same of the session's newest messages, for the summary."""
        return {**dict(_percentiles(self._newest)), **self._counts()}

    def _counts(self) -> dict[str, int]:
        """Returns the counts; what is too old by its age is one with what is by its policy (`Rollouts.steps_stale`)."""
        return {
            "steps_stale": self.steps_too_old,
            "steps_too_old": self.steps_too_old,
            "messages_of_unknown_age": self.messages_of_unknown_age,
        }


def _percentiles(ages: collections.deque[float]) -> Iterator[tuple[str, float | None]]:
    for q in (50, 99):
        yield f"experience_age_s_p{q}", float(np.percentile(ages, q)) if ages else None
