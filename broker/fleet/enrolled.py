"""Follows who is enrolled in a fleet, for whoever lets actors in: brokers by password, learners by MAC key."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from broker.contract import errors
from broker.fleet import identity

_TICK_S = 2.5
"""Longer than any file system's clock takes to tell two changes apart."""
_SHARE = 0.1
"""The most of its time that a follower spends on looks for a second change within a tick."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Changes = dict[str, _T | None]
"""What is kept of each actor that was enrolled, or enrolled anew; None for one that was revoked."""


class Enrolled(Generic[_T]):
    """Follows the bundles in a fleet's directory, and reads only those that are new or were written anew.

    Args:
        fleet: Whose actors.
        wanted: Returns what is kept of a bundle: of ten thousand, whole ones would take 40 MB.

    Attributes:
        found: What is kept, by actor; always the same dict.
    """

    def __init__(self, fleet: identity.Fleet, wanted: Callable[[identity.Bundle], _T]) -> None:
        self._fleet, self._wanted = fleet, wanted
        self._files: dict[str, tuple[int, int]] = {}
        self._enrolled_ns, self._changed_at, self._looked_at, self._took_s = -1, 0.0, 0.0, 0.0
        self.found: dict[str, _T] = {}

    def follow(self) -> bool:
        """Takes in who was enrolled since, or enrolled anew, and forgets who was revoked; returns whether anyone was.

        A bundle that cannot be read is its actor's trouble alone: what was known of it stays.

        Raises:
            OSError: The directory cannot be read.
        """
        changes = self.look()
        self.apply(changes)
        return bool(changes)

    @property
    def is_due(self) -> bool:
        """Returns whether a look may find something; that takes one of the directory's own.

        Raises:
            OSError: The directory cannot be read.
        """
        if self._fleet.enrolled_ns != self._enrolled_ns:
            return True
        is_settled = self._looked_at > self._changed_at + _TICK_S
        return not is_settled and time.monotonic() - self._looked_at >= self._took_s / _SHARE

    def look(self) -> Changes[_T]:
        """Returns what changed since the last look, and leaves `found` alone: it may go on in a thread of its own.

        Raises:
            OSError: The directory cannot be read.
        """
        if not self.is_due:
            return {}
        now = time.monotonic()
        if (enrolled_ns := self._fleet.enrolled_ns) != self._enrolled_ns:
            self._enrolled_ns, self._changed_at = enrolled_ns, now
        self._looked_at, files = now, self._fleet.enrolment
        self._took_s = time.monotonic() - now  # of ten thousand actors, a look at each takes 40 ms
        new = [name for name, file in files.items() if self._files.get(name) != file]
        changes: Changes[_T] = dict.fromkeys(self._files.keys() - files.keys())
        self._files = files
        for name in new:
            try:
                changes[name] = self._wanted(self._fleet.bundle(name))
            except errors.IdentityError as error:
                _log.warning("%s %s: %s", "keeping" if name in self.found else "leaving out", name, error)
        return changes

    def apply(self, changes: Changes[_T]) -> None:
        """Takes in what `look` has seen."""
        for name, kept in changes.items():
            if kept is None:
                self.found.pop(name, None)
            else:
                self.found[name] = kept
