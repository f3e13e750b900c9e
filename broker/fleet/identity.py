"""Keys and counters on disk: the learner's fleet directory, and the bundle that makes a machine an actor.

FLEET DIRECTORY (learner, 0700)      learner.pem  epoch  mqtt_password  actors/<id>.json  brokers
                                     tls/authority.pem  tls/broker.pem  tls/learner.pem
BUNDLE (actor, 0600)                 fleet, id, MAC key, learner's public key, brokers, MQTT password,
                                     the authority's certificate, TLS key and certificate
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import ssl
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import address, errors, signing, topics
from broker.fleet import certificates
from broker.program import storage

DEFAULT_FLEET = "default"
LEARNER_USER = "learner"
DEFAULT_BROKER = "127.0.0.1:1883"
_COUNTER_BYTES = 64
_COUNTER_LIMIT = (1 << 63) - 1
"""One more than the largest number that ledger and spool can hold."""
_RANDOM_BITS = 28
"""The random bits of a boot's number: so many that it has 18 digits until 2088, which are decoded fastest (codec)."""

_log = logging.getLogger(__name__)


def home() -> Path:
    """Returns where fleets and actors keep what must outlive a process: $ACTORQ_HOME or ~/.actorq."""
    return Path(os.environ.get("ACTORQ_HOME") or Path.home() / ".actorq")


