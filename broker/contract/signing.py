"""The signed envelope around every payload: who said it, at which topic, before anything is parsed.

    magic "AQ" | version 1 byte | scheme 1 byte | seal (64 or 32 bytes) | body

Scheme 1 is Ed25519 with the learner's key, scheme 2 HMAC-SHA256 under the key an actor got at enrolment. The seal
covers version, scheme, topic and the body's SHA-256, so that a payload cannot be replayed at another topic. There is no
unsigned scheme. Opening copies nothing: a body is a view of its payload.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import errors

_ED25519 = b"AQ\x02\x01"
_HMAC = b"AQ\x02\x02"
_ED25519_BYTES = 64
_HMAC_BYTES = 32
OVERHEAD_BYTES = len(_ED25519) + _ED25519_BYTES
"""The most that an envelope adds to a body."""
Piece = bytes | memoryview


def _bound(scheme: bytes, topic: str, *body: Piece) -> bytes:
    """Returns what a seal is over; the body as its digest: Ed25519 would run twice over 8 MB, for 20 ms."""
    name, digest = topic.encode(), hashlib.sha256()
    for piece in body:
        digest.update(piece)
    return b"".join((scheme, len(name).to_bytes(2, "little"), name, digest.digest()))


def _open(scheme: bytes, seal_bytes: int, topic: str, payload: bytes) -> tuple[bytes, memoryview]:
    start = len(scheme)
    if payload[:start] != scheme or len(payload) < start + seal_bytes:
        raise errors.SignatureError("the payload is not sealed as it must be at this topic", where=topic)
    return payload[start : start + seal_bytes], memoryview(payload)[start + seal_bytes :]


class LearnerSealer:
    """Signs the messages of the learner."""

    def __init__(self, key: ed25519.Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public_key(self) -> bytes:
        """The public key in 32 bytes, for enrolment bundles."""
        return self._key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)

    def seal(self, topic: str, *body: Piece) -> bytes:
        """The envelope around a body that may come in pieces."""
        return b"".join((_ED25519, self._key.sign(_bound(_ED25519, topic, *body)), *body))


class LearnerVerifier:
    """Opens messages that the learner signed.

    Args:
        public_key: The learner's raw Ed25519 key, 32 bytes.
    """

    def __init__(self, public_key: bytes) -> None:
        self.public_key = public_key
        try:
            self._key = ed25519.Ed25519PublicKey.from_public_bytes(public_key)
        except ValueError as error:
            raise errors.IdentityError("the learner's public key is not 32 bytes of Ed25519") from error

    def open(self, topic: str, payload: bytes) -> memoryview:
        """The body.

        Raises:
            SignatureError: Not signed by this learner for this topic.
        """
        seal, body = _open(_ED25519, _ED25519_BYTES, topic, payload)
        try:
            self._key.verify(seal, _bound(_ED25519, topic, body))
        except InvalidSignature:
            raise errors.SignatureError("the learner's signature does not fit", where=topic) from None
        return body


class ActorMac:
    """Seals the messages of one actor, and opens them at the learner.

    Args:
        key: The secret shared at enrolment, 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise errors.IdentityError("an actor's MAC key must have 32 bytes")
        # Copied for each message: hmac.digest() hashes the key anew, and gives Python's lock away for 100 bytes
        self._keyed = hmac.new(key, digestmod="sha256")

    def seal(self, topic: str, *body: Piece) -> bytes:
        """The envelope around a body that may come in pieces."""
        return b"".join((_HMAC, self._digest(topic, *body), *body))

    def open(self, topic: str, payload: bytes) -> memoryview:
        """The body.

        Raises:
            SignatureError: Not sealed under this key for this topic.
        """
        seal, body = _open(_HMAC, _HMAC_BYTES, topic, payload)
        if not hmac.compare_digest(seal, self._digest(topic, body)):
            raise errors.SignatureError("the actor's MAC does not fit", where=topic)
        return body

    def _digest(self, topic: str, *body: Piece) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(_bound(_HMAC, topic, *body))
        return keyed.digest()
