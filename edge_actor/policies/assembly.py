"""Policies put together from what comes: whole, as a patch on the retained one, or in pieces from one to the next."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from broker.contract import errors, messages, specs
from broker.contract.policies import policy_patch
from edge_actor.policies import manifest_check, pieces

Message = messages.Policy | messages.PolicyPatch | messages.PolicyPiece
"""A message that may make a policy."""
_NONE = messages.Order(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class WholePolicy:
    """A policy with its bytes, and the sealed messages it can be made from again (none for one that came in pieces).

    The interpreter reads the same bytes in place: there is one copy of the policy that acts.
    """

    manifest: messages.Manifest
    model: bytes
    sources: tuple[bytes, ...]

    @property
    def order(self) -> messages.Order:
        """Its place among all policies."""
        return self.manifest.order


class Assembly:
    """Holds the retained whole policy, the newest one, the pieces of one to come, and one patch that lacks its base.

    Args:
        spec: The environment here.

    Attributes:
        floor: Order of the newest policy that this actor is known to have acted on, in earlier lives too. What is older
            may still be a base, and never acts.
        retained: The newest policy that came as a whole, which patches are on.
        newest: The newest policy that passed the checks; its order never falls.
        ahead: A policy all of whose bytes are here, before its last piece: it must not act, and may never.
    """

    def __init__(self, spec: specs.EnvSpec) -> None:
        self._spec = spec
        self.floor = _NONE
        self.retained: WholePolicy | None = None
        self.newest: WholePolicy | None = None
        self.ahead: WholePolicy | None = None
        self._patched = _NONE  # the newest patch that came, which comes again with every connection
        self._waiting: tuple[messages.PolicyPatch, bytes] | None = None
        self._begun: pieces.Pieces | None = None

    @property
    def best(self) -> messages.Order:
        """Order of the newest policy that passed the checks."""
        return self.newest.order if self.newest else _NONE

    def add(self, message: Message, sealed: bytes, now_s: float | None) -> bool:
        """Takes in a message that came as `sealed`.

        Args:
            message: Signed by the learner.
            sealed: The bytes that it came as; kept for as long as the policy can be made from them.
            now_s: Unix time; None on a board that cannot know it, where nothing expires.

        Returns:
            Whether it gave a policy that is now the newest.

        Raises:
            PolicyError: Its policy must not run; or it is a replay of an old one (`reason` is `older`), lacks its base
                (`base`), or pieces before it (`pieces`).
        """
        if isinstance(message, messages.Policy):
            return self._add_policy(message, sealed, now_s)
        if isinstance(message, messages.PolicyPatch):
            return self._add_patch(message, sealed, now_s)
        return self._add_piece(message, now_s)

    def pop_waiting(self) -> tuple[messages.PolicyPatch, bytes] | None:
        """Returns the patch that lacked its base, once, when that is here; `add` it again."""
        waiting = self._waiting
        if waiting is None or self._base_of(waiting[0]) is None:
            return None
        self._waiting = None
        return waiting

    def _add_policy(self, message: messages.Policy, sealed: bytes, now_s: float | None) -> bool:
        """Takes in a whole policy.

        Older than the newest, or expired, it is kept all the same, as the base of patches to come; only one older than
        the whole one that is here already serves nothing.
        """
        order, held = message.order, self.retained.order if self.retained else _NONE
        if order == held:
            return False
        if order < held or order.epoch < self.floor.epoch:
            raise errors.PolicyError(f"policy {order} is older than {max(held, self.floor)}", reason="older")
        manifest_check.check_policy(message.manifest, message.model.data, self._spec, None)
        self.retained = whole = WholePolicy(message.manifest, message.model.tobytes(), (sealed,))
        if order < max(self.best, self.floor):
            return False
        manifest_check.check_expiry(message.manifest, now_s)
        is_new = order > self.best
        self.newest = whole
        return is_new

    def _add_patch(self, message: messages.PolicyPatch, sealed: bytes, now_s: float | None) -> bool:
        """Takes in a patch on the retained policy; if that is not here, the last such patch waits for it.

        A policy that came in pieces gets its digest now. Should that not fit the bytes here, it is made again.
        """
        order, least = message.order, max(self.best, self.floor)
        base = self._base_of(message)
        if order < least and not (base is not None and order == self._patched):
            raise errors.PolicyError(f"policy {order} is older than {least}", reason="older")
        if base is not None:
            self._patched = max(order, self._patched)
        held = self.newest if order == self.best else None
        if order < least or (held is not None and held.sources):
            return False
        if base is None:
            self._waiting = (message, sealed)
            raise self._lacks_base(order, message.base)
        manifest, sources = base.manifest.followed_by(message.version, message.changes), (*base.sources, sealed)
        manifest_check.check_manifest(manifest, len(base.model), self._spec, now_s)
        if held is not None and manifest.sha256 == (held.manifest.sha256 or hashlib.sha256(held.model).hexdigest()):
            self.newest = WholePolicy(manifest, held.model, sources)
            return False
        model = policy_patch.apply(base.model, message.patch)
        manifest_check.check_digest(manifest, model)
        self.newest = WholePolicy(manifest, model, sources)
        if held is not None:
            self._begun = self.ahead = None  # pieces on what those pieces made wrongly
        return True

    def _add_piece(self, piece: messages.PolicyPiece, now_s: float | None) -> bool:
        """Takes in a piece; a first one begins its policy, whatever came of another."""
        order, least, changes = piece.order, max(self.best, self.floor), piece.changes
        if order < least or (order == self.best and changes is None):
            raise errors.PolicyError(f"a piece of policy {order}, no newer than {least}", reason="older")
        if order == self.best:
            return False  # the same again
        if piece.start == 0:
            self._begin(piece)
        if self._begun is None:
            raise errors.PolicyError(f"a piece of policy {order}, whose first is not here", reason="pieces")
        base = self._begun.base
        if changes is None:
            self._begun.add(piece)
            model, manifest = self._begun.whole(), replace(base, version=order.version, sha256="")
            self.ahead = None if model is None else WholePolicy(manifest, model, ())
            return False
        manifest = base.followed_by(order.version, changes)
        manifest_check.check_manifest(manifest, base.length, self._spec, now_s)
        self._begun.add(piece)
        model = self._begun.whole()
        if model is None:
            raise errors.PolicyError(f"not all of policy {order} came before its last piece", reason="pieces")
        if changes.sha256 is not None or piece.start == 0:  # only what went ahead in pieces needs no digest
            manifest_check.check_digest(manifest, model)
        self.newest = WholePolicy(manifest, model, ())
        self._begun = self.ahead = None
        return True

    def _begin(self, first: messages.PolicyPiece) -> None:
        self._begun = self.ahead = None
        base = self._held(messages.Order(first.epoch, first.base))
        if base is None:
            raise self._lacks_base(first.order, first.base)
        self._begun = pieces.Pieces(first, base.manifest, base.model)

    def _base_of(self, patch: messages.PolicyPatch) -> WholePolicy | None:
        """Returns the policy that a patch is on, if it is here and came as a whole."""
        base = self._held(messages.Order(patch.epoch, patch.base))
        return base if base is not None and len(base.sources) == 1 else None

    def _held(self, order: messages.Order) -> WholePolicy | None:
        return next((one for one in (self.retained, self.newest) if one is not None and one.order == order), None)

    def _lacks_base(self, order: messages.Order, base: int) -> errors.PolicyError:
        return errors.PolicyError(f"policy {order} is based on {base}, which is not here", reason="base")
