"""Room for policies: bytes that are written in place."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from broker.contract.policies import room


@pytest.mark.parametrize("size", [0, 1, 5000, 40_000_000])
def test_what_is_written_is_what_the_bytes_are(size: int) -> None:
    tracemalloc.start()
    try:
        made, place = room.of(size)
        place[:] = np.arange(size, dtype=np.uint8)
        assert tracemalloc.get_traced_memory()[1] < 2.1 * size + 10_000, "not copied, but for what is compared to"
    finally:
        tracemalloc.stop()
    assert place.size == len(made) == size
    assert made == np.arange(size, dtype=np.uint8).tobytes()


def test_each_has_bytes_of_its_own() -> None:
    (one, first), (other, second) = room.of(3), room.of(3)
    first[:], second[:] = 1, 2
    assert (one, other) == (b"\1\1\1", b"\2\2\2")
