"""A policy on its way out, while it is made: its pieces if it is large, else its digest, and at the end its patch.

All of that is done beside the thread that makes a large policy, whose loops do not hold Python's lock either.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from broker.contract import messages
from broker.contract.policies import policy_patch
from learner.policies import patch_loops

Patch = NDArray[np.uint8]
SendPiece = Callable[[messages.PolicyPiece], bool]
"""Sends a piece at once; false if it could not go out."""


class OutgoingPolicy:
    """Takes in the bytes of a policy as they become known, and prepares how it goes out.

    Args:
        base: The policy that it is a patch on, empty where it can only go out whole.
        first: What its pieces have in common: a piece without bytes.
        is_retained: Whether the base is the retained one, and the patch is to be retained too.
        send_piece: Sends the policy's bytes ahead in pieces; None waits until it is whole.
        word: As in `policy_patch.difference`.
        quick: The same, for pieces.
        beside: A single thread that takes digest or pieces meanwhile. None takes them here.

    Attributes:
        size: Bytes so far.
        is_lost: A piece could not go out. Known when `sha256` was asked for.
        patch_ms: How long taking the difference held up whoever asked for digest and patch.
        pieces_ms: What digest or pieces took, be it beside.
    """

    def __init__(
        self,
        base: bytes,
        first: messages.PolicyPiece,
        *,
        is_retained: bool,
        send_piece: SendPiece | None = None,
        word: int = 1,
        quick: bool = False,
        beside: futures.Executor | None = None,
    ) -> None:
        self.is_retained = is_retained
        self._base, self._first = memoryview(base), first
        self._send_piece, self._word, self._quick = send_piece, word, quick
        self._beside = beside
        self._digest = hashlib.sha256()
        self._under_way: list[futures.Future[None]] = []
        self.size, self.is_lost = 0, False
        self.patch_ms = self.pieces_ms = 0.0

    @property
    def went_ahead(self) -> bool:
        """Returns whether the policy's bytes went ahead in pieces."""
        return self._send_piece is not None

    def add(self, piece: bytes | memoryview) -> None:
        """Takes the policy's next bytes; they must not change before `sha256` or `cancel` was called."""
        start, self.size = self.size, self.size + len(piece)
        if self._beside is None:
            self._note_piece(start, piece)
        else:
            self._under_way.append(self._beside.submit(self._note_piece, start, piece))

    def sha256(self) -> str:
        """Returns the digest of all bytes in hexadecimal; empty if they went ahead (`messages.ManifestChanges`)."""
        began = time.perf_counter()
        while self._under_way:
            self._under_way.pop().result()
        self.patch_ms += (time.perf_counter() - began) * 1e3
        return "" if self.went_ahead else self._digest.hexdigest()

    def cancel(self) -> None:
        """Drops what has not begun, and waits for what has: the policy will not go out."""
        for one in self._under_way:
            one.cancel()
        futures.wait(self._under_way)

    def patch(self, model: bytes) -> Patch | None:
        """Returns the patch once all bytes are there: empty if they went ahead, None if only the whole can go out."""
        if not self._base or len(model) != len(self._base):
            return None
        if self.went_ahead:
            return np.zeros(0, np.uint8)
        began = time.perf_counter()
        patch = difference(self._base, model, self._word)
        self.patch_ms += (time.perf_counter() - began) * 1e3
        return patch

    def last_piece(self, changes: messages.ManifestChanges, patch: Patch) -> messages.PolicyPiece:
        """Returns the piece that makes the policy one, with the `patch` that `patch` gave: of a small policy, all."""
        start = self.size if self.went_ahead else 0
        return replace(self._first, start=start, end=self.size, changes=changes, patch=patch)

    def _note_piece(self, start: int, piece: bytes | memoryview) -> None:
        began, end = time.perf_counter(), start + len(piece)
        if self._send_piece is None:
            self._digest.update(piece)
        elif not self.is_lost and end <= len(self._base):  # else it is of another layout
            patch = difference(self._base[start:end], piece, self._word, quick=self._quick)
            self.is_lost = not self._send_piece(replace(self._first, start=start, end=end, patch=patch))
        self.pieces_ms += (time.perf_counter() - began) * 1e3


def with_digest(manifest: messages.Manifest, model: bytes) -> messages.Manifest:
    """Returns a policy's manifest with its digest, which what went ahead in pieces lacks."""
    return manifest if manifest.sha256 else replace(manifest, sha256=hashlib.sha256(model).hexdigest())


def difference(base: bytes | memoryview, model: bytes | memoryview, word: int, *, quick: bool = False) -> Patch:
    """Returns `policy_patch.difference`, by compiled loops."""
    return policy_patch.difference(base, model, patch_loops.LOOPS, word=word, quick=quick)
