"""The keys of the actors that are enrolled, followed while a session goes on: one that is revoked is cut off."""

from __future__ import annotations

import time

from broker.contract import errors, signing
from broker.fleet import enrolled, identity

_PERIOD_S = 0.1  # how long a revoked actor may still be heard


class Enrolment:
    """Follows who is enrolled.

    Args:
        fleet: The fleet's keys.

    Attributes:
        macs: The MAC of each enrolled actor; always the same dict.
    """

    def __init__(self, fleet: identity.Fleet) -> None:
        self._fleet = fleet
        self._enrolled = enrolled.Enrolled(fleet, lambda bundle: signing.ActorMac(bundle.mac_key))
        self._looked_at = -_PERIOD_S
        self.macs = self._enrolled.found

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
        if self._enrolled.follow():
            self._fleet.check_key()
