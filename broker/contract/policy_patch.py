"""A policy as its difference from another one of the same layout: byte-wise subtraction, then zstd.

Between two publishes an int8 weight moves by a few levels, so the difference of two bytes is near 0 (or 255), and the
structure around the weights vanishes. Layouts of equal length are compared blindly; what comes out is only ever used if
its SHA-256 is the manifest's, or all of it was signed piece by piece.

Where nearly all differences are of four bits, two of them share a byte: zstd has half as much to read, codes pairs, and
finds fewer phrases that are there by chance. The few bytes that moved further follow, with the gaps between them:

    0x01 | zstd of what follows, or 0x02 and that as it is
    n bytes of two differences, plus 8 each: one of the first half below, one of the second half above
    m bytes as they are to be
    m gaps of 16 bits, from one of these to the next

zstd makes a quarter less of it, in three times the time of all the rest: a loss where nothing leaves the machine.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from broker.contract import errors

_PACKING = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=19, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0
)
"""Such data has frequent bytes but no phrases, and each one that is found by chance costs more than Huffman's code for
its bytes. A tiny table that forgets at once finds runs and little else: 2 to 10 % smaller than level 1, and level 19 is
larger too."""
_kept = threading.local()
"""A compressor, a decompressor and room to work per thread: making them costs more than a small policy does, and none
serves two threads."""

_IN_NIBBLES, _AS_IT_IS = b"\x01", b"\x02"
"""Before what is packed so; other patches are nothing but a frame of zstd, which begins with another byte."""
_NEAR, _LOW = np.uint8(8), np.uint8(0x0F)
_SPARE = 256
"""One byte of so many, at most, may have moved further: with more of them the plain way is as small."""
_GAP_MAX = 0xFFFF

Buffer = bytes | memoryview | NDArray[np.uint8]
ByteArray = NDArray[np.uint8]
Pack = Callable[[ByteArray, ByteArray, ByteArray, NDArray[np.uint32]], int]


def pack(old: ByteArray, new: ByteArray, packed: ByteArray, far: NDArray[np.uint32]) -> int:
    """Writes all differences as if they were of four bits, and which are not.

    Args:
        old: [2 n].
        new: [2 n].
        packed: [n], written.
        far: [m], written: where they are larger, in any order.

    Returns:
        How many are larger; if that is more than m, nothing else is of use, and it may be any such number.
    """
    near = new - old + _NEAR
    half = near.size // 2
    np.bitwise_or(near[:half] & _LOW, near[half:] << 4, out=packed)
    where = np.flatnonzero(near > _LOW)[: len(far) + 1]
    far[: len(where)] = where[: len(far)]
    return len(where)


def difference(base: Buffer, model: Buffer, pack: Pack = pack, *, quick: bool = False) -> ByteArray:
    """The patch that makes `model` of `base`, which must be as long. It may be overwritten by the thread's next one.

    Args:
        base: A policy, or some bytes of it.
        model: Another one, or the same bytes of that.
        pack: Does what `pack` does; the learner has it compiled.
        quick: For what does not leave this machine: larger, and sooner made and applied.
    """
    if not hasattr(_kept, "compressor"):
        _kept.compressor = zstandard.ZstdCompressor(compression_params=_PACKING)
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(model, np.uint8)
    packed = None if new.size % 2 else _packed(old, new, pack)
    if packed is None:
        return np.frombuffer(_kept.compressor.compress(np.subtract(new, old, out=_scratch(new.size))), np.uint8)
    if quick:
        return packed
    return np.frombuffer(_IN_NIBBLES + _kept.compressor.compress(packed[1:]), np.uint8)


def _packed(old: ByteArray, new: ByteArray, pack: Pack) -> ByteArray | None:
    """The patch as it is, uncompressed; None if too much of it is far."""
    half = new.size // 2
    far = np.empty(new.size // _SPARE, np.uint32)
    room = _scratch(1 + new.size)
    room[0], packed = _AS_IT_IS[0], room[1:]
    count = pack(old, new, packed[:half], far)
    if count > len(far):
        return None
    # Any byte may be among them: those in between keep the gaps short
    where = np.union1d(far[:count], np.arange(_GAP_MAX, new.size, _GAP_MAX))
    gaps = np.diff(where, prepend=0).astype("<u2").view(np.uint8)
    end = half + len(where)
    packed[half:end], packed[end : end + len(gaps)] = new[where], gaps
    return room[: 1 + end + len(gaps)]


def _scratch(size: int) -> ByteArray:
    """The same array at every call of a thread: fresh memory costs as much as the arithmetic."""
    if not hasattr(_kept, "scratch") or _kept.scratch.size < size:
        _kept.scratch = np.empty(size, np.uint8)
    kept: ByteArray = _kept.scratch[:size]
    return kept


def apply(base: Buffer, patch: Any) -> bytes:
    """What `difference` was given as `model`; `patch` is any buffer. Raises as `apply_to`."""
    made = io.BytesIO(bytes(len(base)))  # gives its bytes away without a copy
    with made.getbuffer() as view:
        apply_to(base, patch, np.frombuffer(view, np.uint8))
    return made.getvalue()


def apply_to(base: Buffer, patch: Any, model: ByteArray) -> None:
    """As `apply`, writing to `model`, which is as long as `base`.

    Raises:
        PolicyError: The patch is not one for so many bytes. Nothing longer than they are is ever allocated. `reason` is
            `patch`.
    """
    kept, whole = np.frombuffer(base, np.uint8), memoryview(patch)
    kind = whole[:1]
    if kind == _AS_IT_IS:
        _unpack(kept, np.frombuffer(whole[1:], np.uint8), model)
    elif kind == _IN_NIBBLES:
        _unpack(kept, _unpressed(whole[1:], range(kept.size // 2, kept.size + 1)), model)
    else:
        np.add(kept, _unpressed(whole, range(kept.size, kept.size + 1)), out=model)


def _unpressed(frame: memoryview, sizes: range) -> ByteArray:
    if not hasattr(_kept, "decompressor"):
        _kept.decompressor = zstandard.ZstdDecompressor()
    try:
        # A compressor that knows its input says how long it is. What does not, or lies, does not come from `difference`
        claimed = zstandard.frame_content_size(frame)
        if claimed not in sizes:
            raise errors.PolicyError(f"a patch of {claimed} bytes for a policy of {sizes[-1]}", reason="patch")
        return np.frombuffer(_kept.decompressor.decompress(frame, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise errors.PolicyError(f"the patch cannot be unpacked: {error}", reason="patch") from error


def _unpack(base: ByteArray, packed: ByteArray, model: ByteArray) -> None:
    half = base.size // 2
    count, rest = divmod(packed.size - half, 3)
    if base.size % 2 or count < 0 or rest:
        raise errors.PolicyError(f"a packed patch of {packed.size} bytes for {base.size}", reason="patch")
    where = np.cumsum(np.frombuffer(packed[half + count :].data, "<u2"), dtype=np.int64)
    if count and where[-1] >= base.size:
        raise errors.PolicyError(f"a patch of byte {where[-1]} of {base.size}", reason="patch")
    near = packed[:half]
    np.bitwise_and(near, _LOW, out=model[:half])
    np.floor_divide(near, 16, out=model[half:])  # numpy has wide instructions for it, and for shifting has none
    np.subtract(model, _NEAR, out=model)
    np.add(base, model, out=model)
    model[where] = packed[half : half + count]
