"""Hypothesis strategies for every message, made from the type hints that the codec itself obeys."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import numpy as np
from hypothesis import strategies as st

from broker.contract import messages, specs

_SIDE = st.integers(0, 4)


def _env_specs() -> st.SearchStrategy[specs.EnvSpec]:
    shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
    observations = st.builds(specs.ObservationSpec, shapes, st.sampled_from(specs.OBSERVATION_DTYPES))
    discrete = st.builds(specs.ActionSpec, st.just("discrete"), n=st.integers(2, 1 << 16))
    bounds = st.tuples(st.floats(-specs.MAX_MAGNITUDE, 0.0), st.floats(0.0, specs.MAX_MAGNITUDE, exclude_min=True))
    continuous = st.lists(bounds, min_size=1, max_size=5).map(
        lambda pairs: specs.ActionSpec(
            "continuous", shape=(len(pairs),), low=tuple(p[0] for p in pairs), high=tuple(p[1] for p in pairs)
        )
    )
    return st.builds(specs.EnvSpec, observations, st.one_of(discrete, continuous))


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if hint is specs.EnvSpec:
        return _env_specs()
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if item is not messages.Instruction:
            return st.lists(_values(item), max_size=4).map(tuple)
        orders = st.lists(_values(item), min_size=1, max_size=4, unique_by=lambda order: order.number)
        return orders.map(lambda found: tuple(sorted(found, key=lambda order: order.number)))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        fields = {name: _values(h) for name, h in typing.get_type_hints(hint).items() if name != "stages"}
        if hint is messages.Birth:
            fields["n_envs"] = st.integers(1, messages.MAX_ENVS)
        if hint is messages.Vitals:
            fields["energy_j"] = st.none() | st.floats(0.0, 1e15)
            fields["energy_s"] = st.floats(0.0, 1e9)
            fields["spool_share"] = st.none() | st.floats(0.0, 1.0)
            fields["cpu_s"] = st.none() | st.floats(0.0, 1e9)
            fields["stages"] = st.dictionaries(
                st.sampled_from(messages.ACTOR_STAGES),
                st.tuples(st.integers(0, 1 << 53).map(float), st.floats(0.0, 1e9)),
            )
        return st.builds(hint, **fields)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of(*map(_values, typing.get_args(hint)))
    if typing.get_origin(hint) is dict:
        return st.dictionaries(st.text(max_size=20), _values(typing.get_args(hint)[1]), max_size=4)
    return {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=40),
        type(None): st.none(),
    }[hint]


@st.composite
def _arrays(draw: st.DrawFn, dtypes: tuple[str, ...], rank: int | None) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(st.lists(_SIDE, min_size=rank or 1, max_size=rank or 5))
    count = int(np.prod(shape))
    size = count * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


def message(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Any message of one kind; array elements are any bits, NaN included."""
    arrays = messages.ARRAYS.get(cls, {})
    hints = typing.get_type_hints(cls)
    fields = {name: hint for name, hint in hints.items() if name not in arrays and name != "schema"}
    return st.builds(
        cls,
        **{name: _values(hint) for name, hint in fields.items()},
        **{name: _arrays(dtypes, rank) for name, (dtypes, rank) in arrays.items()},
    )


def assert_same(one: Any, other: Any) -> None:
    """Equal field by field, arrays bit by bit (dataclasses that hold arrays have no `==`)."""
    assert type(one) is type(other)
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), field.name
        else:
            assert a == b, field.name
