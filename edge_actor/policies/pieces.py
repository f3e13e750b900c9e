"""The pieces of one policy, each added to the bytes of its base as it comes."""

from __future__ import annotations

from broker.contract import errors, messages
from broker.contract.policies import policy_patch, room


class Pieces:
    """The pieces that have come of one policy; they take as much memory as the policy, however many come.

    Args:
        first: The piece that begins it.
        base: Manifest of the policy that the pieces are patches on.
        model: The base's bytes.

    Attributes:
        base: As given.
    """

    def __init__(self, first: messages.PolicyPiece, base: messages.Manifest, model: bytes) -> None:
        self.base = base
        self._name = _name(first)
        self._base_model = memoryview(model)
        self._made, self._room = room.of(len(model))
        self._size = 0

    def add(self, piece: messages.PolicyPiece) -> None:
        """Takes in the next piece; only the last one may bring no bytes.

        Raises:
            PolicyError: It is not the next one (`reason` is `pieces`), or cannot be unpacked.
        """
        ends = piece.start + (piece.changes is None) <= piece.end <= len(self._base_model)
        if _name(piece) != self._name or piece.start != self._size or not ends:
            raise errors.PolicyError(f"bytes from {piece.start} of policy {piece.order} do not follow", reason="pieces")
        if piece.start == piece.end:
            return
        cut = slice(piece.start, piece.end)
        policy_patch.apply_to(self._base_model[cut], piece.patch, self._room[cut])
        self._size = piece.end

    def whole(self) -> bytes | None:
        """The policy's bytes, once all are here; the same object each time."""
        return self._made if self._size == len(self._base_model) else None


def _name(piece: messages.PolicyPiece) -> tuple[int, ...]:
    """Returns what all pieces of one attempt at a policy have in common."""
    return piece.epoch, piece.version, piece.base, piece.attempt
