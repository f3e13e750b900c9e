"""The pieces of one release on this board's disk, each checked when it comes and when a download goes on."""

from __future__ import annotations

import os
from pathlib import Path

from broker.contract import release
from broker.program import storage

_FILE = "stream"


class Download:
    """A release that is being taken.

    Args:
        directory: Of its own.
        listed: What it consists of.

    Attributes:
        missing: Pieces that are not here yet, in order.
    """

    def __init__(self, directory: Path, listed: release.Release) -> None:
        self._directory = directory
        self._listed = listed
        self.missing = list(range(len(listed.pieces)))

    @classmethod
    def open(cls, directory: Path, listed: release.Release) -> Download:
        """Goes on with what is there.

        Raises:
            OSError: It cannot be written there.
        """
        made = cls(directory, listed)
        storage.make_directory(directory)
        if made.path.is_symlink() or not made.path.is_file():
            made.path.unlink(missing_ok=True)
            made.path.touch(0o600)
        with made.path.open("rb") as file:
            made.missing = [index for index in made.missing if not made._is_intact(file.fileno(), index)]
        return made

    @property
    def path(self) -> Path:
        """The file with all pieces, one behind the other."""
        return self._directory / _FILE

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the pieces that are here."""
        return self._listed.length - sum(map(self._listed.piece_length, self.missing))

    def add(self, index: int, data: bytes) -> bool:
        """Takes a piece in; returns false if it is none that is missing, or not the one that is listed.

        Raises:
            OSError: It cannot be written.
        """
        if index not in self.missing or not self._listed.is_piece(index, data):
            return False
        with storage.naming(self.path), self.path.open("r+b") as file:
            file.seek(index * release.PIECE_BYTES)
            file.write(data)
        self.missing.remove(index)
        return True

    def _is_intact(self, descriptor: int, index: int) -> bool:
        length = self._listed.piece_length(index)
        return self._listed.is_piece(index, os.pread(descriptor, length, index * release.PIECE_BYTES))