def make_directory(path: Path) -> None:
    """Makes a directory, and what is missing above it, for its owner alone: pathlib gives the mode to the last only."""
    for missing in reversed([one for one in (path, *path.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def write_atomic(path: Path, data: bytes, mode: int = 0o600, *, sync: bool = True) -> None:
    """Replaces `path` so that a reader finds the old or the new bytes and no others.

    With `sync` a machine that lost power does, too; that costs milliseconds.
    """
    make_directory(path.parent)
    # Never a file that is there: in a directory of someone else it may be a link to one of ours.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with storage.naming(path), os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Reads a small file of ours. Whatever else a crash left in its place neither blocks nor leads elsewhere.

    Raises:
        FileNotFoundError: There is none.
        OSError: It is larger, cannot be read, or is no file: a pipe, a directory, a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        if found.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, where at most {limit_bytes} are meant", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes)
    finally:
        os.close(descriptor)


def next_count(path: Path, first: int = 1, *, may_be_lost: bool = False, limit: int = _COUNTER_LIMIT) -> int:
    """Adds one to a counter on disk and returns it; two processes never get the same number.

    Args:
        path: The counter's file.
        first: The least that it returns: a counter that does not exist yet begins with it.
        may_be_lost: A counter that cannot be used is logged, and begins with `first` as well; otherwise it is an error.
        limit: A larger number is no counter.

    Raises:
        IdentityError: The file does not hold a counter.
    """
    count = first
    try:
        with _locked(path):
            try:
                count = max(_counted(path, limit) + 1, first)
            except FileNotFoundError:
                pass
            except errors.IdentityError as error:
                if not may_be_lost:
                    raise
                _log.warning("%s (%s); it begins anew, with %d", error.what, path, first)
            write_atomic(path, f"{count}\n".encode())
    except OSError as error:
        if not may_be_lost:
            raise
        _log.warning("a counter cannot be kept: %s", error)
    return count


def _counted(path: Path, limit: int) -> int:
    """Reads a counter file; raises FileNotFoundError if there is none, IdentityError if it holds no number."""
    try:
        text = read_regular(path, _COUNTER_BYTES).strip()
        if not text.isdigit() or int(text) >= limit:
            raise ValueError(repr(text))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise errors.IdentityError(
            f"a counter file does not hold a number: {error}",
            where=str(path),
            todo="write the last number used into it",
        ) from error
    return int(text)


def next_boot(path: Path) -> int:
    """Returns a number for a process: higher than those of all before it on this machine, and no other machine's.

    The upper bits count up; they begin with, and never fall behind, the time of day in seconds, so that a counter that
    was lost, emptied by a power cut or put back makes a lower number only where the clock is wrong as well. The lower
    bits are random: two cards of one image, or one card copied, do not number their messages alike.

    Args:
        path: The counter's file. That it cannot be used is logged, and no error.
    """
    count = next_count(path, int(time.time()), may_be_lost=True, limit=_COUNTER_LIMIT >> _RANDOM_BITS)
    return count << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process in at a time; makes the directory."""
    make_directory(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in its place must not block
    with open(os.open(path.with_name(f".{path.name}.lock"), flags, 0o600), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True)
class Bundle:
    """Keys and addresses: all that a machine needs to be one actor of one fleet. Keep it secret."""

    fleet: str
    actor_id: str
    mac_key: bytes
    learner_key: bytes
    brokers: tuple[str, ...]
    password: str
    authority: str
    credential: str

    @classmethod
    def read(cls, path: Path) -> Bundle:
        """Reads a bundle.

        Raises:
            IdentityError: The file is missing, or is no bundle.
        """
        try:
            raw = json.loads(path.read_text())
            bundle = cls(
                fleet=topics.check_name(str(raw["fleet"]), "fleet"),
                actor_id=topics.check_name(str(raw["actor_id"]), "actor"),
                mac_key=bytes.fromhex(raw["mac_key"]),
                learner_key=bytes.fromhex(raw["learner_key"]),
                brokers=tuple(str(b) for b in raw["brokers"]),
                password=str(raw["password"]),
                authority=str(raw["authority"]),
                credential=str(raw["credential"]),
            )
        except FileNotFoundError:
            raise errors.IdentityError(
                "there is no enrolment bundle",
                where=str(path),
                todo="run `actorq-broker enroll NAME` beside the learner and copy its file here (--bundle FILE)",
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, errors.ConfigError) as error:
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
            "authority": self.authority,
            "credential": self.credential,
        }
        write_atomic(path, (json.dumps(raw, indent=2) + "\n").encode())

    def tls(self) -> ssl.SSLContext:
        """Returns the TLS settings of this actor: its certificate, and the authority that a broker must have.

        Raises:
            IdentityError: They cannot be used.
        """
        return certificates.client_context(self.authority.encode(), self.credential.encode())


class Fleet:
    """The learner's side: signing key, epoch, TLS authority, and the secrets of every enrolled actor."""

    def __init__(
        self,
        name: str,
        directory: Path,
        key: ed25519.Ed25519PrivateKey,
        authority: certificates.Authority,
    ) -> None:
        self.name = name
        self.directory = directory
        self.authority = authority
        self.sealer = signing.LearnerSealer(key)

    @classmethod
    def open(cls, name: str, directory: Path | None = None, *, create: bool = True) -> Fleet:
        """Opens the fleet's directory (default: `home()/fleets/NAME`) and makes its keys at first use.

        Raises:
            IdentityError: It does not exist and `create` is false, or its key cannot be read.
        """
        topics.check_name(name, "fleet")
        directory = directory or home() / "fleets" / name
        key_file, password_file = directory / "learner.pem", directory / "mqtt_password"
        authority_file = directory / "tls" / "authority.pem"
        if not key_file.exists():
            if not create:
                raise errors.IdentityError(
                    f"fleet {name!r} has no keys", where=str(directory), todo="run `actorq-broker init` first"
                )
            with _locked(key_file):
                if not key_file.exists():  # made last: where it is, all is
                    write_atomic(password_file, _new_password())
                    write_atomic(authority_file, certificates.Authority.create(name))
                    write_atomic(key_file, _new_key())
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            password_file.read_text()
            authority = certificates.Authority(authority_file.read_bytes())
        except (OSError, ValueError, TypeError, errors.IdentityError) as error:
            raise errors.IdentityError(
                f"the fleet's key cannot be read: {error}", where=str(directory), todo="restore it from your backup"
            ) from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise errors.IdentityError("the fleet's key is not an Ed25519 key", where=str(key_file))
        return cls(name, directory, key, authority)

    @property
    def password(self) -> str:
        """The learner's MQTT password, as it is now."""
        return (self.directory / "mqtt_password").read_text()

    def next_epoch(self, above: int = 0) -> int:
        """Returns a number larger than `above` and that of every session before, kept beside the signing key."""
        return next_count(self.directory / "epoch", above + 1)

    def enroll(self, actor_id: str, brokers: Sequence[str] = ()) -> Bundle:
        """Makes (or, for a name that is enrolled already, renews) the secrets of one actor.

        Args:
            actor_id: Its name.
            brokers: Where it finds the fleet; the fleet's own list by default.

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
            brokers=tuple(brokers or self.brokers),
            password=secrets.token_urlsafe(24),
            authority=self.authority.certificate.decode(),
            credential=self.authority.client(self.name, actor_id, certificates.ACTOR_DAYS).decode(),
        )
        bundle.write(self._actor_file(actor_id))
        return bundle

    def revoke(self, actor_id: str) -> None:
        """Forgets an actor's secrets. Brokers and learners that watch `enrolment` drop it at once.

        Raises:
            IdentityError: It is not enrolled.
        """
        try:
            self._actor_file(actor_id).unlink()
        except FileNotFoundError:
            raise errors.IdentityError(
                f"actor {actor_id!r} is not enrolled",
                where=str(self.directory),
                todo=f"enrolled are: {', '.join(self.actors()) or 'none'}",
            ) from None
        _sync_directory(self.directory / "actors")

    def rotate(self) -> list[Bundle]:
        """Replaces the learner's signing key and every other secret of learner and actors; returns the new bundles.

        Who has the old ones is shut out at once; the fleet's authority and its epoch stay. If it was interrupted, it
        has to be done again.
        """
        brokers = {name: self.bundle(name).brokers for name in self.actors()}
        write_atomic(self.directory / "learner.pem", _new_key())
        write_atomic(self.directory / "mqtt_password", _new_password())
        renewed = Fleet.open(self.name, self.directory, create=False)
        self.sealer = renewed.sealer
        self.learner_credential(renew=True)
        self.broker_credential(renew=True)
        return [self.enroll(name, where) for name, where in brokers.items()]

    def check_key(self) -> None:
        """Compares the signing key with the one on disk.

        Raises:
            IdentityError: It is not the fleet's any longer.
        """
        if Fleet.open(self.name, self.directory, create=False).sealer.public_key != self.sealer.public_key:
            raise errors.IdentityError(
                "the fleet's keys were rotated, and this learner has the old ones",
                where=str(self.directory),
                todo="start it again, with --resume RUN",
            )

    @property
    def enrolment(self) -> frozenset[tuple[str, int, int]]:
        """A fingerprint that differs whenever an actor was enrolled or revoked: its file's name, inode and time.

        The directory's own time would not do: two changes within one tick of the kernel's clock look like one.
        """
        try:
            with os.scandir(self.directory / "actors") as entries:
                files = [(one.name, one.inode(), one.stat()) for one in entries if one.name.endswith(".json")]
        except FileNotFoundError:  # none yet; or one went while we looked, and the next look will tell
            return frozenset()
        return frozenset((name, inode, stat.st_mtime_ns) for name, inode, stat in files if name[0] != ".")

    @property
    def enrolled_ns(self) -> int:
        """The time when an actor was last enrolled or revoked: one look, where `enrolment` takes one for each actor.

        By the kernel's clock, so whoever sees another number must look at `enrolment` until a tick has passed.
        """
        try:
            return (self.directory / "actors").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def actors(self) -> list[str]:
        """Returns the names of all enrolled actors."""
        return sorted(path.stem for path in (self.directory / "actors").glob("*.json"))

    def bundle(self, actor_id: str) -> Bundle:
        """Returns the bundle of an actor.

        Raises:
            IdentityError: It is not enrolled.
        """
        return Bundle.read(self._actor_file(actor_id))

    def users(self) -> dict[str, str]:
        """Returns MQTT user names and passwords of the whole fleet, the learner's included."""
        return {LEARNER_USER: self.password} | {name: self.bundle(name).password for name in self.actors()}

    # -- TLS ----------------------------------------------------------------------------------------------------------

    @property
    def brokers(self) -> tuple[str, ...]:
        """The addresses of the fleet's brokers for learner and actors, as `init` was told; else one on this machine."""
        file = self.directory / "brokers"
        return tuple(file.read_text().split()) if file.exists() else (DEFAULT_BROKER,)

    def name_brokers(self, addresses: Sequence[address.Address]) -> None:
        """Says where the fleet's brokers are from now on. Bundles made before keep what they say."""
        write_atomic(self.directory / "brokers", "".join(f"{one}\n" for one in addresses).encode())

    def broker_credential(self, hosts: Sequence[str] = (), *, renew: bool = False) -> bytes:
        """Returns key and certificate of the brokers, good for `brokers` and `hosts`; made anew only if need be.

        Args:
            hosts: Further names and addresses.
            renew: Make it anew in any case.
        """
        file = self.directory / "tls" / "broker.pem"
        known = [address.Address.parse(text).host for text in self.brokers]
        wanted = list(dict.fromkeys([*known, *hosts, *certificates.LOCAL_HOSTS]))
        with _locked(file):
            pem = file.read_bytes() if file.exists() else b""
            if renew or not self._holds(pem) or not certificates.covers(pem, wanted):
                pem = self.authority.broker(self.name, wanted)
                write_atomic(file, pem)
            return pem

    def learner_credential(self, *, renew: bool = False) -> bytes:
        """Returns TLS key and certificate of the learner; made anew only if need be."""
        file = self.directory / "tls" / "learner.pem"
        with _locked(file):
            pem = file.read_bytes() if file.exists() else b""
            if renew or not self._holds(pem):
                pem = self.authority.client(self.name, LEARNER_USER, certificates.RENEWED_DAYS)
                write_atomic(file, pem)
            return pem

    def tls(self) -> ssl.SSLContext:
        """Returns the TLS settings of the learner: its certificate, and the authority that a broker must have."""
        return certificates.client_context(self.authority.certificate, self.learner_credential())

    def _holds(self, pem: bytes) -> bool:
        """Returns whether a certificate of this fleet is there and will be good for a while."""
        return bool(pem) and certificates.signed_by(pem, self.authority.certificate) and not certificates.ends_soon(pem)

    def _actor_file(self, actor_id: str) -> Path:
        return self.directory / "actors" / f"{actor_id}.json"


def _new_key() -> bytes:
    """Returns the PEM of a new Ed25519 key."""
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _new_password() -> bytes:
    return secrets.token_urlsafe(24).encode()
