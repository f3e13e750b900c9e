"""Checks that a .tflite file holds together: every offset in it leads to a place in it.

ai-edge-litert looks before it follows them. tflite-runtime 2.14 does not: a file that was cut off ends the process with
SIGSEGV. This is about accidents. A file that was made to do harm is kept out by its signature.

Format: https://flatbuffers.dev/internals; fields are numbered as in TFLite's schema.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from broker.contract import errors

Layout = Mapping[int, Any]
"""References of a table, by field: a vector (the bytes of an element), a table (its layout) or a vector of tables (a
list of their layout). Numbers in the table itself lead nowhere."""

_QUANTIZATION: Layout = {0: 4, 1: 4, 2: 4, 3: 8}
_TENSOR: Layout = {0: 4, 3: 1, 4: _QUANTIZATION, 7: 4}
_OPERATOR: Layout = {1: 4, 2: 4, 4: {}, 5: 1, 7: 1, 8: 4}
_SUBGRAPH: Layout = {0: [_TENSOR], 1: 4, 2: 4, 3: [_OPERATOR], 4: 1}
_SIGNATURE: Layout = {0: [{0: 1}], 1: [{0: 1}], 2: 1}
_MODEL: Layout = {1: [{1: 1}], 2: [_SUBGRAPH], 3: 1, 4: [{0: 1}], 5: 4, 6: [{0: 1}], 7: [_SIGNATURE]}


def check(model: bytes) -> None:
    """Follows every offset.

    Raises:
        PolicyError: One leads out of the file.
    """
    try:
        _table(model, _reference(model, 0), _MODEL)
    except struct.error as error:
        raise errors.PolicyError(
            "the file does not hold together: it was cut off or damaged", reason="model", todo="copy it again"
        ) from error


def _table(model: bytes, at: int, layout: Layout) -> None:
    vtable = at - _number(model, "<i", at)
    vtable_bytes, table_bytes = _number(model, "<H", vtable), _number(model, "<H", vtable + 2)
    _within(model, vtable, vtable_bytes)
    _within(model, at, table_bytes)
    for slot in range(2, vtable_bytes // 2):
        place = _number(model, "<H", vtable + 2 * slot)
        if place and (kind := layout.get(slot - 2)) is not None:
            _referred(model, _reference(model, at + place), kind)


def _referred(model: bytes, at: int, kind: Any) -> None:
    if isinstance(kind, Mapping):
        _table(model, at, kind)
        return
    length = _number(model, "<I", at)
    _within(model, at + 4, length * (kind if isinstance(kind, int) else 4))
    if not isinstance(kind, int):
        for place in range(at + 4, at + 4 + 4 * length, 4):
            _table(model, _reference(model, place), kind[0])


def _reference(model: bytes, at: int) -> int:
    return at + _number(model, "<I", at)


def _number(model: bytes, kind: str, at: int) -> int:
    _within(model, at, 0)  # struct counts a negative place from the end
    number: int = struct.unpack_from(kind, model, at)[0]
    return number


def _within(model: bytes, at: int, length: int) -> None:
    if at < 0 or at + length > len(model):
        raise struct.error(f"{length} bytes at {at} of {len(model)}")
