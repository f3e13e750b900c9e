"""A policy on its way out: digest, and difference from one that actors have, in parts if it is large.

Parts are made on the thread that makes the policy: beside one that quantizes, in small steps, a second thread waits for
Python's lock three times as long as it works, and holds the first one up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent import futures

import numpy as np
from numpy.typing import NDArray

from broker import delta

Patch = NDArray[np.uint8]
SendPart = Callable[[int, int, Patch], bool]
"""Takes bytes from `start` to `end`, as a patch; false if they could not go out."""


class Draft:
    """What a channel prepares while a policy is being made.

    Args:
        base: The policy that it is a difference from, empty where it can only go out whole.
        version: Of that.
        retained: Whether the base is the keyframe, and the difference is to be retained.
        send_part: Takes each piece's difference at once; None waits until the policy is whole.
        beside: Takes the digest meanwhile; it needs Python's lock for nothing but to begin. None takes it here.

    Attributes:
        size: Bytes so far.
        lost: A part could not go out.
        delta_ms, send_ms: What the difference took so far, and parts of it to go out.
    """

    def __init__(
        self,
        base: bytes,
        version: int,
        *,
        retained: bool,
        send_part: SendPart | None = None,
        beside: futures.Executor | None = None,
    ) -> None:
        self.version, self.retained = version, retained
        self._base = memoryview(base)
        self._send_part = send_part
        self._beside = beside
        self._digest = hashlib.sha256()
        self._digesting: list[futures.Future[None]] = []
        self.size, self.lost = 0, False
        self.delta_ms = self.send_ms = 0.0

    def add(self, piece: bytes | memoryview) -> None:
        """The policy's next bytes; they must not change before `sha256` was asked for."""
        start, self.size = self.size, self.size + len(piece)
        if self._beside is None:
            self._digest.update(piece)
        else:
            self._digesting.append(self._beside.submit(self._digest.update, piece))
        if self._send_part is None or self.lost or self.size > len(self._base):  # of another layout
            return
        patch = self._difference(self._base[start : self.size], piece)
        began = time.perf_counter()
        self.lost = not self._send_part(start, self.size, patch)
        self.send_ms += (time.perf_counter() - began) * 1e3

    def sha256(self) -> str:
        """Of all bytes so far, in hexadecimal."""
        futures.wait(self._digesting)
        return self._digest.hexdigest()

    def patch(self, model: bytes) -> Patch | None:
        """The difference, once all is there: empty if it went ahead in parts; None if the policy can only go whole."""
        if not self._base or len(model) != len(self._base):
            return None
        return np.zeros(0, np.uint8) if self._send_part else self._difference(self._base, model)

    def _difference(self, base: memoryview, model: bytes | memoryview) -> Patch:
        began = time.perf_counter()
        patch = np.frombuffer(delta.difference(base, model), np.uint8)
        self.delta_ms += (time.perf_counter() - began) * 1e3
        return patch
