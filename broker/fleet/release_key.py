"""The key that signs releases of the actor's program: its secret half is a person's, its public half the fleet's."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import errors
from broker.program import storage

_FILE = "release.pub"
_FILE_BYTES = 1000


def make(directory: Path, secret: Path, *, replace: bool = False) -> None:
    """Makes a key for the fleet of this directory.

    Args:
        directory: Of the fleet: the public half goes there, and into each bundle that is made from then on.
        secret: Where the other half goes, readable by its owner alone.
        replace: Whether the fleet may have one already.

    Raises:
        IdentityError: The fleet has one, or the file exists.
    """
    if not replace and public_half(directory):
        raise errors.IdentityError(
            "the fleet has a release key, and its boards take nothing that another one signs",
            where=str(directory / _FILE),
            todo="sign with that one; --force replaces it, and then each board has to be enrolled anew",
        )
    if secret.exists():
        raise errors.IdentityError("the file exists", where=str(secret), todo="name another with -o")
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    storage.write_atomic(secret, pem)  # first: a fleet must not name a key that nobody holds
    storage.write_atomic(directory / _FILE, f"{half(key).hex()}\n".encode())


def public_half(directory: Path) -> bytes:
    """Returns the fleet's, 32 bytes; empty where there is none.

    Raises:
        IdentityError: It cannot be read.
    """
    file = directory / _FILE
    try:
        found = bytes.fromhex(storage.read_regular(file, _FILE_BYTES).decode())
        ed25519.Ed25519PublicKey.from_public_bytes(found)
    except FileNotFoundError:
        return b""
    except (OSError, ValueError) as error:
        raise errors.IdentityError(
            f"the fleet's release key cannot be read: {error}", where=str(file), todo="restore it from your backup"
        ) from error
    return found


def half(key: ed25519.Ed25519PrivateKey) -> bytes:
    """Returns the public half of a key, 32 bytes."""
    return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def read(secret: Path) -> ed25519.Ed25519PrivateKey:
    """Reads the secret half.

    Raises:
        IdentityError: It is missing or no such key, or others may read it.
    """
    try:
        if secret.stat().st_mode & 0o077:
            raise errors.IdentityError("others may read the release key", where=str(secret), todo=f"chmod 600 {secret}")
        key = serialization.load_pem_private_key(secret.read_bytes(), None)
    except FileNotFoundError:
        raise errors.IdentityError(
            "the release key is not there", where=str(secret), todo="name its file: --key FILE"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise errors.IdentityError(f"the release key cannot be read: {error}", where=str(secret)) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise errors.IdentityError("the release key is not an Ed25519 key", where=str(secret))
    return key
