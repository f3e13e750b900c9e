"""A large policy that comes in parts, ahead of the message that makes it one."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np

from broker.contract import errors, messages, policy_patch

Order = tuple[int, int]
"""Epoch and version."""


class Parts:
    """What has come of one policy, added to its base. Never more than that has.

    Args:
        order: Of the policy to come.
        base: Manifest of the policy that the parts are differences from.
        draft: Their number.
        model: The base's bytes.

    Attributes:
        manifest: What the policy's will be, but for its digest and times.
    """

    def __init__(self, order: Order, base: messages.Manifest, draft: int, model: bytes) -> None:
        self.name = order, (base.epoch, base.version), draft
        self.manifest = replace(base, version=order[1], sha256="")
        self._base_model = memoryview(model)
        self._made = io.BytesIO(bytes(len(model)))  # gives its bytes away without a copy
        self._size = 0

    def add(self, part: messages.PolicyPart) -> None:
        """Takes in the next part.

        Raises:
            PolicyError: It is not the next one (`reason` is `parts`), or cannot be unpacked.
        """
        name = (part.epoch, part.version), (part.epoch, part.base), part.draft
        if name != self.name or part.start != self._size or not part.start < part.end <= len(self._base_model):
            raise errors.PolicyError(f"bytes from {part.start} of policy {part.version} do not follow", reason="parts")
        cut = slice(part.start, part.end)
        with self._made.getbuffer() as view, view[cut] as piece:
            policy_patch.apply_to(self._base_model[cut], part.patch, np.frombuffer(piece, np.uint8))
        self._size = part.end

    def whole(self) -> bytes | None:
        """The policy's bytes, once all are here."""
        return self._made.getvalue() if self._size == len(self._base_model) else None
