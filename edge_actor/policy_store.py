"""The last good policy on disk: its sealed messages as they came, so that they are verified again when read."""

from __future__ import annotations

from pathlib import Path

from broker import identity


class PolicyStore:
    """A keyframe, and the delta from it that acted, if one did. Two files: a keyframe is large and changes rarely.

    Args:
        directory: Where `keyframe.sealed` and `delta.sealed` lie.
    """

    def __init__(self, directory: Path) -> None:
        self._keyframe = directory / "keyframe.sealed"
        self._delta = directory / "delta.sealed"
        self._written: bytes | None = None

    def read(self) -> tuple[bytes, bytes]:
        """Keyframe and delta; empty where there is none.

        Raises:
            OSError: A file cannot be read.
        """
        return _read(self._keyframe), _read(self._delta)

    def write(self, sources: tuple[bytes, ...]) -> None:
        """Replaces what is there by a keyframe, or a keyframe and a delta.

        A delta that a crash leaves beside another keyframe than its own has no base there, and is passed over.

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


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""
