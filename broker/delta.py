"""A policy as its difference from another one of the same layout: byte-wise subtraction, then zstd.

Between two publishes an int8 weight moves by a few levels, so the difference of two bytes is near 0 (or 255), and the
structure around the weights vanishes. Layouts of equal length are compared blindly; what comes out is only ever used if
its SHA-256 is the manifest's.

Where nearly all differences are of four bits, two of them share a byte: zstd has half as much to read, codes pairs, and
finds fewer phrases that are there by chance. 8.6 MB of weights that moved by about 2 levels take 11 ms instead of 25,
and 6 % less room. The other four bits, nearly all 0, follow in the same way.

Coding by frequency takes three quarters of zstd's time on either side, and makes such a patch a quarter smaller. Where
nothing leaves the machine that is a loss.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from broker import errors

_FAST = {"strategy": zstandard.STRATEGY_FAST, "window_log": 19}
_TINY = {"hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7}
_PACKING, _QUICK = (zstandard.ZstdCompressionParameters(**_FAST, **_TINY, target_length=n) for n in (0, 1))
"""Such data has frequent bytes but no phrases, and each one that is found by chance costs more than Huffman's code for
its bytes. A tiny table that forgets at once finds runs and little else: 2 to 10 % smaller than level 1, and level 19 is
larger too. With a target length, this strategy leaves bytes that are in no phrase as they are."""
_kept = threading.local()
"""Compressors, a decompressor and room to work per thread: making them costs more than a small policy does, and none
serves two threads."""

_IN_NIBBLES = b"\x01"
"""Before the frame of what is packed so; other patches are nothing but a frame, which begins with another byte."""
_NEAR, _LOW, _HIGH = np.uint8(8), np.uint8(0x0F), np.uint8(0xF0)
_RARE = 256
"""One difference of so many, at most, may need more than four bits: with more of them the plain way is as small."""
_SAMPLE = 1 << 14
"""So many of them tell, of a large policy."""

Buffer = bytes | memoryview | NDArray[np.uint8]
ByteArray = NDArray[np.uint8]


def pack(old: ByteArray, new: ByteArray, packed: ByteArray) -> None:
    """Writes the low halves of all differences, then the high ones; of the second half of them above the first.

    Args:
        old: [2 n].
        new: [2 n].
        packed: [2 n], written.
    """
    near = new - old + _NEAR  # small ones of either sign have high half 0 now
    half = near.size // 2
    first, second = near[:half], near[half:]
    packed[:half] = first & _LOW | second << 4
    packed[half:] = first >> 4 | second & _HIGH


def difference(
    base: Buffer,
    model: Buffer,
    pack: Callable[[ByteArray, ByteArray, ByteArray], object] = pack,
    *,
    quick: bool = False,
) -> bytes:
    """The patch that makes `model` of `base`, which must be as long.

    Args:
        base: A policy, or some bytes of it.
        model: Another one, or the same bytes of that.
        pack: Does what `pack` does; the learner has it compiled.
        quick: For what does not leave this machine: larger, and sooner made and applied.
    """
    if not hasattr(_kept, "compressors"):
        _kept.compressors = [zstandard.ZstdCompressor(compression_params=one) for one in (_PACKING, _QUICK)]
    compress = _kept.compressors[quick].compress
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(model, np.uint8)
    apart = new.size // _SAMPLE | 1  # odd: numbers of four bytes are among them
    sample = new[::apart] - old[::apart] + _NEAR
    packed = _scratch(new.size)
    if new.size % 2 or np.count_nonzero(sample > 15) * _RARE > sample.size:
        plain: bytes = compress(np.subtract(new, old, out=packed))
        return plain
    pack(old, new, packed)
    return _IN_NIBBLES + bytes(compress(packed))


def _scratch(size: int) -> ByteArray:
    """The same array at every call of a thread: fresh memory costs as much as the arithmetic."""
    if not hasattr(_kept, "scratch") or _kept.scratch.size < size:
        _kept.scratch = np.empty(size, np.uint8)
    kept: ByteArray = _kept.scratch[:size]
    return kept


def _unpack(packed: ByteArray, change: ByteArray) -> None:
    """Writes the differences to `change`."""
    half = packed.size // 2
    low, high, first, second = packed[:half], packed[half:], change[:half], change[half:]
    np.bitwise_or(np.left_shift(high, 4, out=first), low & _LOW, out=first)
    np.bitwise_or(np.right_shift(low, 4, out=second), high & _HIGH, out=second)
    np.subtract(change, _NEAR, out=change)


def apply(base: Buffer, patch: Any) -> bytes:
    """What `difference` was given as `model`; `patch` is any buffer. Raises as `apply_to`."""
    made = io.BytesIO(bytes(len(base)))  # gives its bytes away without a copy
    with made.getbuffer() as view:
        apply_to(base, patch, np.frombuffer(view, np.uint8))
    return made.getvalue()


def apply_to(base: Buffer, patch: Any, model: ByteArray) -> None:
    """As `apply`, writing to `model`, which is as long as `base`.

    Raises:
        PolicyError: The patch is not zstd, or not exactly as long as `base` when unpacked. Nothing longer than that is
            ever allocated. `reason` is `patch`.
    """
    if not hasattr(_kept, "decompressor"):
        _kept.decompressor = zstandard.ZstdDecompressor()
    kept, frame = np.frombuffer(base, np.uint8), memoryview(patch)
    in_nibbles = frame[:1] == _IN_NIBBLES
    frame = frame[in_nibbles:]
    try:
        # A compressor that knows its input says how long it is. What does not, or lies, does not come from `difference`
        claimed = zstandard.frame_content_size(frame)
        if claimed != kept.size or (in_nibbles and claimed % 2):
            raise errors.PolicyError(f"a patch of {claimed} bytes for a policy of {kept.size}", reason="patch")
        change = np.frombuffer(_kept.decompressor.decompress(frame, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise errors.PolicyError(f"the patch cannot be unpacked: {error}", reason="patch") from error
    if in_nibbles:
        _unpack(change, model)
        change = model
    np.add(kept, change, out=model)
