"""The schema before ours: its golden bytes are read, and written where it can say what ours does; none older is."""

from __future__ import annotations

import dataclasses

import pytest

from broker.contract import codec, errors, messages, previous, topics
from tests.broker.contract.payloads import examples, strategies

KINDS = sorted(messages.KINDS)


def golden(kind: str) -> bytes:
    return examples.golden(kind, examples.PREVIOUS)


def test_the_schema_before_is_one_less_and_its_bytes_were_moved_along() -> None:
    """Fails where SCHEMA_VERSION alone is changed, or only its own golden bytes were written anew."""
    assert previous.VERSION == messages.SCHEMA_VERSION - 1
    names = {file.name for file in examples.GOLDEN.iterdir()}
    assert {file.name for file in examples.PREVIOUS.iterdir()} >= {f"{kind}.hex" for kind in KINDS}
    assert names == {f"{name}.hex" for name in examples.rendered()}
    for kind in KINDS:
        assert int(codec.metadata(golden(kind))["schema"]) == previous.VERSION, "see examples.py: move them along"
        assert int(codec.metadata(examples.golden(kind))["schema"]) == messages.SCHEMA_VERSION


@pytest.mark.parametrize("kind", KINDS)
def test_its_bytes_are_read(kind: str) -> None:
    decoded, expected = codec.decode(messages.KINDS[kind], golden(kind)), examples.EXAMPLES[kind]
    if isinstance(decoded, messages.ActorState):
        assert decoded.schema == previous.VERSION
        decoded = dataclasses.replace(decoded, schema=messages.SCHEMA_VERSION)
    strategies.assert_same(decoded, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_its_bytes_are_written(kind: str) -> None:
    """Byte for byte as the release before wrote them, so that its actors read them, which are as strict."""
    assert codec.encode(examples.EXAMPLES[kind], previous.VERSION) == golden(kind)


def test_a_seal_of_the_schema_before_is_ours() -> None:
    sealed = examples.LEARNER.seal(examples.TOPIC, codec.encode(examples.EXAMPLES["receipt"], previous.VERSION))
    assert sealed == examples.golden("sealed_by_learner", examples.PREVIOUS)


def test_an_assignment_to_a_shard_is_said_in_our_schema_unless_it_is_fitted() -> None:
    sharded = dataclasses.replace(examples.EXAMPLES["assignment"], shard=3)  # type: ignore[arg-type]
    assert isinstance(sharded, messages.Assignment)
    payload = codec.encode(sharded, previous.VERSION)
    assert payload == codec.encode(sharded) and codec.decode(messages.Assignment, payload).shard == 3
    assert previous.fitted(sharded, messages.SCHEMA_VERSION) is sharded
    assert codec.encode(previous.fitted(sharded, previous.VERSION), previous.VERSION) == golden("assignment")


def test_what_the_schema_before_did_not_have_is_refused_in_it() -> None:
    text = codec.encode(examples.EXAMPLES["assignment"])
    forged = text.replace(f'"schema":"{messages.SCHEMA_VERSION}"'.encode(), f'"schema":"{previous.VERSION}"'.encode())
    with pytest.raises(errors.DecodeError) as caught:
        codec.decode(messages.Assignment, forged)
    assert caught.value.reason == "field"


@pytest.mark.parametrize("schema", [previous.VERSION - 1, messages.SCHEMA_VERSION + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_older_and_newer_ones_are_refused_with_what_to_do(kind: str, schema: int) -> None:
    payload = examples.golden(kind)
    payload = payload.replace(f'"schema":"{messages.SCHEMA_VERSION}"'.encode(), f'"schema":"{schema:02}"'.encode())
    with pytest.raises(errors.DecodeError) as caught:
        codec.decode(messages.KINDS[kind], payload)
    assert caught.value.reason == "schema" and str(schema) in caught.value.what
    assert "update the learner first" in caught.value.todo


@pytest.mark.parametrize("version", ["previous", "ours", "next"])
def test_a_spool_sends_what_another_release_wrote_in_the_schema_that_it_has(version: str) -> None:
    """After an update, and after one that was undone: bytes apart from `oldest` stay, as the ledger compares them."""
    body = golden("experience") if version == "previous" else examples.golden("experience")
    if version == "next":
        body = body.replace(f'"schema":"{messages.SCHEMA_VERSION}"'.encode(), b'"schema":"99"')
    changed = codec.with_oldest(body, 9)
    before, after = codec.metadata(body), codec.metadata(changed)
    assert after.pop("oldest") == "9" and before.pop("oldest") == "8" and after == before
    if version == "next":
        return
    decoded = codec.decode(messages.Experience, changed)
    expected = dataclasses.replace(examples.EXAMPLES["experience"], oldest=9)  # type: ignore[arg-type]
    strategies.assert_same(decoded, expected)
    assert isinstance(expected, messages.Experience)
    schema = previous.VERSION if version == "previous" else messages.SCHEMA_VERSION
    assert changed == codec.encode(expected, schema), "as if it had been written so"


@pytest.mark.parametrize("payload", [b"", b"\0" * 8, b"\2\0\0\0\0\0\0\0[]", examples.golden("receipt")])
def test_what_is_no_experience_is_not_renumbered(payload: bytes) -> None:
    with pytest.raises(errors.DecodeError):
        codec.with_oldest(payload, 1)


def test_experience_of_an_actor_without_shards_is_listened_for() -> None:
    assert previous.experience(topics.Topics("lab"), "pi") == ("actorq/lab/actor/pi/experience",)
