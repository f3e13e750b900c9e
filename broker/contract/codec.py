"""Turns messages into bytes and back, in the safetensors format; `DecodeError` on anything odd; never pickle.

The layout is the library's (8 bytes of header length, JSON header, data), and the library reads what we write. It is
written here because `safetensors.numpy` returns no metadata and its metadata order changes from call to call, so that
no golden bytes could pin the wire. Encoding copies an array once at most; decoding copies nothing: arrays are read-only
views of the payload.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from broker.contract import errors, messages, previous, specs

_M = TypeVar("_M")
MAX_HEADER_BYTES = 64 * 1024
_START = '{"__metadata__":{'
_KEPT_CHARS = 2048
"""The longest description of arrays, or birth, that is remembered: a learner decodes thousands, much alike."""
_MAX_ITEMS = 1 << 40
_Place = tuple[str, np.dtype[Any], tuple[int, ...], int]
"""The name, dtype, shape and offset in bytes of an array."""
_Reader = Callable[[str, Any], Any]
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_KIND_OF: dict[type[Any], str] = {cls: kind for kind, cls in messages.KINDS.items()}
_HINTS = {
    cls: typing.get_type_hints(cls)
    for cls in (
        *_KIND_OF,
        messages.Manifest,
        messages.ManifestChanges,
        messages.Birth,
        messages.Vitals,
        messages.Instruction,
    )
    + (specs.EnvSpec, specs.ObservationSpec, specs.ActionSpec)
}
_PLANS = {
    cls: (
        {
            name: hint
            for name, hint in _HINTS[cls].items()
            if name not in messages.ARRAYS.get(cls, {}) and name != "schema"  # which each header has
        },
        tuple(messages.ARRAYS.get(cls, {})),
    )
    for cls in _KIND_OF
}
"""The plain fields of each message with their types, and the names of its arrays, both in declaration order."""
_SCHEMA = str(messages.SCHEMA_VERSION)
_PREVIOUS = str(previous.VERSION)
_OPENINGS = {cls: f'{_START}"message":"{kind}","schema":"{_SCHEMA}"' for cls, kind in _KIND_OF.items()}
_PREVIOUS_OPENINGS = {cls: f'{_START}"message":"{kind}","schema":"{_PREVIOUS}"' for cls, kind in _KIND_OF.items()}
_PLAIN = {int: "([0-9]{1,18})", str: r'\\"([0-9A-Za-z]*)\\"'}
_CANONICAL = {
    cls: re.compile(
        re.escape(f'{_START}"message":"{_KIND_OF[cls]}","schema":"')
        + f'(?:{_SCHEMA}|{_PREVIOUS})"'
        + "".join(f',"{name}":"{_PLAIN[hint]}"' for name, hint in scalars.items())
        + "},"
    )
    for cls, (scalars, arrays) in _PLANS.items()
    if arrays and set(scalars.values()) <= _PLAIN.keys() and _KIND_OF[cls] not in previous.CHANGED
}
"""The metadata as we write them, of messages with nothing but plain fields beside arrays, which both schemas say alike:
one match, and no JSON."""
_FIELDS = {cls: {"message", "schema", *scalars} for cls, (scalars, _) in _PLANS.items()}
_LEGAL = {
    cls: {
        name: ({code: dtype for code, dtype in _DTYPES.items() if dtype.name in names}, rank)
        for name, (names, rank) in arrays.items()
    }
    for cls, arrays in messages.ARRAYS.items()
}
"""The arrays of each message: the dtypes it may have, by their code, and its rank."""


def _fields_of(nested: Any) -> dict[str, Any]:
    return {name: getattr(nested, name) for name in _HINTS[type(nested)]}


_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False, default=_fields_of)
_LAID_OUT = json.JSONEncoder(separators=(",", ":"))  # dtype, shape, offsets: in the library's order
_BIRTH = _HINTS[messages.ActorState]["birth"]
_OR_NONE = frozenset(
    hint for hints in _HINTS.values() for hint in hints.values() if type(None) in typing.get_args(hint)
)


def encode(message: messages.Message, schema: int = messages.SCHEMA_VERSION) -> bytes:
    """Returns the bytes of a message; equal messages give equal bytes. Arguments as of `pieces`."""
    return b"".join(pieces(message, schema))


def pieces(message: messages.Message, schema: int = messages.SCHEMA_VERSION) -> list[bytes | memoryview]:
    """Returns the pieces that `encode` joins: a policy's megabytes need not be copied before they are sealed.

    Args:
        message: What to say.
        schema: Ours; or `previous.VERSION`, as all that a learner says: then actors of both read it. What that cannot
            say is said in ours.
    """
    cls = type(message)
    scalars, names = _PLANS[cls]
    is_ours, is_changed = schema == messages.SCHEMA_VERSION, _KIND_OF[cls] in previous.CHANGED
    older = _older(message) if is_changed and not is_ours else None
    if older is not None:
        texts = [_PREVIOUS_OPENINGS[cls], *[f',"{name}":{_ENCODER.encode(text)}' for name, text in older.items()]]
    else:
        texts = [(_OPENINGS if is_ours or is_changed else _PREVIOUS_OPENINGS)[cls]]
        for name, hint in scalars.items():
            dump = _kept_dump if hint is _BIRTH else _dump
            texts.append(f',"{name}":{_ENCODER.encode(dump(getattr(message, name)))}')
    arrays = [np.ascontiguousarray(getattr(message, name)) for name in names]
    texts += "}", _described(names, tuple([(array.dtype, array.shape) for array in arrays]))
    text = "".join(texts).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned, as the format asks
    return [len(text).to_bytes(8, "little"), text, *[array.data.cast("B") for array in arrays if array.size]]


def _older(message: messages.Message) -> dict[str, str] | None:
    """Returns the fields of a message in the schema before ours; None where that cannot say it."""
    cls = type(message)
    return previous.written(_KIND_OF[cls], {name: _dump(getattr(message, name)) for name in _PLANS[cls][0]})


@functools.lru_cache(256)
def _described(names: tuple[str, ...], arrays: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]) -> str:
    """A header from the end of its metadata on: what each array is and where it lies, one behind the other."""
    texts, offset = [], 0
    for name, (dtype, shape) in zip(names, arrays, strict=True):
        end = offset + math.prod(shape) * dtype.itemsize
        entry = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (offset, end)}
        texts.append(f',"{name}":{_LAID_OUT.encode(entry)}')
        offset = end
    return "".join(texts) + "}"


def decode(expected: type[_M], payload: bytes | memoryview) -> _M:
    """The message of type `expected` that `payload` holds.

    Raises:
        DecodeError: Anything else; its `reason` is one of `size`, `header`, `schema`, `kind`, `field`, `array`.
    """
    text, start = _header(payload)
    canonical = _CANONICAL[expected].match(text) if expected in _CANONICAL else None
    if canonical is not None:
        values = {
            name: int(field) if hint is int else field
            for (name, hint), field in zip(_PLANS[expected][0].items(), canonical.groups(), strict=True)
        }
        described = "{" + text[canonical.end() :]
    else:
        values, described = _parsed(expected, text)
    places, end = (_kept_layout if len(described) <= _KEPT_CHARS else _layout)(_KIND_OF[expected], described)
    if start + end != len(payload):
        raise errors.DecodeError(f"{len(payload) - start} bytes for arrays of {end}", reason="array")
    for name, dtype, shape, offset in places:
        values[name] = np.ndarray(shape, dtype, payload, start + offset)
    try:
        return expected(**values)
    except errors.ActorqError as error:
        raise errors.DecodeError(error.what, reason="field") from error


def with_oldest(payload: bytes, oldest: int) -> bytes:
    """Returns the bytes of an Experience with another `oldest`, and in the schema that it was written in.

    A spool has messages of the release before, and after an update that was undone of the one after.

    Raises:
        DecodeError: It has no such field.
    """
    text, start = _header(payload)
    header = _json(text)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("message") != "experience" or "oldest" not in metadata:
        raise errors.DecodeError("the header is not one of experience", reason="header")
    metadata["oldest"] = str(oldest)
    changed = _LAID_OUT.encode(header).encode()
    changed += b" " * (-len(changed) % 8)
    return b"".join([len(changed).to_bytes(8, "little"), changed, memoryview(payload)[start:]])


def metadata(payload: bytes | memoryview) -> dict[str, str]:
    """Returns the fields of a message that may be of any schema, as they are written; for those it is not for."""
    found = _json(_header(payload)[0]).get("__metadata__")
    if not isinstance(found, dict) or not all(type(value) is str for value in found.values()):
        raise errors.DecodeError("the header has no metadata", reason="header")
    return found


def _header(payload: bytes | memoryview) -> tuple[str, int]:
    """The header's text, and where the data start."""
    if len(payload) < 8:
        raise errors.DecodeError("shorter than a header", reason="size")
    length = int.from_bytes(payload[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > len(payload):
        raise errors.DecodeError(f"header length {length} does not fit", reason="size")
    try:
        return str(payload[8 : 8 + length], "utf-8"), 8 + length
    except ValueError as error:
        raise errors.DecodeError("the header is not JSON", reason="header") from error


def _parsed(expected: type[Any], text: str) -> tuple[dict[str, Any], str]:
    """The scalar fields in any header, and its descriptions of arrays as JSON."""
    metadata, described = _whole(text)
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        raise errors.DecodeError("the header has no metadata", reason="header")
    kind, schema = _KIND_OF[expected], metadata.get("schema")
    if schema not in (_SCHEMA, _PREVIOUS):
        raise errors.DecodeError(
            f"schema version {str(schema)[:20]!r}, expected {_SCHEMA} or {_PREVIOUS}",
            reason="schema",
            todo="update the learner first and then its actors: they may be one schema behind it, and never ahead",
        )
    if metadata.get("message") != kind:
        raise errors.DecodeError(f"message {str(metadata.get('message'))[:20]!r}, expected {kind!r}", reason="kind")
    if schema == _PREVIOUS:
        metadata = previous.read(kind, metadata)
    if metadata.keys() != _FIELDS[expected]:
        raise errors.DecodeError(f"fields of {kind} are not {tuple(_PLANS[expected][0])}", reason="field")
    values = {
        name: (_kept_load if hint is _BIRTH and len(metadata[name]) <= _KEPT_CHARS else _load)(
            name, metadata[name], hint
        )
        for name, hint in _PLANS[expected][0].items()
    }
    if "schema" in _HINTS[expected]:
        values["schema"] = int(schema)
    return values, described


def _json(text: str) -> dict[str, Any]:
    """Returns a header as JSON."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.DecodeError("the header is not JSON", reason="header") from error
    if not isinstance(header, dict):
        raise errors.DecodeError("the header is not an object", reason="header")
    return header


def _whole(text: str) -> tuple[Any, str]:
    """Returns metadata, if any, and the rest as text, which is the same in message after message and remembered."""
    header = _json(text)
    return header.pop("__metadata__", None), json.dumps(header) if header else "{}"


def _layout(kind: str, described: str) -> tuple[tuple[_Place, ...], int]:
    """Returns how arrays lie one behind the other, as a header describes them; and how many bytes they take.

    Raises:
        DecodeError: They are not those of `kind`, or do not lie so.
    """
    cls = messages.KINDS[kind]
    try:
        header = json.loads(described)
    except (ValueError, RecursionError) as error:
        raise errors.DecodeError("the header is not JSON", reason="header") from error
    if header.keys() != set(_PLANS[cls][1]):
        raise errors.DecodeError(f"arrays of {kind} are not {_PLANS[cls][1]}", reason="array")
    places, offset = [], 0
    for name, entry in header.items():  # the library lists arrays as they lie, and sorts them in its own way
        place = _place(cls, name, entry, offset)
        places.append(place)
        offset += math.prod(place[2]) * place[1].itemsize
    return tuple(places), offset


_kept_layout = functools.lru_cache(256)(_layout)


def _place(cls: type[Any], name: str, entry: Any, offset: int) -> _Place:
    """Returns where and what the array is that `entry` describes, which must start at `offset`."""
    dtypes, rank = _LEGAL[cls][name]
    try:
        code, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise errors.DecodeError(f"array {name} is not described", reason="array") from None
    if len(entry) != 3 or type(code) is not str or (dtype := dtypes.get(code)) is None:
        raise errors.DecodeError(f"array {name} has dtype {str(code)[:20]!r}", reason="array")
    if type(shape) is not list or len(shape) > 5 or (rank is not None and len(shape) != rank):
        raise errors.DecodeError(f"array {name} has shape {repr(shape)[:60]}", reason="array")
    if not all(type(size) is int and 0 <= size <= _MAX_ITEMS for size in shape):
        raise errors.DecodeError(f"array {name} has shape {repr(shape)[:60]}", reason="array")
    if math.prod(max(1, size) for size in shape) > _MAX_ITEMS:  # [0, 2**62] has no elements, and fits nowhere
        raise errors.DecodeError(f"array {name} has shape {repr(shape)[:60]}", reason="array")
    items = math.prod(shape)
    if type(first) is not int or type(last) is not int or (first, last) != (offset, offset + items * dtype.itemsize):
        raise errors.DecodeError(f"array {name} does not lie where it says", reason="array")
    return name, dtype, tuple(shape), offset


def _dump(value: Any) -> str:
    if type(value) is int:  # the hot path: counters of Experience
        return str(value)
    if type(value) is float and math.isfinite(value):
        return repr(value)
    return _ENCODER.encode(value)


_kept_dump = functools.lru_cache(256)(_dump)


def _load(name: str, text: str, hint: Any) -> Any:
    if hint is int and len(text) < 19 and text.isascii() and text.isdigit():
        return int(text)
    if hint is str and text[1:-1].isalnum() and text.isascii() and text[0] == text[-1] == '"':
        return text[1:-1]
    try:
        value = _VALUES.decode(text)
    except (ValueError, RecursionError) as error:
        raise errors.DecodeError(f"field {name} is not JSON", reason="field") from error
    return _typed(name, value, hint)


_kept_load = functools.lru_cache(1024)(_load)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


_VALUES = json.JSONDecoder(parse_constant=_refuse_constant)
"""Made once: `json.loads` makes one for each text, where it is told of constants."""


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Returns `value` as parsed from JSON, if it is exactly what `hint` says."""
    return value if _is_plain(value, hint) else _reader(hint)(name, value)


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Returns what gives a value as parsed from JSON if it is exactly what `hint` says, with the field's name."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return functools.partial(_nested, hint)
    if origin in (typing.Union, types.UnionType):
        read_some = _reader(next(one for one in inner if one is not type(None)))
        return lambda name, value: None if value is None and type(None) in inner else read_some(name, value)
    read_item = _reader(inner[1 if origin is dict else 0]) if inner else None

    def read(name: str, value: Any) -> Any:
        kind = type(value)
        if hint is float and kind in (float, int):
            return _finite(name, value)
        if hint is str and kind is str:
            return _printable(name, value)
        if hint in (bool, int) and kind is hint and -(2**63) <= value < 2**63:
            return value
        if origin is dict and kind is dict and read_item is not None:
            return {_printable(name, key): read_item(name, item) for key, item in value.items()}
        if origin is tuple and kind is list and read_item is not None:
            return tuple([read_item(name, item) for item in value])
        raise errors.DecodeError(f"field {name} is not of type {hint}", reason="field")

    return read


def _nested(cls: type[Any], name: str, value: Any) -> Any:
    readers = _READERS[cls]
    if not isinstance(value, dict) or value.keys() != readers.keys():
        raise errors.DecodeError(f"field {name} is not a {cls.__name__}", reason="field")
    try:
        return cls(
            **{
                key: item
                if (may_lack if (item := value[key]) is None else _is_plain(item, hint))
                else read(f"{name}.{key}", item)
                for key, (hint, may_lack, read) in readers.items()
            }
        )
    except errors.SpecError as error:
        raise errors.DecodeError(f"field {name}: {error.what}", reason="field") from error


_READERS = {
    cls: {name: (hint, hint in _OR_NONE, _reader(hint)) for name, hint in hints.items()}
    for cls, hints in _HINTS.items()
}
"""The type of each field, whether it may be None, and its reader, since to find that takes longer than to use it."""


def _is_plain(value: Any, hint: Any) -> bool:
    """Returns whether the value is what the hint says, where that is quickly seen."""
    kind = type(value)
    if kind is int:
        return hint is int and -(2**63) <= value < 2**63
    if kind is str:
        return hint is str and value.isascii()
    if kind is float:
        return hint is float and math.isfinite(value)
    return hint in _OR_NONE if value is None else kind is bool and hint is bool


def _printable(name: str, value: str) -> str:
    try:
        value.encode()  # half a surrogate pair passes JSON and fails later, in a log line or a topic
    except UnicodeEncodeError as error:
        raise errors.DecodeError(f"field {name} is not Unicode text", reason="field") from error
    return value


def _finite(name: str, value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise errors.DecodeError(f"field {name} is not finite", reason="field")
    return number
