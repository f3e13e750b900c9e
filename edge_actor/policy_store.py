"""The last good policy on disk, and how new it was.

Policies are kept as they came, sealed, so that they are verified again when read. Their order is kept beside them: a
broker that sends old policies must not succeed because the stored one was damaged, has expired, or is for another
environment.
"""

from __future__ import annotations

import json
from pathlib import Path

from broker import identity

Order = tuple[int, int]
"""Epoch and version."""


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

    def read(self) -> tuple[bytes, bytes]:
        """Keyframe and delta; empty where there is none.

        Raises:
            OSError: A file cannot be read.
        """
        return _read(self._keyframe), _read(self._delta)

    def newest(self) -> Order:
        """Order of the newest policy that was ever written; (0, 0) if none was, under this key.

        Raises:
            OSError: The file cannot be read.
            ValueError: It does not hold what `write` wrote.
        """
        raw = json.loads(_read(self._newest) or b"{}")
        if not isinstance(raw, dict) or raw.get("learner_key", self._learner_key) != self._learner_key:
            return 0, 0
        return int(raw.get("epoch", 0)), int(raw.get("version", 0))

    def write(self, sources: tuple[bytes, ...], order: Order) -> None:
        """Replaces what is there by a keyframe, or a keyframe and a delta.

        A delta that a crash leaves beside another keyframe than its own has no base there, and is passed over. The
        order comes last, so that after a crash it is never newer than the policy.

        Raises:
            OSError: The disk is full, or not there.
        """
        keyframe, *deltas = sources
        if keyframe is not self._written:
            identity.write_atomic(self._keyframe, keyframe)
            self._written = keyframe
        if deltas:
            identity.write_atomic(self._delta, deltas[0])
        else:
            self._delta.unlink(missing_ok=True)
        about = {"learner_key": self._learner_key, "epoch": order[0], "version": order[1]}
        identity.write_atomic(self._newest, json.dumps(about).encode())


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""
