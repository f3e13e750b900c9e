"""Patches: what comes back, what is refused, and that nothing large is allocated for a lie."""

from __future__ import annotations

import tracemalloc
from typing import Any

import hypothesis
import numpy as np
import pytest
import zstandard
from hypothesis import strategies as st

from broker.contract import errors, policy_patch

BASE = bytes(range(256)) * 4
MODEL = bytes(reversed(BASE))


def difference(base: policy_patch.Buffer, model: policy_patch.Buffer, *, quick: bool = False) -> bytes:
    return policy_patch.difference(base, model, quick=quick).tobytes()


PATCH = difference(BASE, MODEL)
NEAR = difference(BASE, BASE)
"""In halves of bytes."""


@hypothesis.given(
    st.integers(0, 300).flatmap(
        lambda n: st.tuples(st.binary(min_size=n, max_size=n), st.binary(min_size=n, max_size=n))
    )
)
def test_a_patch_makes_the_model_again(pair: tuple[bytes, bytes]) -> None:
    base, model = pair
    patch = difference(base, model)
    assert policy_patch.apply(base, patch) == model
    assert policy_patch.apply(np.frombuffer(base, np.uint8), memoryview(patch)) == model


def test_small_changes_of_weights_make_small_patches() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(-127, 128, 100_000, dtype=np.int8)
    model = base + rng.integers(-1, 2, 100_000, dtype=np.int8)
    assert len(difference(base.tobytes(), model.tobytes())) < 100_000 * 1.9 / 8  # log2(3) is 1.58
    assert len(difference(base.tobytes(), base.tobytes())) < 50


@pytest.mark.parametrize("size", [0, 2, 4096, 4097, 100_000])
@pytest.mark.parametrize("far", [0.0, 0.001, 0.5, 1.0])
def test_whatever_the_share_of_large_changes_the_model_comes_back(size: int, far: float) -> None:
    rng = np.random.default_rng(size)
    base = rng.integers(0, 256, size, dtype=np.uint8)
    change = rng.integers(-8, 8, size).astype(np.uint8)
    change[rng.random(size) < far] = 128
    model = (base + change).tobytes()
    for quick in (False, True):
        assert policy_patch.apply(base, difference(base, model, quick=quick)) == model


@pytest.mark.parametrize(
    "patch",
    [
        b"",
        b"junk",
        PATCH[:-1],
        PATCH[: len(PATCH) // 2],
        PATCH + b"x",
        difference(BASE[1:], MODEL[1:]),
        difference(BASE + b"x", MODEL + b"x"),
        zstandard.ZstdCompressor(write_content_size=False).compress(MODEL),
        NEAR[:1],
        NEAR[:-1],
        NEAR + b"x",
        difference(BASE[2:], BASE[2:]),
        NEAR[:1] + difference(BASE[1:], MODEL[1:]),
    ],
)
def test_anything_else_is_refused(patch: bytes) -> None:
    with pytest.raises(errors.PolicyError) as caught:
        policy_patch.apply(BASE, np.frombuffer(patch, np.uint8))
    assert caught.value.reason == "patch"


@hypothesis.given(st.lists(st.tuples(st.integers(0, len(PATCH) - 1), st.integers(0, 255)), min_size=1, max_size=5))
def test_flipped_bytes_give_a_model_of_the_same_length_or_a_refusal(flips: list[tuple[int, int]]) -> None:
    patch = bytearray(PATCH)
    for at, value in flips:
        patch[at] = value
    reason = "patch"
    try:
        assert len(policy_patch.apply(BASE, bytes(patch))) == len(BASE)
    except errors.PolicyError as error:
        reason = error.reason
    assert reason == "patch"


def frame(claimed: int, content: bytes) -> bytes:
    """A zstd frame that says it unpacks to `claimed` bytes."""
    made = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(content)
    assert made[4] == 0  # no content size, a window byte follows
    return made[:4] + bytes([0xC0]) + made[5:6] + claimed.to_bytes(8, "little") + made[6:]


@pytest.mark.parametrize("claimed", [len(BASE), 1 << 40, (1 << 64) - 3])
def test_a_bomb_is_refused_before_anything_is_allocated(claimed: int) -> None:
    bomb: Any = frame(claimed, bytes(50_000_000))
    assert len(bomb) < 10_000
    assert zstandard.frame_content_size(bomb) == claimed
    tracemalloc.start()
    try:
        with pytest.raises(errors.PolicyError, match="patch"):
            policy_patch.apply(BASE, bomb)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
