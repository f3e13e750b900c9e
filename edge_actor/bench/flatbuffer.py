"""Writes flatbuffers, so that benchmarks make .tflite files without TensorFlow.

Format: https://flatbuffers.dev/internals. Whatever refers comes before what it refers to: all offsets but a table's to
its vtable point forward.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 16  # of vectors: what TFLite wants of its buffers


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number inside a table, by its `struct` format: b, B, i, I."""

    format: str
    value: int


Node = Mapping[int, "Scalar | Node"] | Sequence["Node"] | NDArray[np.generic] | str
"""A table (fields by number), a vector of tables, a vector of numbers, or a string."""


def write(root: Mapping[int, Scalar | Node], identifier: bytes) -> bytes:
    """Returns the bytes of a buffer whose root is a table; `identifier` has four bytes."""
    out = bytearray(4) + bytearray(identifier)
    waiting: collections.deque[tuple[int, Node]] = collections.deque([(0, root)])
    while waiting:
        slot, node = waiting.popleft()
        at = _table(out, node, waiting) if isinstance(node, Mapping) else _vector(out, node, waiting)
        struct.pack_into("<I", out, slot, at - slot)
    return bytes(out)


def _table(out: bytearray, fields: Mapping[int, Scalar | Node], waiting: collections.deque[tuple[int, Node]]) -> int:
    places: dict[int, int] = {}
    size = 4
    for number, value in fields.items():
        width = struct.calcsize(value.format) if isinstance(value, Scalar) else 4
        size += -size % width
        places[number] = size
        size += width
    slots = max(fields, default=-1) + 1
    vtable_bytes = 4 + 2 * slots
    out += bytes(-(len(out) + vtable_bytes) % 4)  # the table behind it is aligned
    at = len(out) + vtable_bytes
    out += struct.pack(f"<HH{slots}H", vtable_bytes, size, *(places.get(number, 0) for number in range(slots)))
    out += bytes(size)
    struct.pack_into("<i", out, at, vtable_bytes)
    for number, value in fields.items():
        if isinstance(value, Scalar):
            struct.pack_into(f"<{value.format}", out, at + places[number], value.value)
        else:
            waiting.append((at + places[number], value))
    return at


def _vector(
    out: bytearray,
    items: Sequence[Node] | NDArray[np.generic] | str,
    waiting: collections.deque[tuple[int, Node]],
) -> int:
    out += bytes(-(len(out) + 4) % _ALIGNMENT)
    at = len(out)
    out += struct.pack("<I", len(items))
    if isinstance(items, str):
        out += items.encode("ascii") + b"\0"
    elif isinstance(items, np.ndarray):
        out += items.astype(items.dtype.newbyteorder("<")).tobytes()
    else:
        out += bytes(4 * len(items))
        waiting.extend((at + 4 + 4 * index, item) for index, item in enumerate(items))
    return at
