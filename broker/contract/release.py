"""A release of the actor's program, as it goes to boards: a signed list of what it consists of, and pieces of bytes.

    magic "AQR1" | Ed25519 signature by the release key, 64 bytes | list, JSON

Whoever holds the release key decides what boards run. It is not the learner's key, and a machine that trains need not
have it. The bytes of a release are its wheels one behind the other; the list has the SHA-256 of each piece of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import errors

_MAGIC = b"AQR1"
_SIGNATURE_BYTES = 64
_DOMAIN = b"actorq release\n"
"""Signed in front of the list, so that no signature of this key over anything else passes for one."""
PIECE_BYTES = 1 << 20
"""Each has a topic: of 128 MB so few that no broker of ours takes their reader for one that floods it (watch.py)."""
MAX_LIST_BYTES = 1 << 16
MAX_BYTES = 128 << 20
"""Size of all wheels together; brokers hold them in memory while a release goes out."""
MAX_UNPACKED_BYTES = 512 << 20
MAX_PIECES = MAX_BYTES // PIECE_BYTES
MAX_FILES = 20_000
MAX_WHEELS = 64
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!]{0,39}")
_WHEEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,200}\.whl")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file of a release."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class Release:
    """What a release consists of.

    `serial` is the Unix time of the signature in milliseconds: boards take no release that was signed before the one
    they last found good. `downgrade` lets them take a lower version. `pieces` has the SHA-256 of each PIECE_BYTES of
    the wheels, in hexadecimal; `files` and `unpacked_bytes` are the most that they unpack to.
    """

    version: str
    serial: int
    downgrade: bool
    wheels: tuple[Wheel, ...]
    pieces: tuple[str, ...]
    files: int
    unpacked_bytes: int

    def __post_init__(self) -> None:
        length = self.length
        if not _VERSION.fullmatch(self.version) or self.serial <= 0:
            raise _bad("its version or serial is none")
        if not 1 <= len(self.wheels) <= MAX_WHEELS or len({one.name for one in self.wheels}) != len(self.wheels):
            raise _bad(f"it has {len(self.wheels)} wheels, where 1 to {MAX_WHEELS} of different names are meant")
        if not all(_WHEEL.fullmatch(one.name) and one.length > 0 for one in self.wheels):
            raise _bad("a file of it is no wheel")
        if length > MAX_BYTES or self.unpacked_bytes > MAX_UNPACKED_BYTES or self.files > MAX_FILES:
            raise _bad(
                f"it has {length / 1e6:.0f} MB, and {self.files} files of {self.unpacked_bytes / 1e6:.0f} MB unpacked; "
                f"at most {MAX_BYTES / 1e6:.0f} MB, {MAX_FILES} files and {MAX_UNPACKED_BYTES / 1e6:.0f} MB are taken"
            )
        if self.files <= 0 or self.unpacked_bytes <= 0:
            raise _bad("it has no files")
        if len(self.pieces) != -(-length // PIECE_BYTES) or not all(map(_SHA256.fullmatch, self.pieces)):
            raise _bad("its pieces are not those of its wheels")

    @property
    def length(self) -> int:
        """The bytes of all wheels."""
        return sum(one.length for one in self.wheels)

    @property
    def name(self) -> str:
        """Its name, for people and for its directory on boards: the same for the same wheels, whenever signed."""
        content = "\n".join((*(f"{one.name} {one.length}" for one in self.wheels), *self.pieces))
        return f"{self.version}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def piece_length(self, index: int) -> int:
        """Returns the bytes of a piece; the last one is shorter."""
        return min(PIECE_BYTES, self.length - index * PIECE_BYTES)

    def is_piece(self, index: int, data: bytes) -> bool:
        """Returns whether these bytes are that piece."""
        return len(data) == self.piece_length(index) and hashlib.sha256(data).hexdigest() == self.pieces[index]


def sign(release: Release, key: ed25519.Ed25519PrivateKey) -> bytes:
    """Returns the signed list.

    Raises:
        ReleaseError: It is too long.
    """
    body = json.dumps(asdict(release), sort_keys=True).encode()
    if len(body) > MAX_LIST_BYTES:
        raise _bad(f"its list has {len(body)} bytes, at most {MAX_LIST_BYTES} are taken")
    return b"".join((_MAGIC, key.sign(_DOMAIN + body), body))


def open_list(signed: bytes, public_key: bytes) -> Release:
    """Returns what a signed list says; the signature is checked before anything is parsed.

    Args:
        signed: As `sign` returns it.
        public_key: The release key's public half, 32 bytes.

    Raises:
        ReleaseError: It is not signed by that key (`release_signature`), or is none (`release`).
    """
    start = len(_MAGIC) + _SIGNATURE_BYTES
    if len(signed) > start + MAX_LIST_BYTES or len(signed) < start or signed[: len(_MAGIC)] != _MAGIC:
        raise _bad("it is no signed list")
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(public_key)
        key.verify(signed[len(_MAGIC) : start], _DOMAIN + signed[start:])
    except (InvalidSignature, ValueError):
        raise errors.ReleaseError(
            "the release is not signed by this fleet's release key",
            reason="release_signature",
            todo="sign it with the key whose public half the board's bundle has (actorq-broker release-key)",
        ) from None
    try:
        return _read(json.loads(signed[start:]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _bad(f"its list cannot be read: {error}") from None


def digest(signed: bytes) -> str:
    """Returns what orders name a signed list by, and so all that it lists: its SHA-256, in hexadecimal."""
    return hashlib.sha256(signed).hexdigest()


def numbers(version: str) -> tuple[int, ...]:
    """Returns what versions are compared by: their numbers before any letter, without zeros at the end."""
    found = [int(one) for one in (re.match(r"[0-9]+(\.[0-9]+)*", version) or [""])[0].split(".") if one]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def _read(raw: Any) -> Release:
    if not isinstance(raw, dict) or raw.keys() != {one.name for one in fields(Release)}:
        raise ValueError("its fields are others")
    kinds = {"version": str, "serial": int, "downgrade": bool, "files": int, "unpacked_bytes": int}
    if any(type(raw[field]) is not kind for field, kind in kinds.items()):
        raise ValueError("its fields are of other types")
    wheels = tuple(Wheel(one["name"], one["length"]) for one in raw["wheels"])
    if not all(type(one.name) is str and type(one.length) is int for one in wheels):
        raise ValueError("its wheels are not described")
    if not all(type(one) is str for one in raw["pieces"]):
        raise ValueError("its pieces are not described")
    return Release(**raw | {"wheels": wheels, "pieces": tuple(raw["pieces"])})


def _bad(what: str) -> errors.ReleaseError:
    return errors.ReleaseError(f"this release cannot be taken: {what}", reason="release")
