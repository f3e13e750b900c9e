"""Frames, packed and unpacked."""

from __future__ import annotations

import numpy as np
import pytest

from broker.contract import errors, frames

SHAPE = (5, 84, 84, 1)


def test_what_is_alike_packs_to_nearly_nothing() -> None:
    still = np.broadcast_to(np.random.default_rng(0).integers(0, 256, SHAPE[1:], np.uint8), SHAPE)
    packed = frames.pack(still)
    assert packed.size < still.size / 4
    np.testing.assert_array_equal(frames.unpack(packed, SHAPE), still)


def test_noise_is_never_longer_than_it_was() -> None:
    noise = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
    packed = frames.pack(noise)
    assert packed.size == noise.size
    np.testing.assert_array_equal(frames.unpack(packed, SHAPE), noise)


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3,)])
def test_few_bytes(shape: tuple[int, ...]) -> None:
    few = np.full(shape, 7, np.uint8)
    np.testing.assert_array_equal(frames.unpack(frames.pack(few), shape), few)


def test_nothing_larger_than_asked_for_is_unpacked() -> None:
    bomb = frames.pack(np.zeros(1 << 27, np.uint8))
    assert bomb.size < 20_000
    with pytest.raises(errors.DecodeError, match="packed frames of 134217728 bytes, not 35280"):
        frames.unpack(bomb, SHAPE)
