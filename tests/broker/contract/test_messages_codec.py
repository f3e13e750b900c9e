"""Messages to bytes and back: round trips, golden bytes, the library as oracle, and everything that is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import strategies as st

from broker.contract import codec, errors, messages
from tests.broker.contract.payloads import examples, strategies

KINDS = sorted(messages.KINDS)
Header = dict[str, Any]


def repacked(
    payload: bytes, change: Callable[[Header], None], body: bytes | None = None, *, as_we_write: bool = False
) -> bytes:
    """`payload` with its header changed in place, and other data if given."""
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":") if as_we_write else None).encode()
    return len(text).to_bytes(8, "little") + text + (payload[8 + length :] if body is None else body)


def drop(header: Header, name: str, table: str = "") -> None:
    del (header[table] if table else header)[name]


def refused(kind: str, payload: bytes, reason: str) -> None:
    with pytest.raises(errors.DecodeError) as caught:
        codec.decode(messages.KINDS[kind], payload)
    assert caught.value.reason == reason, caught.value


# -- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_every_message_survives_the_round_trip(kind: str, data: st.DataObject) -> None:
    message = data.draw(strategies.message(messages.KINDS[kind]))
    payload = codec.encode(message)
    strategies.assert_same(message, codec.decode(messages.KINDS[kind], payload))
    assert codec.encode(message) == payload


@pytest.mark.parametrize("name", [*KINDS, "sealed_by_learner", "sealed_by_actor"])
def test_bytes_on_the_wire_are_those_committed(name: str) -> None:
    assert examples.rendered()[name] == examples.golden(name)


@pytest.mark.parametrize("kind", KINDS)
def test_committed_bytes_decode(kind: str) -> None:
    strategies.assert_same(examples.EXAMPLES[kind], codec.decode(messages.KINDS[kind], examples.golden(kind)))


def test_every_kind_has_an_example() -> None:
    assert set(examples.EXAMPLES) == set(messages.KINDS)
    assert all(type(message) is messages.KINDS[kind] for kind, message in examples.EXAMPLES.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_reads_what_we_write(kind: str, tmp_path: Path) -> None:
    message = examples.EXAMPLES[kind]
    payload = codec.encode(message)
    arrays = safetensors.numpy.load(payload)
    assert set(arrays) == set(messages.ARRAYS.get(type(message), {}))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, getattr(message, name))
    file = tmp_path / "message.safetensors"
    file.write_bytes(payload)
    with safetensors.safe_open(file, "numpy") as opened:
        assert opened.metadata()["message"] == kind


@pytest.mark.parametrize("kind", KINDS)
def test_we_read_what_the_library_writes(kind: str) -> None:
    message = examples.EXAMPLES[kind]
    payload = codec.encode(message)
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    arrays = {name: getattr(message, name) for name in messages.ARRAYS.get(type(message), {})}
    written = safetensors.numpy.save(arrays, metadata=header["__metadata__"])
    strategies.assert_same(message, codec.decode(messages.KINDS[kind], written))


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_may_come_last_and_hold_what_ends_it(kind: str) -> None:
    def move(header: Header) -> None:
        header["__metadata__"] = header.pop("__metadata__")

    payload = examples.golden(kind)
    expected = codec.decode(messages.KINDS[kind], payload)
    strategies.assert_same(codec.decode(messages.KINDS[kind], repacked(payload, move)), expected)
    refused(kind, repacked(payload, lambda header: header["__metadata__"].update(more='"}},')), "field")


def test_arrays_of_experience_are_aligned_views_of_the_payload() -> None:
    sealed = examples.ACTOR.seal(examples.TOPIC, codec.encode(examples.EXAMPLES["experience"]))
    decoded = codec.decode(messages.Experience, examples.ACTOR.open(examples.TOPIC, sealed))
    for name in messages.ARRAYS[messages.Experience]:
        array = getattr(decoded, name)
        assert not array.flags.writeable, f"{name} is a copy"
        assert array.flags.aligned, name


def test_the_largest_policy_passes() -> None:
    model = np.zeros(messages.MAX_POLICY_BYTES, np.uint8)
    payload = codec.encode(messages.Policy(examples.MANIFEST, model))
    assert codec.decode(messages.Policy, payload).model.size == messages.MAX_POLICY_BYTES


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schema", ["0", "1", "", "one", None])
def test_unknown_schema_version(kind: str, schema: str | None) -> None:
    def change(header: Header) -> None:
        del header["__metadata__"]["schema"]
        if schema is not None:
            header["__metadata__"]["schema"] = schema

    refused(kind, repacked(examples.golden(kind), change), "schema")


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_of_message(kind: str) -> None:
    other = KINDS[KINDS.index(kind) - 1]
    refused(kind, examples.golden(other), "kind")
    refused(kind, repacked(examples.golden(kind), lambda h: h["__metadata__"].update(message="pickle")), "kind")


@pytest.mark.parametrize("kind", KINDS)
def test_missing_and_extra_fields(kind: str) -> None:
    payload = examples.golden(kind)
    arrays = messages.ARRAYS.get(messages.KINDS[kind], {})
    scalars = [f.name for f in dataclasses.fields(messages.KINDS[kind]) if f.name not in arrays]
    for name in set(scalars) - {"schema"}:
        refused(kind, repacked(payload, functools.partial(drop, name=name, table="__metadata__")), "field")
    refused(kind, repacked(payload, lambda h: h["__metadata__"].update(extra="1")), "field")
    extra = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    refused(kind, repacked(payload, lambda h: h.update(extra=extra)), "array")
    for name in arrays:
        refused(kind, repacked(payload, functools.partial(drop, name=name)), "array")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("epoch", "1.0"),
        ("epoch", "true"),
        ("epoch", '"1"'),
        ("epoch", "null"),
        ("epoch", "NaN"),
        ("epoch", "-Infinity"),
        ("epoch", "9223372036854775808"),
        ("epoch", "1" * 5000),
        ("epoch", ""),
        ("epoch", "1 2"),
        ("epoch", "[" * 5000),
        ("epsilon_end", "NaN"),
        ("epsilon_end", "Infinity"),
        ("epsilon_end", "1e999"),
        ("epsilon_end", "1" * 400),
        ("epsilon_end", "false"),
        ("channel", "1"),
        ("channel", "null"),
        ("channel", '"\\ud800"'),
        ("channel", '["main"]'),
    ],
)
def test_fields_of_a_wrong_type(field: str, text: str) -> None:
    payload = repacked(examples.golden("assignment"), lambda h: h["__metadata__"].update({field: text}))
    refused("assignment", payload, "field")


@pytest.mark.parametrize("number", [0, -5, 10**18 - 1, 10**18, 2**63 - 1])
def test_numbers_of_any_length(number: int) -> None:
    message = dataclasses.replace(codec.decode(messages.Experience, examples.golden("experience")), step=number)
    assert codec.decode(messages.Experience, codec.encode(message)).step == number


@pytest.mark.parametrize("text", ["1.0", "true", '"1"', "9223372036854775808", "", "1 2", "-", "\u0663", "1,"])
def test_wrong_numbers_in_a_header_that_is_otherwise_as_we_write_it(text: str) -> None:
    golden = examples.golden("experience")
    assert repacked(golden, lambda h: None, as_we_write=True).strip()[8:200] == golden.strip()[8:200]
    changed = repacked(golden, lambda h: h["__metadata__"].update(epoch=text), as_we_write=True)
    refused("experience", changed, "field")


@pytest.mark.parametrize(
    "change",
    [
        lambda birth: birth.pop("board"),
        lambda birth: birth.update(extra=1),
        lambda birth: birth.update(spec=None),
        lambda birth: birth["spec"]["action"].update(n=1),
        lambda birth: birth["spec"]["action"].update(kind="both"),
        lambda birth: birth["spec"]["observation"].update(shape=[]),
        lambda birth: birth["spec"]["observation"].update(shape=[1 << 40]),
        lambda birth: birth["spec"]["observation"].update(dtype="float64"),
    ],
)
def test_birth_certificates_of_impossible_environments(change: Callable[[Header], None]) -> None:
    def repack(header: Header) -> None:
        birth = json.loads(header["__metadata__"]["birth"])
        change(birth)
        header["__metadata__"]["birth"] = json.dumps(birth)

    refused("actor_state", repacked(examples.golden("actor_state"), repack), "field")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward", {"dtype": "F64"}),
        ("reward", {"dtype": "I32"}),
        ("reward", {"dtype": None}),
        ("reward", {"dtype": ["F32"]}),
        ("reward", {"shape": [4]}),
        ("reward", {"shape": [3, 1]}),
        ("reward", {"shape": [-3]}),
        ("reward", {"shape": [3.0]}),
        ("reward", {"shape": [True, True, True]}),
        ("reward", {"shape": 3}),
        ("reward", {"shape": None}),
        ("reward", {"data_offsets": [0, 12]}),
        ("reward", {"data_offsets": [32, 45]}),
        ("reward", {"data_offsets": [44, 32]}),
        ("reward", {"data_offsets": [32]}),
        ("reward", {"data_offsets": [32, 44.0]}),
        ("reward", {"extra": 1}),
        ("log_prob", {"shape": [1 << 62]}),
        ("log_prob", {"shape": [0, 1 << 62]}),
        ("action", {"dtype": "U8"}),
        ("observation", {"shape": [5, 4, 1, 1, 1, 1]}),
        ("observation", {"shape": [0, 1 << 62], "data_offsets": [68, 68]}),
    ],
)
def test_arrays_that_are_not_what_they_must_be(name: str, entry: Header) -> None:
    payload = examples.golden("experience")
    refused("experience", repacked(payload, lambda h: h[name].update(entry)), "array")


def test_overlapping_and_swapped_arrays() -> None:
    payload = examples.golden("experience")

    def overlap(header: Header) -> None:
        header["env_index"]["data_offsets"] = header["length"]["data_offsets"]

    def swap(header: Header) -> None:
        header["env_index"]["data_offsets"], header["length"]["data_offsets"] = (
            header["length"]["data_offsets"],
            header["env_index"]["data_offsets"],
        )

    refused("experience", repacked(payload, overlap), "array")
    refused("experience", repacked(payload, swap), "array")


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_anywhere(kind: str) -> None:
    payload = examples.golden(kind)
    for length in range(len(payload)):
        with pytest.raises(errors.DecodeError):
            codec.decode(messages.KINDS[kind], payload[:length])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_behind_the_end(kind: str) -> None:
    refused(kind, examples.golden(kind) + b"\0", "array")


@pytest.mark.parametrize("length", [codec.MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_oversized_header(length: int) -> None:
    refused("receipt", length.to_bytes(8, "little") + b" " * (codec.MAX_HEADER_BYTES + 100), "size")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "header"),
        (b"{", "header"),
        (b"[]", "header"),
        (b"null", "header"),
        (b"\xff\xfe\x00", "header"),
        (b"[" * 30_000, "header"),
        (b'{"a":' * 9_000, "header"),
        (b"{}", "header"),
        (b'{"__metadata__":[]}', "header"),
        (b'{"__metadata__":{"schema":1}}', "header"),
        (b'{"__metadata__":{}}', "schema"),
    ],
)
def test_headers_that_are_none(text: bytes, reason: str) -> None:
    refused("receipt", len(text).to_bytes(8, "little") + text, reason)


@pytest.mark.fault(14)
@pytest.mark.parametrize(
    "changes",
    [
        {"stages": {"hacking": [1, 0.5]}},
        {"stages": {"send": [1]}},
        {"stages": {"send": [1, 0.5, 2]}},
        {"stages": {"send": [1.5, 0.5]}},
        {"stages": {"send": [-1, 0.5]}},
        {"stages": {"send": [1, -0.5]}},
        {"stages": {"send": [1, 1e300]}},
        {"stages": {"send": [1e300, 1]}},
        {"stages": {"send": "1, 0.5"}},
        {"stages": [["send", [1, 0.5]]]},
        {"cpu_s": -1.0},
        {"cpu_s": 1e300},
        {"cpu_s": "much"},
    ],
)
def test_vitals_that_name_no_stage_of_ours_or_no_time_are_refused(changes: dict[str, Any]) -> None:
    """The names become those of metrics."""

    def change(header: Header) -> None:
        vitals = json.loads(header["__metadata__"]["vitals"])
        header["__metadata__"]["vitals"] = json.dumps(vitals | changes)

    refused("actor_state", repacked(codec.encode(examples.EXAMPLES["actor_state"]), change), "field")


@pytest.mark.parametrize(
    "changes", [{"env_id": "E" * 40_000}, {"board": "b" * 40_000}, {"n_envs": 1 << 40}, {"n_envs": 0}, {"n_envs": -5}]
)
def test_births_that_nobody_can_use_are_refused(changes: dict[str, Any]) -> None:
    """Among them a name of 40 kB, which ended a learner as it made a directory of it."""

    def change(header: Header) -> None:
        birth = json.loads(header["__metadata__"]["birth"])
        header["__metadata__"]["birth"] = json.dumps(birth | changes)

    refused("actor_state", repacked(codec.encode(examples.EXAMPLES["actor_state"]), change), "field")
