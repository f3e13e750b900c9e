"""Mutated and random payloads of every kind: a message or a MessageError, never anything else.

Seeded, so that a failure repeats; the failing payload is in the assertion's message.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from broker import codec, errors, messages
from tests.broker import examples

KINDS = sorted(messages.KINDS)
ROUNDS = 2000
ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, 1 << 31, 1 << 63, 1 << 64, "", "F32", "U8", "\ud800", "\0", [], [0], [-1], {},
    [1 << 62, 4], [0, 1 << 63], {"dtype": "F32"}, [[0, 1]], "1" * 5000, "[" * 2000, "NaN", '"x"', "9" * 400, "-0",
]  # fmt: skip


def decode_or_refuse(kind: str, payload: bytes) -> None:
    try:
        codec.decode(messages.KINDS[kind], payload)
    except errors.MessageError as error:
        str(error).encode()  # it can be shown
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error} on {payload!r}")


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_bytes(kind: str) -> None:
    source = random.Random(kind)
    original = examples.golden(kind)
    for _ in range(ROUNDS):
        payload = bytearray(original)
        for _ in range(source.randint(1, 8)):
            at = source.randrange(len(payload))
            what = source.random()
            if what < 0.6:
                payload[at] = source.randrange(256)
            elif what < 0.8:
                del payload[at : at + source.randint(1, 20)]
            else:
                payload[at:at] = source.randbytes(source.randint(1, 20))
            payload = payload or bytearray(b"\0")
        decode_or_refuse(kind, bytes(payload))


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_headers(kind: str) -> None:
    """Valid JSON with odd values where the codec expects others: deeper than flipped bytes reach."""
    source = random.Random(kind)
    original = examples.golden(kind)
    length = int.from_bytes(original[:8], "little")
    for _ in range(ROUNDS):
        header = json.loads(original[8 : 8 + length])
        for _ in range(source.randint(1, 3)):
            _mutate(header, source)
        text = json.dumps(header).encode()
        decode_or_refuse(kind, len(text).to_bytes(8, "little") + text + original[8 + length :])


@pytest.mark.parametrize("kind", KINDS)
def test_random_bytes(kind: str) -> None:
    source = random.Random(kind)
    for _ in range(ROUNDS):
        body = source.randbytes(source.randint(0, 200))
        decode_or_refuse(kind, body)
        decode_or_refuse(kind, source.randint(0, 220).to_bytes(8, "little") + body)


def odd(source: random.Random) -> Any:
    return copy.deepcopy(source.choice(ODD_VALUES))


def _mutate(header: dict[str, Any], source: random.Random) -> None:
    table = header[source.choice(list(header))] if header else header
    key = source.choice(list(table)) if isinstance(table, dict) and table else None
    if key is None:
        header["__metadata__"] = odd(source)
    elif source.random() < 0.2:
        del table[key]
    elif isinstance(table[key], str) and source.random() < 0.5:
        table[key] = json.dumps(odd(source))  # a field is JSON within JSON
    elif isinstance(table[key], list) and table[key] and source.random() < 0.5:
        table[key][source.randrange(len(table[key]))] = odd(source)
    else:
        table[key] = odd(source)
