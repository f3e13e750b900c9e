"""Whole policies from keyframes and deltas: what this actor holds that a delta can be based on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from broker.contract import errors, messages, policy_patch, specs
from edge_actor.policies import parts

Order = tuple[int, int]
"""Epoch and version: what orders policies."""


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A policy with its bytes, and the sealed messages it can be made from again (none for one between two anchors).

    The interpreter reads the same bytes in place: there is one copy of the policy that acts.
    """

    manifest: messages.Manifest
    model: bytes
    sources: tuple[bytes, ...]

    @property
    def order(self) -> Order:
        return self.manifest.epoch, self.manifest.version


def check_manifest(manifest: messages.Manifest, model_bytes: int, spec: specs.EnvSpec, now_s: float | None) -> None:
    """Refuses a policy by what its manifest says, before its bytes are looked at.

    Args:
        manifest: Signed by the learner.
        model_bytes: Length of the model that came, or that a delta would give.
        spec: Of the environment here.
        now_s: Unix time; None on a board that cannot know it, where nothing expires.

    Raises:
        PolicyError: It is too large, of another length, made for another spec, or expired.
    """
    if max(manifest.length, model_bytes) > messages.MAX_POLICY_BYTES:
        raise errors.PolicyError(f"the policy has {model_bytes} bytes, more than any actor takes", reason="size")
    if manifest.length != model_bytes:
        raise errors.PolicyError(
            f"the policy has {model_bytes} bytes, its manifest says {manifest.length}", reason="length"
        )
    if manifest.fingerprint != spec.fingerprint:
        raise errors.PolicyError(
            f"the policy is for spec {manifest.fingerprint}, this environment {spec.fingerprint} ({spec.describe()})",
            reason="fingerprint",
        )
    if manifest.head not in spec.action.heads:
        raise errors.PolicyError(f"a head {manifest.head!r} cannot choose these actions", reason="head")
    _check_expiry(manifest, now_s)


def check(manifest: messages.Manifest, model: bytes | memoryview, spec: specs.EnvSpec, now_s: float | None) -> None:
    """Refuses a policy that must not reach an interpreter. As `check_manifest`, and then the bytes themselves.

    Args:
        manifest: Signed by the learner.
        model: The bytes.
        spec: Of the environment here.
        now_s: As of `check_manifest`.

    Raises:
        PolicyError: Also if the bytes are not those of the manifest.
    """
    check_manifest(manifest, len(model), spec, now_s)
    if manifest.sha256 != hashlib.sha256(model).hexdigest():
        raise errors.PolicyError("the policy's bytes are not those of its manifest", reason="sha256")


def _check_expiry(manifest: messages.Manifest, now_s: float | None) -> None:
    if now_s is not None and 0.0 < manifest.expires_s < now_s:
        raise errors.PolicyError("the policy has expired", reason="expired")


