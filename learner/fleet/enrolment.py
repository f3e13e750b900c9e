"""The keys of the actors that are enrolled, followed while a session goes on: one that is revoked is cut off."""

from __future__ import annotations

import concurrent.futures
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
        version: A number that grows with each change of `macs`.
    """

    def __init__(self, fleet: identity.Fleet) -> None:
        self._fleet = fleet
        self._enrolled = enrolled.Enrolled(fleet, lambda bundle: signing.ActorMac(bundle.mac_key))
        self._looked_at = 0.0
        self._looker = concurrent.futures.ThreadPoolExecutor(1, "enrolment")
        self._look: concurrent.futures.Future[enrolled.Changes[signing.ActorMac]] | None = None
        self.macs = self._enrolled.found
        self.version = 0

    def mac(self, actor_id: str) -> signing.ActorMac:
        """Returns the MAC of an actor.

        Raises:
            SignatureError: It is not enrolled.
        """
        mac = self.macs.get(actor_id)
        if mac is None:
            raise errors.SignatureError("the actor is not enrolled", reason="unknown_actor")
        return mac

    def read(self) -> None:
        """Takes in all that are enrolled, and waits for it."""
        self._apply(self._enrolled.look())

    def follow(self) -> None:
        """Takes in actors that were enrolled since, with their newest key, and forgets those that were revoked.

        Not at once: to look at ten thousand takes a tenth of a second and more, which a thread spends.

        Raises:
            IdentityError: The fleet has another key by now.
            OSError: Its directory cannot be read.
        """
        if self._look is not None:
            if not self._look.done():
                return
            look, self._look = self._look, None
            self._apply(look.result())
        now = time.monotonic()
        if now - self._looked_at >= _PERIOD_S:
            self._looked_at = now
            if self._enrolled.is_due:
                self._look = self._looker.submit(self._enrolled.look)

    def _apply(self, changes: enrolled.Changes[signing.ActorMac]) -> None:
        if changes:
            self._enrolled.apply(changes)
            self.version += 1
            self._fleet.check_key()
