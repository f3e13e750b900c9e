"""Stops listening to actors that send far more than was asked of them, each time for longer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

_log = logging.getLogger(__name__)
_EXCESS = 500
"""Messages beyond what its tokens pay for, after which nothing more of an actor is subscribed to for a while: to read
packets only to leave them out took all of a core, and what nobody subscribes to the broker throws away by itself."""
_DEAF_S, _DEAFEST_S = 30.0, 600.0
"""Seconds of that: the first time, and at most. It is doubled each time."""


class Floods:
    """Counts excess messages by actor.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._excess: Counter[str] = Counter()  # by actor, since it was last not listened to
        self._deaf: dict[str, tuple[float, float]] = {}  # by actor: until when, and for how long that was

    def count(self, actor_id: str, messages: int) -> None:
        """Counts messages that were left out."""
        self._excess[actor_id] += messages

    def stop_listening(self) -> None:
        """Begins to leave out those that sent too many."""
        for actor_id in [one for one, count in self._excess.items() if count >= _EXCESS]:
            del self._excess[actor_id]
            deaf_s = min(_DEAFEST_S, 2 * self._deaf[actor_id][1] if actor_id in self._deaf else _DEAF_S)
            self._deaf[actor_id] = self._clock() + deaf_s, deaf_s
            _log.warning(
                "actor %s sends more than it was asked for (`rate`): nobody listens to it for %g s", actor_id, deaf_s
            )

    def unheard(self) -> frozenset[str]:
        """Returns those actors that are not to be listened to now."""
        now = self._clock()
        return frozenset(name for name, (until, _) in self._deaf.items() if now < until)
