"""The last good policy on disk, and how new it was.

Policies are kept as they came, sealed, so that they are verified again when read. Their order is kept beside them: a
broker that sends old policies must not succeed because the stored one was damaged, has expired, or is for another
environment. That file has a checksum: an order that a flipped bit made larger would refuse every policy to come.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, TypeGuard

from broker.contract import messages
from broker.program import storage

Order = tuple[int, int]
"""Epoch and version."""
_NEWEST_BYTES = 4096
_LARGEST = (1 << 63) - 1


class PolicyStore:
    """A keyframe, the delta from it that acted, if one did, and their order.

    Files of their own for keyframe and delta: a keyframe is large and changes rarely.

    Args:
        directory: Where `keyframe.sealed`, `delta.sealed` and `newest.json` lie.
        learner_key: By whom policies are signed. Orders under another key mean nothing.
    """

    def __init__(self, directory: Path, learner_key: bytes) -> None:
        self._keyframe = directory / "keyframe.sealed"
        self._delta = directory / "delta.sealed"
        self._newest = directory / "newest.json"
        self._learner_key = learner_key.hex()
        self._written: bytes | None = None

    def keyframe(self) -> bytes | None:
        """The keyframe; None if there is none.

        Raises:
            OSError: It cannot be read, or is too large for one.
        """
        return _read(self._keyframe, messages.MAX_PACKET_BYTES)

    def delta(self) -> bytes | None:
        """The delta; as `keyframe`."""
        return _read(self._delta, messages.MAX_PACKET_BYTES)

    def newest(self) -> Order:
        """Order of the newest policy that was ever written; (0, 0) if none was, under this key.

        Raises:
            OSError: The file cannot be read.
            ValueError: It does not hold what `write` wrote.
        """
        stored = _read(self._newest, _NEWEST_BYTES)
        if stored is None:
            return 0, 0
        try:
            raw = json.loads(stored)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        key, epoch, version = raw.get("learner_key"), raw.get("epoch"), raw.get("version")
        if not (_is_count(epoch) and _is_count(version)) or raw.get("check") != _check(key, epoch, version):
            raise ValueError("it is damaged")
        return (epoch, version) if key == self._learner_key else (0, 0)

    def write(self, sources: tuple[bytes, ...], order: Order) -> None:
        """Replaces what is there by a keyframe, or a keyframe and a delta.

        A delta that a crash leaves beside another keyframe than its own has no base there, and is passed over. The
        order comes last, so that after a crash it is never newer than the policy.

        Raises:
            OSError: The disk is full, or not there.
        """
        keyframe, *deltas = sources
        if keyframe is not self._written:
            storage.write_atomic(self._keyframe, keyframe)
            self._written = keyframe
        if deltas:
            storage.write_atomic(self._delta, deltas[0])
        else:
            self._delta.unlink(missing_ok=True)
        about = {"learner_key": self._learner_key, "epoch": order[0], "version": order[1]}
        storage.write_atomic(self._newest, json.dumps(about | {"check": _check(*about.values())}).encode())


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _LARGEST


def _check(*fields: object) -> int:
    return zlib.crc32(repr(fields).encode())


def _read(file: Path, limit_bytes: int) -> bytes | None:
    try:
        return storage.read_regular(file, limit_bytes)
    except FileNotFoundError:
        return None
