"""The keys of the actors that are enrolled, followed while a session goes on: one that is revoked is cut off."""

from __future__ import annotations

import contextlib
import time

from broker.contract import errors, signing
from broker.fleet import identity

_PERIOD_S = 0.1  # how long a revoked actor may still be heard
_TICK_S = 2.5  # longer than any file system's clock takes to tell two changes apart


class Enrolment:
    """Follows who is enrolled.

    Args:
        fleet: The fleet's keys.

    Attributes:
        macs: The MAC of each enrolled actor; always the same dict.
    """

    def __init__(self, fleet: identity.Fleet) -> None:
        self._fleet = fleet
        self._known: frozenset[tuple[str, int, int]] = frozenset()
        self._looked_at = -_PERIOD_S
        self._enrolled_ns, self._changed_at, self._read_at = -1, 0.0, 0.0
        self.macs: dict[str, signing.ActorMac] = {}

    def mac(self, actor_id: str) -> signing.ActorMac:
        """Returns the MAC of an actor.

        Raises:
            SignatureError: It is not enrolled.
        """
        mac = self.macs.get(actor_id)
        if mac is None:
            raise errors.SignatureError("the actor is not enrolled", reason="unknown_actor")
        return mac

    def follow(self) -> None:
        """Takes in actors that were enrolled since, with their newest key, and forgets those that were revoked.

        Raises:
            IdentityError: The fleet has another key by now.
        """
        now = time.monotonic()
        if now - self._looked_at < _PERIOD_S:
            return
        self._looked_at = now
        if (enrolled_ns := self._fleet.enrolled_ns) != self._enrolled_ns:
            self._enrolled_ns, self._changed_at = enrolled_ns, now
        elif self._read_at > self._changed_at + _TICK_S:  # of 500 actors, each look takes milliseconds
            return
        self._read_at, enrolment = now, self._fleet.enrolment
        if enrolment == self._known:
            return
        self._known = enrolment
        self._fleet.check_key()
        for gone in self.macs.keys() - set(self._fleet.actors()):
            del self.macs[gone]
        for name in self._fleet.actors():
            with contextlib.suppress(errors.IdentityError):  # a broken file is this actor's trouble alone
                self.macs[name] = signing.ActorMac(self._fleet.bundle(name).mac_key)
