"""The envelope: every byte is covered, and so are the topic, the key and the scheme."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import strategies as st

from broker.contract import errors, signing
from tests.broker.contract.payloads import examples

TOPIC = "actorq/lab/actor/pi/receipt"
BODY = b"the body of a message"
Seal = Callable[..., bytes]
Open = Callable[[str, bytes], memoryview]
VERIFIER = signing.LearnerVerifier(examples.LEARNER.public_key)
SCHEMES = {
    "learner": (examples.LEARNER.seal, VERIFIER.open),
    "actor": (examples.ACTOR.seal, examples.ACTOR.open),
}


@pytest.fixture(params=sorted(SCHEMES))
def scheme(request: pytest.FixtureRequest) -> tuple[Seal, Open]:
    name: str = request.param
    return SCHEMES[name]


def test_a_body_in_pieces_is_sealed_as_a_whole(scheme: tuple[Seal, Open]) -> None:
    seal, _ = scheme
    assert seal(TOPIC, BODY[:5], memoryview(BODY)[5:9], b"", BODY[9:]) == seal(TOPIC, BODY)


@pytest.mark.parametrize("body", [b"", b"x", BODY, bytes(100_000)])
def test_what_is_sealed_opens(scheme: tuple[Seal, Open], body: bytes) -> None:
    seal, opened = scheme
    sealed = seal(TOPIC, body)
    assert opened(TOPIC, sealed) == body
    assert len(sealed) <= len(body) + signing.OVERHEAD_BYTES


def test_every_bit_is_covered(scheme: tuple[Seal, Open]) -> None:
    seal, opened = scheme
    sealed = seal(TOPIC, BODY)
    for position in range(len(sealed)):
        for bit in range(8):
            forged = bytearray(sealed)
            forged[position] ^= 1 << bit
            with pytest.raises(errors.SignatureError):
                opened(TOPIC, bytes(forged))


def test_every_truncation_is_refused(scheme: tuple[Seal, Open]) -> None:
    seal, opened = scheme
    sealed = seal(TOPIC, BODY)
    for length in range(len(sealed)):
        with pytest.raises(errors.SignatureError):
            opened(TOPIC, sealed[:length])
    with pytest.raises(errors.SignatureError):
        opened(TOPIC, sealed + b"\0")


@pytest.mark.parametrize("topic", ["", TOPIC + "s", TOPIC[:-1], TOPIC.replace("pi", "p1"), "actorq/lab/learner/state"])
def test_a_message_belongs_to_its_topic(scheme: tuple[Seal, Open], topic: str) -> None:
    seal, opened = scheme
    with pytest.raises(errors.SignatureError) as caught:
        opened(topic, seal(TOPIC, BODY))
    assert caught.value.where == topic and caught.value.reason == "signature"


def test_the_border_between_topic_and_body_is_covered(scheme: tuple[Seal, Open]) -> None:
    seal, opened = scheme
    sealed = seal(TOPIC + "x", BODY)
    start = len(sealed) - len(BODY)
    with pytest.raises(errors.SignatureError):
        opened(TOPIC, sealed[:start] + b"x" + sealed[start:])


def test_keys_do_not_open_each_other() -> None:
    stranger = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(errors.SignatureError, match="signature does not fit"):
        VERIFIER.open(TOPIC, stranger.seal(TOPIC, BODY))
    with pytest.raises(errors.SignatureError, match="MAC does not fit"):
        examples.ACTOR.open(TOPIC, signing.ActorMac(bytes(32)).seal(TOPIC, BODY))


def test_a_mac_never_stands_for_a_signature_or_the_reverse() -> None:
    with pytest.raises(errors.SignatureError, match="not sealed as it must be"):
        VERIFIER.open(TOPIC, examples.ACTOR.seal(TOPIC, BODY))
    with pytest.raises(errors.SignatureError, match="not sealed as it must be"):
        examples.ACTOR.open(TOPIC, examples.LEARNER.seal(TOPIC, BODY))
    # A MAC made with the learner's *public* key, which every actor has, must not pass for the learner's word.
    forged = signing.ActorMac(examples.LEARNER.public_key).seal(TOPIC, BODY)
    with pytest.raises(errors.SignatureError):
        VERIFIER.open(TOPIC, b"AQ\x02\x01" + forged[4:])


@pytest.mark.parametrize(
    "prefix", [b"AQ\x00\x01", b"AQ\x01\x01", b"AQ\x01\x02", b"AQ\x02\x00", b"AQ\x02\x03", b"QA\x02\x01", b"\0\0\0\0"]
)
def test_other_versions_and_schemes_are_refused(prefix: bytes, scheme: tuple[Seal, Open]) -> None:
    seal, opened = scheme
    with pytest.raises(errors.SignatureError, match="not sealed as it must be"):
        opened(TOPIC, prefix + seal(TOPIC, BODY)[4:])


@hypothesis.given(payload=st.binary(max_size=300))
@hypothesis.settings(max_examples=300, deadline=None)
def test_random_payloads_are_refused(payload: bytes) -> None:
    for _, opened in SCHEMES.values():
        for prefix in (b"", b"AQ\x02\x01", b"AQ\x02\x02"):
            with pytest.raises(errors.SignatureError):
                opened(TOPIC, prefix + payload)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_keys_of_a_wrong_length(length: int) -> None:
    with pytest.raises(errors.IdentityError):
        signing.LearnerVerifier(bytes(length))
    with pytest.raises(errors.IdentityError):
        signing.ActorMac(bytes(length))
