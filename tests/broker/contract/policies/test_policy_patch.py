"""Patches: what comes back, what is refused, and that nothing large is allocated for a lie."""

from __future__ import annotations

import tracemalloc
from typing import Any

import hypothesis
import numpy as np
import pytest
import zstandard
from hypothesis import strategies as st

from broker.contract import errors
from broker.contract.policies import policy_patch

BASE = bytes(range(256)) * 4
MODEL = bytes(reversed(BASE))


def difference(base: policy_patch.Buffer, model: policy_patch.Buffer, *, word: int = 1, quick: bool = False) -> bytes:
    return policy_patch.difference(base, model, word=word, quick=quick).tobytes()


PATCH = difference(BASE, MODEL)
NEAR = difference(BASE, BASE)
"""A patch in halves of bytes."""
SORTED = difference(BASE, BASE, word=4)
WHOLE = difference(BASE, np.random.default_rng(0).bytes(len(BASE)), word=4)


@hypothesis.given(
    st.integers(0, 300).flatmap(
        lambda n: st.tuples(st.binary(min_size=n, max_size=n), st.binary(min_size=n, max_size=n))
    ),
    st.sampled_from([1, 2, 4]),
)
def test_a_patch_makes_the_model_again(pair: tuple[bytes, bytes], word: int) -> None:
    base, model = pair
    patch = difference(base, model, word=word)
    assert len(patch) <= max(len(model) + 20, 40), "never much more than the model"
    assert policy_patch.apply(base, patch) == model
    assert policy_patch.apply(np.frombuffer(base, np.uint8), memoryview(patch)) == model


def test_small_changes_of_weights_make_small_patches() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(-127, 128, 100_000, dtype=np.int8)
    model = base + rng.integers(-1, 2, 100_000, dtype=np.int8)
    assert len(difference(base.tobytes(), model.tobytes())) < 100_000 * 1.9 / 8  # log2(3) is 1.58
    assert len(difference(base.tobytes(), base.tobytes())) < 50


def test_a_patch_of_floats_leaves_out_what_stays_of_them() -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal(50_000).astype(np.float32)
    model = (base * (1 + 0.003 * rng.standard_normal(50_000))).astype(np.float32)
    for kind, word, least in ((np.float32, 4, 0.62), (np.float16, 2, 0.42)):
        one, other = base.astype(kind).tobytes(), model.astype(kind).tobytes()
        patch = difference(one, other, word=word)
        assert policy_patch.apply(one, patch) == other
        assert len(patch) < least * len(other)
        assert len(patch) < 0.85 * len(difference(one, other)), "byte by byte"


def test_floats_that_have_nothing_in_common_go_as_they_are() -> None:
    rng = np.random.default_rng(0)
    base, model = rng.bytes(100_000), rng.bytes(100_000)
    for word in (2, 4):
        assert difference(base, model, word=word) == b"\x04" + model


@pytest.mark.parametrize("word", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 2, 4096, 4097, 100_000])
@pytest.mark.parametrize("far", [0.0, 0.001, 0.5, 1.0])
def test_whatever_the_share_of_large_changes_the_model_comes_back(size: int, far: float, word: int) -> None:
    rng = np.random.default_rng(size)
    base = rng.integers(0, 256, size, dtype=np.uint8)
    change = rng.integers(-8, 8, size).astype(np.uint8)
    change[rng.random(size) < far] = 128
    model = (base + change).tobytes()
    for quick in (False, True):
        assert policy_patch.apply(base, difference(base, model, word=word, quick=quick)) == model


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
        SORTED[:1],
        SORTED[:1] + b"\x03" + SORTED[2:],
        SORTED[:-1],
        SORTED[:10],
        SORTED + b"x",
        SORTED[:2] + b"\xff" * 4 + SORTED[6:],
        difference(BASE[4:], BASE[4:], word=4),
        WHOLE[:-1],
        WHOLE + b"x",
    ],
)
def test_anything_else_is_refused(patch: bytes) -> None:
    assert WHOLE[:1] == b"\x04" and SORTED[:2] == b"\x03\x04", "what the cases are about"
    with pytest.raises(errors.PolicyError) as caught:
        policy_patch.apply(BASE, np.frombuffer(patch, np.uint8))
    assert caught.value.reason == "patch"


@hypothesis.given(
    st.sampled_from([PATCH, SORTED, WHOLE]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=5),
)
def test_flipped_bytes_give_a_model_of_the_same_length_or_a_refusal(sound: bytes, flips: list[tuple[int, int]]) -> None:
    patch = bytearray(sound)
    for at, value in flips:
        patch[at % len(patch)] = value
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