class Reassembly:
    """Holds the keyframe, the newest policy, and at most one delta whose base has not come yet.

    Args:
        spec: Of the environment.

    Attributes:
        floor: Order of the newest policy that this actor is known to have acted on, in earlier lives too. What is older
            may still be a base, and never acts.
        keyframe: The newest keyframe that came.
        newest: The newest policy that passed the checks; its order never falls.
    """

    def __init__(self, spec: specs.EnvSpec) -> None:
        self._spec = spec
        self.floor: Order = (0, 0)
        self.keyframe: Whole | None = None
        self.newest: Whole | None = None
        self._retained: Order = (0, 0)  # of the newest delta from a keyframe, which comes again with every connection
        self._waiting: tuple[messages.PolicyDelta, bytes] | None = None
        self._begun: parts.Parts | None = None

    @property
    def best(self) -> Order:
        """Order of the newest policy that passed the checks."""
        return self.newest.order if self.newest else (0, 0)

    def add_keyframe(self, message: messages.Policy, sealed: bytes, now_s: float | None) -> bool:
        """Takes in a whole policy; true if it became the newest.

        Older than the newest, or expired, it is kept all the same, as the base of deltas to come; only one older than
        the keyframe that is here already serves nothing.

        Raises:
            PolicyError: It must not run, or is a replay of an old one.
        """
        order: Order = (message.manifest.epoch, message.manifest.version)
        held = self.keyframe.order if self.keyframe else (0, 0)
        if order == held:
            return False
        if order < held or order[0] < self.floor[0]:
            raise errors.PolicyError(f"policy {order} is older than {max(held, self.floor)}", reason="older")
        check(message.manifest, message.model.data, self._spec, None)
        whole = self.keyframe = Whole(message.manifest, message.model.tobytes(), (sealed,))
        if whole.order < max(self.best, self.floor):
            return False
        _check_expiry(message.manifest, now_s)
        is_new = whole.order > self.best
        self.newest = whole
        return is_new

    def add_part(self, message: messages.PolicyPart) -> Whole | None:
        """Takes in the next bytes of a policy to come; the first ones begin it, whatever came of another.

        Returns:
            With the last ones, what it will be if it becomes one; its manifest has no digest, nor times of its own.

        Raises:
            PolicyError: It is a replay, does not follow the part before, or its base is not here (`reason` is `base`).
        """
        order: Order = (message.epoch, message.version)
        if order <= max(self.best, self.floor):
            raise errors.PolicyError(f"a part of policy {order}, older than {self.best}", reason="older")
        if message.start == 0:
            base = self._base((message.epoch, message.base))
            self._begun = None
            if base is None:
                raise errors.PolicyError(f"policy {order} is a delta from {message.base}, not here", reason="base")
            self._begun = parts.Parts(order, base.manifest, message.draft, base.model)
        if self._begun is None:
            raise errors.PolicyError(f"a part of policy {order}, whose first is not here", reason="parts")
        self._begun.add(message)
        model = self._begun.whole()
        return None if model is None else Whole(self._begun.manifest, model, ())

    def add_delta(self, message: messages.PolicyDelta, sealed: bytes, now_s: float | None) -> bool:
        """Takes in a delta; true if its policy became the newest.

        One that came in parts gets its digest when it comes from the keyframe, too. Should it be another one than that
        of the bytes here, it is made again.

        Raises:
            PolicyError: It must not run, is a replay of an old one, or its base is not here (`reason` is `base`). The
                last one of these is kept: `take_waiting` gives it when its base has come.
        """
        order: Order = (message.epoch, message.version)
        base = self._base((message.epoch, message.base))
        is_retained = base is not None and base is self.keyframe and not message.draft
        least = max(self.best, self.floor)
        if order < least and not (is_retained and order == self._retained):
            raise errors.PolicyError(f"policy {order} is older than {least}", reason="older")
        if is_retained:
            self._retained = max(order, self._retained)
        if order < least:
            return False
        held = self.newest if order == self.best else None
        if held is not None and (held.sources or not is_retained):
            return False
        if base is None:
            self._waiting = (message, sealed)
            raise errors.PolicyError(f"policy {order} is a delta from {message.base}, not here", reason="base")
        manifest = message.manifest(base.manifest)
        check_manifest(manifest, len(base.model), self._spec, now_s)
        sources = (*base.sources, sealed) if is_retained else ()
        if held is not None and manifest.sha256 == hashlib.sha256(held.model).hexdigest():
            self.newest = Whole(manifest, held.model, sources)
            return False
        if message.draft:
            model = self._take_parts(order, base.order, message.draft)
        else:
            model = policy_patch.apply(base.model, message.patch)
            check(manifest, model, self._spec, now_s)
        self.newest = Whole(manifest, model, sources)
        return True

    def _base(self, order: Order) -> Whole | None:
        bases = [whole for whole in (self.keyframe, self.newest) if whole is not None]
        return next((whole for whole in bases if whole.order == order), None)

    def _take_parts(self, order: Order, base: Order, draft: int) -> bytes:
        begun, self._begun = self._begun, None
        made = begun.whole() if begun is not None and begun.name == (order, base, draft) else None
        if made is None:
            raise errors.PolicyError(f"not all of policy {order} came before its manifest", reason="parts")
        return made

    def take_waiting(self) -> tuple[messages.PolicyDelta, bytes] | None:
        """The delta that waits, if its base is the keyframe now. It is given once."""
        waiting = self._waiting
        if waiting is None or self.keyframe is None:
            return None
        message = waiting[0]
        if (message.epoch, message.base) != self.keyframe.order:
            return None
        self._waiting = None
        return waiting
