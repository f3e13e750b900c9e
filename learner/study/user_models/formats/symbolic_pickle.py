"""Reads pickles without executing them: what would be imported or called is only noted down.

Other libraries keep tensors and statistics in pickles. Loading one runs whatever it names. Here a name stays a name
(`Named`), a call a record of its arguments (`Call`), and whoever asked for an array picks out those that it knows.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass, field
from typing import Any

_OPCODES_MAX = 2_000_000
_NUMBERS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
"""Opcodes whose argument is a value."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Unreadable(ValueError):
    """Bytes that are no pickle, or one with something that plain data has no need of."""


@dataclass(frozen=True, slots=True)
class Named:
    """What the pickle would have imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Call:
    """What the pickle would have called, the state it would have set, and the items it would have put in."""

    function: Any
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The dotted name of what would have been called; of a class made by `copyreg`, that of the class."""
        first = self.arguments[0] if self.arguments else None
        own = str(self.function) if isinstance(self.function, Named) else type(self.function).__name__
        made = own in ("copyreg._reconstructor", "copyreg.__newobj__") and isinstance(first, Named)
        return str(first) if made else own

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that its state would have set."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict | None):
            return {**(state[0] or {}), **(state[1] or {})} if isinstance(state[1], dict | None) else {}
        return state if isinstance(state, dict) else {}


@dataclass(frozen=True, slots=True)
class Persistent:
    """A reference to what lies outside of the pickle."""

    key: Any


def read(data: bytes | io.BytesIO) -> Any:
    """Returns what one pickle describes; of a stream, the next one.

    Raises:
        Unreadable: It is damaged, too long, or uses what data does not need.
    """
    try:
        return _read(io.BytesIO(data) if isinstance(data, bytes) else data)
    except Unreadable:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Unreadable(f"damaged: {error}") from error


def _read(stream: io.BytesIO) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def marked() -> list[Any]:
        start = marks.pop()
        found = stack[start:]
        del stack[start:]
        return found

    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if count > _OPCODES_MAX:
            raise Unreadable("too long")
        name = opcode.name
        if name in _NUMBERS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            size = _TUPLES[name]
            stack[-size:] = [tuple(stack[-size:])]
        elif name in ("PROTO", "FRAME"):
            pass
        elif name == "STOP":
            return stack.pop()
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            stack.append(tuple(marked()) if name == "TUPLE" else marked())
        elif name == "DICT":
            members = marked()
            stack.append(_paired(members))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            marked()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            members = [stack.pop()] if name == "APPEND" else marked()
            if isinstance(stack[-1], list):
                stack[-1].extend(members)
        elif name in ("SETITEM", "SETITEMS"):
            members = marked() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            target = stack[-1].items if isinstance(stack[-1], Call) else stack[-1]
            target.update(_paired(members))
        elif name == "GLOBAL":
            module, _, member = str(argument).partition(" ")
            stack.append(Named(module, member))
        elif name == "STACK_GLOBAL":
            if not all(isinstance(part, str) for part in stack[-2:]):
                raise Unreadable("a name that is no text")
            stack[-2:] = [Named(*stack[-2:])]
        elif name in ("REDUCE", "NEWOBJ"):
            stack[-2:] = [Call(stack[-2], tuple(stack[-1]))]
        elif name == "NEWOBJ_EX":
            stack[-3:] = [Call(stack[-3], tuple(stack[-2]))]
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Call):
                stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(Persistent(stack.pop()))
        else:
            raise Unreadable(f"it uses {name}, which plain data does not need")
    raise Unreadable("it ends too early")


def _paired(members: list[Any]) -> dict[Any, Any]:
    """Returns a dictionary of keys and values in turn. Keys are plain: a deeply nested one has a hash that crashes."""
    if not all(isinstance(key, str | bytes | int | float | None | Named) for key in members[::2]):
        raise Unreadable("a dictionary with keys that plain data does not have")
    return dict(zip(members[::2], members[1::2], strict=True))
