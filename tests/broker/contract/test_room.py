"""Room for policies: zeros, written in place and given away without a copy."""

from __future__ import annotations

import tracemalloc

import pytest

from broker.contract import room


@pytest.mark.parametrize("size", [0, 1, 5000, 40_000_000])
def test_what_is_written_is_given_away_as_it_is(size: int) -> None:
    made = room.of(size)
    with made.getbuffer() as view:
        assert bytes(view[-1:]) in (b"", b"\0")
        view[-1:] = b"x"[: min(size, 1)]
    tracemalloc.start()
    try:
        given = made.getvalue()
        assert tracemalloc.get_traced_memory()[1] < 10_000, "not copied"
    finally:
        tracemalloc.stop()
    assert len(given) == size
    assert given[-1:] == b"x"[: min(size, 1)]
    assert made.getvalue() is given
