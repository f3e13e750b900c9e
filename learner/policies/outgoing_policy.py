"""A policy on its way out: difference from one that actors have, in parts if it is large, else with its digest.

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

from broker.contract import messages, policy_patch
from learner.quantize import kernels

Patch = NDArray[np.uint8]
SendPart = Callable[[int, int, Patch], bool]
"""Takes bytes from `start` to `end`, as a patch; false if they could not go out."""


class Draft:
    """What a channel prepares while a policy is being made.

    Args:
        base: The policy that it is a difference from, empty where it can only go out whole.
        version: Of that.
        retained: Whether the base is the keyframe, and the difference is to be retained.
        number: Of its parts; 0 if it does not go in any.
        send_part: Takes each piece's difference at once; None waits until the policy is whole.
        quick: As of `delta.difference`, for parts.
        beside: A single thread that takes digest or parts meanwhile. None takes them here.

    Attributes:
        size: Bytes so far.
        lost: A part could not go out. Known when `sha256` was asked for.
        delta_ms: By how long taking the difference held up whoever asked for digest and patch.
        parts_ms: What digest or parts took, be it beside.
    """

    def __init__(
        self,
        base: bytes,
        version: int,
        *,
        retained: bool,
        number: int = 0,
        send_part: SendPart | None = None,
        quick: bool = False,
        beside: futures.Executor | None = None,
    ) -> None:
        self.version, self.retained, self.number = version, retained, number
        self._base = memoryview(base)
        self._send_part, self._quick = send_part, quick
        self._beside = beside
        self._digest = hashlib.sha256()
        self._under_way: list[futures.Future[None]] = []
        self.size, self.lost = 0, False
        self.delta_ms = self.parts_ms = 0.0

    def add(self, piece: bytes | memoryview) -> None:
        """The policy's next bytes; they must not change before `sha256` was asked for, or this draft closed."""
        start, self.size = self.size, self.size + len(piece)
        if self._beside is None:
            self._take(start, piece)
        else:
            self._under_way.append(self._beside.submit(self._take, start, piece))

    def sha256(self) -> str:
        """Of all bytes so far, in hexadecimal; empty if they go in parts (`messages.PolicyDelta`)."""
        began = time.perf_counter()
        while self._under_way:
            self._under_way.pop().result()
        self.delta_ms += (time.perf_counter() - began) * 1e3
        return "" if self._send_part else self._digest.hexdigest()

    def close(self) -> None:
        """Drops what has not begun, and waits for what has: the policy will not go out."""
        for one in self._under_way:
            one.cancel()
        futures.wait(self._under_way)

    def patch(self, model: bytes) -> Patch | None:
        """The difference, once all is there: empty if it went ahead in parts; None if the policy can only go whole."""
        if not self._base or len(model) != len(self._base):
            return None
        if self._send_part is not None:
            return np.zeros(0, np.uint8)
        began = time.perf_counter()
        patch = _difference(self._base, model)
        self.delta_ms += (time.perf_counter() - began) * 1e3
        return patch

    def _take(self, start: int, piece: bytes | memoryview) -> None:
        began, end = time.perf_counter(), start + len(piece)
        if self._send_part is None:
            self._digest.update(piece)
        elif not self.lost and end <= len(self._base):  # else it is of another layout
            self.lost = not self._send_part(start, end, _difference(self._base[start:end], piece, quick=self._quick))
        self.parts_ms += (time.perf_counter() - began) * 1e3


def digested(manifest: messages.Manifest, model: bytes) -> messages.Manifest:
    """A policy's manifest with its digest, which what goes in parts has not."""
    return manifest if manifest.sha256 else replace(manifest, sha256=hashlib.sha256(model).hexdigest())


def _difference(base: memoryview, model: bytes | memoryview, *, quick: bool = False) -> Patch:
    return policy_patch.difference(base, model, kernels.pack, quick=quick)
