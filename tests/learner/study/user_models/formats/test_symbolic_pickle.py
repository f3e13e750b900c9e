"""Pickles are read as data: what they name stays a name, and none takes the process down."""

from __future__ import annotations

import numpy as np
import pytest

from learner.study.user_models.formats import arrays, symbolic_pickle
from tests.learner.study.user_models import agents


def test_data_is_read_as_it_was() -> None:
    value = {"a": (1, -2, 1 << 40, 2.5, None, True), "b": ["x", b"y", {}, ()]}
    assert symbolic_pickle.read(agents.pickled(value)) == value


def test_arrays_are_read_whatever_their_dtype() -> None:
    for dtype in ("f4", "f8", "i8", "u1"):
        value = np.arange(6).reshape(2, 3).astype(dtype)
        found = arrays.of(symbolic_pickle.read(agents.pickled(agents.array(value))))
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)


def test_arrays_that_lie_about_their_size() -> None:
    call = agents.array(np.zeros(3))
    call.state = (1, (1 << 40,), *call.state[2:])
    with pytest.raises(symbolic_pickle.Unreadable, match="do not fit"):
        arrays.of(symbolic_pickle.read(agents.pickled(call)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b"junk",
        b"0.",
        b"(lp0\n" + b"g9\n.",
        b"\x80\x02}" + b")" + b"\x85" * 500_000 + b"K\x01s.",  # a key nested half a million deep
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x80\x02\x82\x01.",  # of copyreg's registry
    ],
)
def test_what_is_no_data_is_refused(data: bytes) -> None:
    with pytest.raises(symbolic_pickle.Unreadable):
        symbolic_pickle.read(data)
