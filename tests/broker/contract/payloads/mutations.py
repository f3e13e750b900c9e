"""Payloads of fuzzing: random bytes, genuine ones that were damaged, and genuine ones with odd values in the header."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 1e308, 1 << 31, 1 << 63, 1 << 64, "", "F32", "U8", "\ud800", "\0", [], [0], [-1], {},
    [1 << 62, 4], [0, 1 << 63], {"dtype": "F32"}, [[0, 1]], "1" * 5000, "[" * 2000, "NaN", '"x"', "9" * 400, "-0",
]  # fmt: skip


def any_of(original: bytes, source: random.Random) -> bytes:
    """One of the three, of a body in codec's format."""
    return source.choice((noise, damaged, with_odd_header))(original, source)


def noise(original: bytes, source: random.Random) -> bytes:
    """Random bytes; half of them begin like a header."""
    body = source.randbytes(source.randint(0, 200))
    return body if source.random() < 0.5 else source.randint(0, 220).to_bytes(8, "little") + body


def damaged(original: bytes, source: random.Random) -> bytes:
    """Bytes changed, cut out and put in at random."""
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
    return bytes(payload)


def with_odd_header(original: bytes, source: random.Random) -> bytes:
    """Valid JSON with odd values where the codec expects others: deeper than flipped bytes reach."""
    length = int.from_bytes(original[:8], "little")
    header = json.loads(original[8 : 8 + length])
    for _ in range(source.randint(1, 3)):
        _mutate(header, source)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + original[8 + length :]


def _mutate(header: dict[str, Any], source: random.Random) -> None:
    table = header[source.choice(list(header))] if header else header
    key = source.choice(list(table)) if isinstance(table, dict) and table else None
    if key is None:
        header["__metadata__"] = _odd(source)
    elif source.random() < 0.2:
        del table[key]
    elif isinstance(table[key], str) and source.random() < 0.5:
        table[key] = json.dumps(_odd(source))  # a field is JSON within JSON
    elif isinstance(table[key], list) and table[key] and source.random() < 0.5:
        table[key][source.randrange(len(table[key]))] = _odd(source)
    else:
        table[key] = _odd(source)


def _odd(source: random.Random) -> Any:
    return copy.deepcopy(source.choice(ODD_VALUES))
