"""Keys and counters on disk: the learner's fleet directory, and the bundle that makes a machine an actor.

FLEET DIRECTORY (learner, 0700)      learner.pem  epoch  mqtt_password  actors/<id>.json
BUNDLE (actor, 0600)                 fleet, id, MAC key, learner's public key, brokers, MQTT password
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker import errors, signing, topics

DEFAULT_FLEET = "default"
LEARNER_USER = "learner"
DEFAULT_BROKER = "127.0.0.1:1883"


def home() -> Path:
    """Where fleets and actors keep what must outlive a process: $ACTORQ_HOME or ~/.actorq."""
    return Path(os.environ.get("ACTORQ_HOME") or Path.home() / ".actorq")


def write_atomic(path: Path, data: bytes, mode: int = 0o600, *, sync: bool = True) -> None:
    """Replaces `path` so that a reader finds the old or the new bytes and no others.

    With `sync` a machine that lost power does, too; that costs milliseconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if not sync:
        return
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def next_count(path: Path, first: int = 1) -> int:
    """Adds one to a counter on disk and returns it; two processes never get the same number.

    Args:
        path: The counter's file.
        first: What a counter that does not exist yet begins with.

    Raises:
        IdentityError: The file does not hold a counter.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(path.with_name(f".{path.name}.lock"), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            count = int(path.read_text()) + 1 if path.exists() else first
        except ValueError:
            raise errors.IdentityError(
                "a counter file does not hold a number", where=str(path), todo="write the last number used into it"
            ) from None
        write_atomic(path, f"{count}\n".encode())
        return count


@dataclass(frozen=True, slots=True)
class Bundle:
    """All that a machine needs to be one actor of one fleet. Keep it secret."""

    fleet: str
    actor_id: str
    mac_key: bytes
    learner_key: bytes
    brokers: tuple[str, ...]
    password: str

    @classmethod
    def read(cls, path: Path) -> Bundle:
        """Raises IdentityError when the file is missing or not a bundle."""
        try:
            raw = json.loads(path.read_text())
            bundle = cls(
                fleet=topics.check_name(str(raw["fleet"]), "fleet"),
                actor_id=topics.check_name(str(raw["actor_id"]), "actor"),
                mac_key=bytes.fromhex(raw["mac_key"]),
                learner_key=bytes.fromhex(raw["learner_key"]),
                brokers=tuple(str(b) for b in raw["brokers"]),
                password=str(raw["password"]),
            )
        except FileNotFoundError:
            raise errors.IdentityError(
                "there is no enrolment bundle",
                where=str(path),
                todo="run `actorq-broker enroll NAME` beside the learner and copy its file here (--bundle FILE)",
            ) from None
        except (OSError, ValueError, KeyError, TypeError, errors.ConfigError) as error:
            raise errors.IdentityError(
                f"the enrolment bundle cannot be read: {error}",
                where=str(path),
                todo="enrol again and copy the new file",
            ) from error
        signing.ActorMac(bundle.mac_key)
        signing.LearnerVerifier(bundle.learner_key)
        return bundle

    def write(self, path: Path) -> None:
        """Writes the bundle, readable by its owner alone."""
        raw = {
            "fleet": self.fleet,
            "actor_id": self.actor_id,
            "mac_key": self.mac_key.hex(),
            "learner_key": self.learner_key.hex(),
            "brokers": list(self.brokers),
            "password": self.password,
        }
        write_atomic(path, (json.dumps(raw, indent=2) + "\n").encode())


class Fleet:
    """The learner's side: signing key, epoch, and the secrets of every enrolled actor."""

    def __init__(self, name: str, directory: Path, key: ed25519.Ed25519PrivateKey, password: str) -> None:
        self.name = name
        self.directory = directory
        self.sealer = signing.LearnerSealer(key)
        self.password = password

    @classmethod
    def open(cls, name: str, directory: Path | None = None, *, create: bool = True) -> Fleet:
        """Opens the fleet's directory (default: `home()/fleets/NAME`) and makes its keys at first use.

        Raises:
            IdentityError: It does not exist and `create` is false, or its key cannot be read.
        """
        topics.check_name(name, "fleet")
        directory = directory or home() / "fleets" / name
        key_file, password_file = directory / "learner.pem", directory / "mqtt_password"
        if not key_file.exists():
            if not create:
                raise errors.IdentityError(
                    f"fleet {name!r} has no keys", where=str(directory), todo="run `actorq-broker enroll NAME` first"
                )
            pem = ed25519.Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_atomic(password_file, secrets.token_urlsafe(24).encode())
            write_atomic(key_file, pem)
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            password = password_file.read_text()
        except (OSError, ValueError, TypeError) as error:
            raise errors.IdentityError(
                f"the fleet's key cannot be read: {error}", where=str(directory), todo="restore it from your backup"
            ) from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise errors.IdentityError("the fleet's key is not an Ed25519 key", where=str(key_file))
        return cls(name, directory, key, password)

    def next_epoch(self) -> int:
        """A number larger than that of every session before, kept beside the signing key."""
        return next_count(self.directory / "epoch")

    def enroll(self, actor_id: str, brokers: Sequence[str] = (DEFAULT_BROKER,)) -> Bundle:
        """Makes (or, for a name that is enrolled already, renews) the secrets of one actor.

        Raises:
            ConfigError: The name cannot be part of a topic, or is the learner's own.
        """
        topics.check_name(actor_id, "actor")
        if actor_id == LEARNER_USER:
            raise errors.ConfigError(f"an actor cannot be named {LEARNER_USER!r}", todo="choose another name")
        bundle = Bundle(
            fleet=self.name,
            actor_id=actor_id,
            mac_key=secrets.token_bytes(32),
            learner_key=self.sealer.public_key,
            brokers=tuple(brokers),
            password=secrets.token_urlsafe(24),
        )
        bundle.write(self._actor_file(actor_id))
        return bundle

    def actors(self) -> list[str]:
        """Names of all enrolled actors."""
        return sorted(path.stem for path in (self.directory / "actors").glob("*.json"))

    def bundle(self, actor_id: str) -> Bundle:
        """Raises IdentityError for an actor that is not enrolled."""
        return Bundle.read(self._actor_file(actor_id))

    def users(self) -> dict[str, str]:
        """MQTT user names and passwords of the whole fleet, the learner's included."""
        return {LEARNER_USER: self.password} | {name: self.bundle(name).password for name in self.actors()}

    def _actor_file(self, actor_id: str) -> Path:
        return self.directory / "actors" / f"{actor_id}.json"
