"""Keys on disk: the learner's fleet directory, and the bundle that makes a machine an actor.

FLEET DIRECTORY (learner, 0700)      learner.pem  epoch  mqtt_password  actors/<id>.json  brokers
                                     watch_password  watch_token  release.pub
                                     tls/authority.pem  tls/broker.pem  tls/learner.pem  tls/watch.pem  tls/page.pem
BUNDLE (actor, 0600)                 fleet, id, MAC key, learner's public key, brokers, MQTT password,
                                     the authority's certificate, TLS key and certificate; the release key's
                                     public half, where the fleet has one
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import address, errors, signing, topics
from broker.fleet import client_tls, counters, release_key
from broker.program import storage

if TYPE_CHECKING:
    from broker.fleet import certificates

DEFAULT_FLEET = "default"
LEARNER_USER = "learner"
WATCH_USER = "_watch"
"""Whoever only looks. No actor can have this name."""
DEFAULT_BROKER = "127.0.0.1:1883"


def home() -> Path:
    """Returns where fleets and actors keep what must outlive a process: $ACTORQ_HOME or ~/.actorq."""
    return Path(os.environ.get("ACTORQ_HOME") or Path.home() / ".actorq")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Keys and addresses: all that a machine needs to be one actor of one fleet. Keep it secret.

    `release_key` is the public half, 32 bytes, of what signs releases of the actor's program; empty: it takes none.
    """

    fleet: str
    actor_id: str
    mac_key: bytes
    learner_key: bytes
    brokers: tuple[str, ...]
    password: str
    authority: str
    credential: str
    release_key: bytes = b""

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
                release_key=bytes.fromhex(raw.get("release_key", "")),
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
        if bundle.release_key and len(bundle.release_key) != 32:
            raise errors.IdentityError("the bundle's release key has not 32 bytes", where=str(path), todo="enrol again")
        return bundle

    def write(self, path: Path) -> None:
        """Writes the bundle, readable by its owner alone."""
        raw: dict[str, object] = {
            "fleet": self.fleet,
            "actor_id": self.actor_id,
            "mac_key": self.mac_key.hex(),
            "learner_key": self.learner_key.hex(),
            "brokers": list(self.brokers),
            "password": self.password,
            "authority": self.authority,
            "credential": self.credential,
        }
        if self.release_key:
            raw["release_key"] = self.release_key.hex()
        storage.write_atomic(path, (json.dumps(raw, indent=2) + "\n").encode())

    def tls(self) -> ssl.SSLContext:
        """Returns the TLS settings of this actor: its certificate, and the authority that a broker must have.

        Raises:
            IdentityError: They cannot be used.
        """
        return client_tls.client_context(self.authority.encode(), self.credential.encode())


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
        from broker.fleet import certificates  # here: it takes a megabyte, and an actor makes none

        topics.check_name(name, "fleet")
        directory = directory or home() / "fleets" / name
        key_file, password_file = directory / "learner.pem", directory / "mqtt_password"
        authority_file = directory / "tls" / "authority.pem"
        if not key_file.exists():
            if not create:
                raise errors.IdentityError(
                    f"fleet {name!r} has no keys", where=str(directory), todo="run `actorq-broker init` first"
                )
            with storage.locked(key_file):
                if not key_file.exists():  # made last: where it is, all is
                    storage.write_atomic(password_file, _new_password())
                    storage.write_atomic(authority_file, certificates.Authority.create(name))
                    storage.write_atomic(key_file, _new_key())
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

    @property
    def watch_password(self) -> str:
        """The MQTT password of those who only look; made at first use, as fleets of before have none."""
        return self._secret("watch_password")

    @property
    def watch_token(self) -> str:
        """The word that opens the page of `actorq-learner watch` over a network; made at first use."""
        return self._secret("watch_token")

    def _secret(self, name: str) -> str:
        file = self.directory / name
        if not file.exists():
            with storage.locked(file):
                if not file.exists():
                    storage.write_atomic(file, _new_password())
        return file.read_text()

    @property
    def release_key(self) -> bytes:
        """The public half of the key that signs releases for this fleet's boards; empty where none was made."""
        return release_key.public_half(self.directory)

    def next_epoch(self, above: int = 0) -> int:
        """Returns a number larger than `above` and that of every session before, kept beside the signing key."""
        return counters.next_count(self.directory / "epoch", above + 1)

    def enroll(self, actor_id: str, brokers: Sequence[str] = ()) -> Bundle:
        """Makes (or, for a name that is enrolled already, renews) the secrets of one actor.

        Args:
            actor_id: Its name.
            brokers: Where it finds the fleet, in the order of trying; by default the fleet's list, `spread`.

        Raises:
            ConfigError: The name cannot be part of a topic, or is the learner's own.
        """
        topics.check_name(actor_id, "actor")
        if actor_id == LEARNER_USER:
            raise errors.ConfigError(f"an actor cannot be named {LEARNER_USER!r}", todo="choose another name")
        from broker.fleet import certificates

        bundle = Bundle(
            fleet=self.name,
            actor_id=actor_id,
            mac_key=secrets.token_bytes(32),
            learner_key=self.sealer.public_key,
            brokers=tuple(brokers) or spread(self.brokers, actor_id),
            password=secrets.token_urlsafe(24),
            authority=self.authority.certificate.decode(),
            credential=self.authority.client(self.name, actor_id, certificates.ACTOR_DAYS).decode(),
            release_key=self.release_key,
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
        storage.sync_directory(self.directory / "actors")

    def rotate(self) -> list[Bundle]:
        """Replaces the learner's signing key and every other secret of learner and actors; returns the new bundles.

        Who has the old ones is shut out at once; the fleet's authority and its epoch stay. If it was interrupted, it
        has to be done again.
        """
        brokers = {name: self.bundle(name).brokers for name in self.actors()}  # as they are: some were named
        storage.write_atomic(self.directory / "learner.pem", _new_key())
        for name in ("mqtt_password", "watch_password", "watch_token"):
            storage.write_atomic(self.directory / name, _new_password())
        renewed = Fleet.open(self.name, self.directory, create=False)
        self.sealer = renewed.sealer
        self.learner_credential(renew=True)
        self.watch_credential(renew=True)
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
    def enrolment(self) -> dict[str, tuple[int, int]]:
        """The inode and time of each enrolled actor's file, by its name: they differ once it is enrolled anew.

        The directory's own time would not do: two changes within one tick of the kernel's clock look like one.
        """
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory / "actors") as entries:  # none yet
            for one in entries:
                if one.name.endswith(".json") and not one.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):  # revoked while we look
                        file = one.stat()
                        found[one.name.removesuffix(".json")] = file.st_ino, file.st_mtime_ns
        return found

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
        """Returns MQTT user names and passwords of the whole fleet, those of learner and watchers included."""
        return self.own_users() | {name: self.bundle(name).password for name in self.actors()}

    def own_users(self) -> dict[str, str]:
        """Returns MQTT user names and passwords of those who are no actors."""
        return {LEARNER_USER: self.password, WATCH_USER: self.watch_password}

    # -- TLS ----------------------------------------------------------------------------------------------------------

    @property
    def brokers(self) -> tuple[str, ...]:
        """The addresses of the fleet's brokers for learner and actors, as `init` was told; else one on this machine."""
        file = self.directory / "brokers"
        return tuple(file.read_text().split()) if file.exists() else (DEFAULT_BROKER,)

    def name_brokers(self, addresses: Sequence[address.Address]) -> None:
        """Says where the fleet's brokers are from now on. Bundles made before keep what they say."""
        storage.write_atomic(self.directory / "brokers", "".join(f"{one}\n" for one in addresses).encode())

    def broker_credential(self, hosts: Sequence[str] = (), *, renew: bool = False) -> bytes:
        """Returns key and certificate of the brokers, good for `brokers` and `hosts`; made anew only if need be.

        Args:
            hosts: Further names and addresses.
            renew: Make it anew in any case.
        """
        from broker.fleet import certificates

        known = [address.Address.parse(text).host for text in self.brokers]
        file = self.directory / "tls" / "broker.pem"
        return self._server_credential(file, [*known, *hosts, *certificates.LOCAL_HOSTS], renew=renew)

    def learner_credential(self, *, renew: bool = False) -> bytes:
        """Returns TLS key and certificate of the learner; made anew only if need be."""
        return self._client_credential("learner.pem", LEARNER_USER, renew=renew)

    def watch_credential(self, *, renew: bool = False) -> bytes:
        """Returns TLS key and certificate of those who only look; made anew only if need be."""
        return self._client_credential("watch.pem", WATCH_USER, renew=renew)

    def page_credential(self, hosts: Sequence[str]) -> Path:
        """Returns the file with key and certificate of a page that is served as `hosts`; made anew only if need be."""
        from broker.fleet import certificates

        file = self.directory / "tls" / "page.pem"
        self._server_credential(file, [*hosts, *certificates.LOCAL_HOSTS], renew=False)
        return file

    def tls(self) -> ssl.SSLContext:
        """Returns the TLS settings of the learner: its certificate, and the authority that a broker must have."""
        return client_tls.client_context(self.authority.certificate, self.learner_credential())

    def watch_tls(self) -> ssl.SSLContext:
        """Returns the same for those who only look."""
        return client_tls.client_context(self.authority.certificate, self.watch_credential())

    def _client_credential(self, name: str, user: str, *, renew: bool) -> bytes:
        from broker.fleet import certificates

        file = self.directory / "tls" / name
        with storage.locked(file):
            pem = file.read_bytes() if file.exists() else b""
            if renew or not self._holds(pem):
                pem = self.authority.client(self.name, user, certificates.RENEWED_DAYS)
                storage.write_atomic(file, pem)
            return pem

    def _server_credential(self, file: Path, hosts: Sequence[str], *, renew: bool) -> bytes:
        from broker.fleet import certificates

        wanted = list(dict.fromkeys(hosts))
        with storage.locked(file):
            pem = file.read_bytes() if file.exists() else b""
            if renew or not self._holds(pem) or not certificates.covers(pem, wanted):
                pem = self.authority.broker(self.name, wanted)
                storage.write_atomic(file, pem)
            return pem

    def _holds(self, pem: bytes) -> bool:
        """Returns whether a certificate of this fleet is there and will be good for a while."""
        from broker.fleet import certificates

        return bool(pem) and certificates.signed_by(pem, self.authority.certificate) and not certificates.ends_soon(pem)

    def _actor_file(self, actor_id: str) -> Path:
        return self.directory / "actors" / f"{actor_id}.json"


def spread(brokers: Sequence[str], actor_id: str) -> tuple[str, ...]:
    """Returns brokers in the order in which an actor tries them, so that each has its share of a fleet.

    By rendezvous hashing of the actor's name and the place of each in the list (Thaler and Ravishankar, 1998): the
    second choices of those who share a broker are spread over the others as well, and a broker that is added at the end
    takes its share from all, and moves nobody else.
    """

    def rank(place: int) -> bytes:
        return hashlib.blake2b(f"{actor_id} {place}".encode(), digest_size=8).digest()

    return tuple(brokers[place] for place in sorted(range(len(brokers)), key=rank))


def _new_key() -> bytes:
    """Returns the PEM of a new Ed25519 key."""
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _new_password() -> bytes:
    return secrets.token_urlsafe(24).encode()
