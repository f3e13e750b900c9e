"""A release of the actor's program, made of wheels and signed; in a file, where the key is on another machine.

magic "AQRF" | length of the signed list, 4 bytes, little endian | signed list | wheels, one behind the other
"""

from __future__ import annotations

import hashlib
import re
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import errors, release, topics
from broker.program import storage

_MAGIC = b"AQRF"
_HEAD_BYTES = len(_MAGIC) + 4
SUFFIX = ".release"
_OWN = re.compile(r"actorq_fleet-([^-]+)-.*\.whl")


@dataclass(frozen=True, slots=True)
class SignedRelease:
    """What goes out: the signed list, and the bytes that it lists."""

    listed: release.Release
    signed: bytes
    content: bytes

    @property
    def digest(self) -> str:
        """What orders name it by."""
        return release.digest(self.signed)

    @property
    def name(self) -> str:
        """What people and boards name it by."""
        return self.listed.name

    def write(self, path: Path) -> None:
        """Writes it into a file, for `read`."""
        head = _MAGIC + len(self.signed).to_bytes(4, "little")
        storage.write_atomic(path, b"".join((head, self.signed, self.content)))

    def retained(self, names: topics.Topics) -> list[tuple[str, bytes]]:
        """Returns it as it is left at brokers: pieces, and nothing where a longer one had more; then the list."""
        size = release.PIECE_BYTES
        pieces = [self.content[index * size : (index + 1) * size] for index in range(release.MAX_PIECES)]
        return [
            *((names.release_piece(index), piece) for index, piece in enumerate(pieces)),
            (names.release_list, self.signed),
        ]


def read(path: Path, public_key: bytes) -> SignedRelease:
    """Reads a file that `write` wrote.

    Args:
        path: The file.
        public_key: The public half of the key that must have signed it.

    Raises:
        ReleaseError: It is none, is not signed by that key, or its wheels are not those that were signed.
    """
    try:
        data = storage.read_regular(path, _HEAD_BYTES + 2 * release.MAX_LIST_BYTES + release.MAX_BYTES)
    except OSError as error:
        raise errors.ReleaseError(f"the release cannot be read: {error}", where=str(path)) from error
    end = _HEAD_BYTES + int.from_bytes(data[len(_MAGIC) : _HEAD_BYTES], "little")
    if data[: len(_MAGIC)] != _MAGIC:
        raise errors.ReleaseError("this file is no release", where=str(path), todo="make one: actorq-broker release")
    signed, content, size = data[_HEAD_BYTES:end], data[end:], release.PIECE_BYTES
    listed = release.open_list(signed, public_key)
    if len(content) != listed.length or not all(
        listed.is_piece(index, content[index * size : (index + 1) * size]) for index in range(len(listed.pieces))
    ):
        raise errors.ReleaseError("its wheels are not those that were signed", where=str(path), todo="make it anew")
    return SignedRelease(listed, signed, content)


def make(wheels: Sequence[Path], key: ed25519.Ed25519PrivateKey, *, downgrade: bool) -> SignedRelease:
    """Reads wheels and signs them, now.

    Args:
        wheels: That of actorq-fleet, and those of packages that its boards lack or have older.
        key: The release key.
        downgrade: Whether boards may take it where they run a higher version.

    Raises:
        ConfigError: There is not one wheel of actorq-fleet among them.
        ReleaseError: A wheel cannot be read, or they are too large.
    """
    own = [found[1] for one in wheels if (found := _OWN.fullmatch(one.name))]
    if len(own) != 1:
        raise errors.ConfigError(
            f"a release has one wheel of actorq-fleet, not {len(own)}",
            where=" ".join(map(str, wheels)),
            todo="`pip wheel --no-deps .` in a checkout makes actorq_fleet-VERSION-py3-none-any.whl",
        )
    content, listed, files, unpacked_bytes = bytearray(), [], 0, 0
    for one in wheels:
        try:
            with zipfile.ZipFile(one) as wheel:
                members = [member for member in wheel.infolist() if not member.is_dir()]
            data = one.read_bytes()
        except (OSError, zipfile.BadZipFile) as error:
            raise errors.ReleaseError(
                f"the wheel cannot be read: {error}", where=str(one), todo="name the file of a wheel"
            ) from error
        files += len(members)
        unpacked_bytes += sum(member.file_size for member in members)
        listed.append(release.Wheel(one.name, len(data)))
        content += data
    pieces = [
        hashlib.sha256(content[start : start + release.PIECE_BYTES]).hexdigest()
        for start in range(0, len(content), release.PIECE_BYTES)
    ]
    made = release.Release(
        own[0], int(time.time() * 1000), downgrade, tuple(listed), tuple(pieces), files, unpacked_bytes
    )
    return SignedRelease(made, release.sign(made, key), bytes(content))
