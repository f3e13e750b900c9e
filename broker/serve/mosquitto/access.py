"""Rules who may connect and who may say what: Mosquitto's password file and ACL, rendered from the enrolled actors.

A client needs both a certificate of the fleet's authority and the password of the name it gives. The password is what
makes `revoke` work at once: on a reload Mosquitto disconnects whoever's password is no longer in the file. Where the
certificate alone says who someone is (`use_identity_as_username`), it skips that check: a revoked client then stays
connected, and comes back (measured with 2.0.11; docs/security.md has the table).
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from broker.contract import topics
from broker.fleet import identity

_ITERATIONS = 101
"""Rounds of hashing, as many as Mosquitto takes. It hashes on its only thread at every connect, and our passwords are
random, 192 bits."""

_ACTOR_WRITES = ("state", "experience", "report", "answer")
_ACTOR_READS = ("assignment", "receipt", "command", "orders")
_WATCHER_READS = ("state", "assignment")


@dataclass(frozen=True, slots=True)
class Admission:
    """The users that are let in, and what the broker proves its own name with.

    Attributes:
        users: Name and password of everyone.
        authority: PEM of the certificate that clients' certificates are checked against.
        credential: PEM of the broker's own key and certificate.
    """

    users: Mapping[str, str]
    authority: bytes
    credential: bytes


class Passwords:
    """Renders Mosquitto's password file, and hashes each password once: ten thousand take most of a second."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], str] = {}

    def render(self, users: Mapping[str, str]) -> str:
        """Returns lines `user:$7$iterations$salt$hash`, PBKDF2 with SHA-512 as `mosquitto_passwd` writes them."""
        known = self._lines
        self._lines = {user: known.get(user) or f"{user[0]}:{_hash(user[1])}\n" for user in sorted(users.items())}
        return "".join(self._lines.values())


def render_acl(fleet: str) -> str:
    """Returns what learner, watchers and actors may read and write; all that is not named is refused.

    Mosquitto answers a refused publish with PUBACK as if it had been accepted (MQTT 3.1.1 has no other answer).
    Patterns stand for every user: with lines of their own, ten thousand actors made Mosquitto stand still for ten
    seconds at each reload.
    """
    names = topics.Topics(fleet)
    lines = [f"user {identity.LEARNER_USER}", f"topic readwrite {topics.ROOT}/{fleet}/#", ""]
    # Patterns stand for watchers too, and would let them write below the name that they have
    lines += [f"user {identity.WATCH_USER}", f"topic deny {names.actor(identity.WATCH_USER, '#')}"]
    lines.append(f"topic deny {names.ingest('+', identity.WATCH_USER)}")
    lines += [f"topic read {names.every_actor(leaf)}" for leaf in _WATCHER_READS] + [""]
    everybody_reads = (names.learner_state, f"{topics.ROOT}/{fleet}/policy/#", names.every_release)
    lines += [f"pattern read {topic}" for topic in everybody_reads]
    for right, leaves in (("write", _ACTOR_WRITES), ("read", _ACTOR_READS)):
        lines += [f"pattern {right} {topics.ROOT}/{fleet}/actor/%u/{leaf}" for leaf in leaves]
    lines.append(f"pattern write {names.ingest('+', '%u')}")  # whatever its shard: a worker takes in its own alone
    return "\n".join(lines) + "\n"


def _hash(password: str) -> str:
    salt = os.urandom(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ITERATIONS)
    return f"$7${_ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"
