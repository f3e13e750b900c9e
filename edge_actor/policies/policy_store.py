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

_NEWEST_BYTES = 4096
_LARGEST = (1 << 63) - 1


class PolicyStore:
    """Keeps a whole policy, the patch on it that acted, if one did, and their order.

    Files of their own for whole and patch: a whole policy is large and changes rarely.

    Args:
        directory: Where `keyframe.sealed` (the whole one), `delta.sealed` (the patch) and `newest.json` lie.
        learner_key: The key that policies are signed with. Orders under another key mean nothing.
    """

    def __init__(self, directory: Path, learner_key: bytes) -> None:
        self._policy = directory / "keyframe.sealed"
        self._patch = directory / "delta.sealed"
        self._newest = directory / "newest.json"
        self._learner_key = learner_key.hex()
        self._written: bytes | None = None

    def policy(self) -> bytes | None:
        """Returns the whole policy, sealed; None if there is none.

        Raises:
            OSError: It cannot be read, or is too large for one.
        """
        return _read(self._policy, messages.MAX_PACKET_BYTES)

    def patch(self) -> bytes | None:
        """Returns the patch, sealed; None if there is none. Raises as `policy`."""
        return _read(self._patch, messages.MAX_PACKET_BYTES)

    def newest(self) -> messages.Order:
        """Returns the order of the newest policy that was ever written; (0, 0) if none was, under this key.

        Raises:
            OSError: The file cannot be read.
            ValueError: It does not hold what `write` wrote.
        """
        stored = _read(self._newest, _NEWEST_BYTES)
        if stored is None:
            return messages.Order(0, 0)
        try:
            raw = json.loads(stored)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        key, epoch, version = raw.get("learner_key"), raw.get("epoch"), raw.get("version")
        if not (_is_count(epoch) and _is_count(version)) or raw.get("check") != _check(key, epoch, version):
            raise ValueError("it is damaged")
        return messages.Order(epoch, version) if key == self._learner_key else messages.Order(0, 0)

    def write(self, sources: tuple[bytes, ...], order: messages.Order) -> None:
        """Replaces what is there by a whole policy, or a whole one and a patch.

        A patch that a crash leaves beside another whole policy than its own has no base there, and is passed over. The
        order comes last, so that after a crash it is never newer than the policy.

        Raises:
            OSError: The disk is full, or not there.
        """
        whole, *patches = sources
        if whole is not self._written:
            storage.write_atomic(self._policy, whole)
            self._written = whole
        if patches:
            storage.write_atomic(self._patch, patches[0])
        else:
            self._patch.unlink(missing_ok=True)
        about = {"learner_key": self._learner_key, "epoch": order.epoch, "version": order.version}
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
