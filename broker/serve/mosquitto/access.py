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

_ACTOR_WRITES = ("state", "experience", "report")
_ACTOR_READS = ("assignment", "receipt", "command")


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


def render_passwords(users: Mapping[str, str]) -> str:
    """Returns lines `user:$7$iterations$salt$hash`, PBKDF2 with SHA-512 as `mosquitto_passwd` writes them."""
    return "".join(f"{user}:{_hash(password)}\n" for user, password in sorted(users.items()))


def render_acl(fleet: str, users: Mapping[str, str]) -> str:
    """Returns what each user may read and write; all that is not named is refused.

    Mosquitto answers a refused publish with PUBACK as if it had been accepted (MQTT 3.1.1 has no other answer).
    """
    names = topics.Topics(fleet)
    lines: list[str] = []
    for user in sorted(users):
        lines.append(f"\nuser {user}")
        if user == identity.LEARNER_USER:
            lines.append(f"topic readwrite {topics.ROOT}/{fleet}/#")
            continue
        lines.append(f"topic read {names.learner_state}")
        lines.append(f"topic read {topics.ROOT}/{fleet}/policy/#")
        lines.extend(f"topic write {names.actor(user, leaf)}" for leaf in _ACTOR_WRITES)
        lines.extend(f"topic read {names.actor(user, leaf)}" for leaf in _ACTOR_READS)
    return "\n".join(lines) + "\n"


def _hash(password: str) -> str:
    salt = os.urandom(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ITERATIONS)
    return f"$7${_ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"
