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

A number of two or four bytes moves in its lower ones: sign, exponent and the first bits of the mantissa stay, and the
last bits are noise that nothing packs. So such numbers are subtracted as the integers that their bits are, the sign of
the difference moves to its lowest bit, and the bytes are sorted by significance:

    0x03 | 2 or 4, and for each of these bytes of all differences, the most significant first:
    4 bytes of length, and so much: zstd, or the bytes as they are if the length is their number
    what is left behind the last whole number, as it is to be

Where nothing pays, a patch is 0x04 and the bytes as they are to be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from broker.contract import errors
from broker.contract.policies import room

_PACKING = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=19, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0
)
"""Such data has frequent bytes but no phrases, and each one that is found by chance costs more than Huffman's code for
its bytes. A tiny table that forgets at once finds runs and little else: 2 to 10 % smaller than level 1, and level 19 is
larger too."""
_kept = threading.local()
"""A compressor, a decompressor and room to work per thread: making them costs more than a small policy does, and none
serves two threads."""

_IN_NIBBLES, _AS_IT_IS, _SORTED, _WHOLE = b"\x01", b"\x02", b"\x03", b"\x04"
"""Before what is packed so; other patches are nothing but a frame of zstd, which begins with another byte."""
_WORDS = (2, 4)
_LENGTH_BYTES = 4
_PAYS = 0.97
"""Bytes of which zstd leaves a larger share go as they are, and so do all that are less significant: they are noise."""
_BLOCK = 1 << 16
"""Numbers that are put together at once: they stay in the cache."""
_NEAR, _LOW = np.uint8(8), np.uint8(0x0F)
_SPARE = 256
"""One byte of so many, at most, may have moved further: with more of them the plain way is as small."""
_GAP_MAX = 0xFFFF

Buffer = bytes | memoryview | NDArray[np.uint8]
ByteArray = NDArray[np.uint8]
Pack = Callable[[ByteArray, ByteArray, ByteArray, NDArray[np.uint32]], int]
Sort = Callable[[ByteArray, ByteArray, ByteArray], object]


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


def sort(old: ByteArray, new: ByteArray, planes: ByteArray) -> None:
    """Writes the differences of numbers, byte by byte; in each, the lowest bit is the sign.

    Args:
        old: [w n] bytes of n numbers.
        new: [w n].
        planes: [w, n], written: the most significant bytes of all first.
    """
    word, count = planes.shape
    kind = np.dtype(f"<u{word}")
    one, other = old.view(kind), new.view(kind)
    for start in range(0, count, _BLOCK):
        cut = slice(start, start + _BLOCK)
        moved = other[cut] - one[cut]
        folded = (moved << 1) ^ (0 - (moved >> (8 * word - 1)))
        planes[:, cut] = folded.view(np.uint8).reshape(-1, word).T[::-1]


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops over all bytes: `pack` and `sort`, or what does the same."""

    pack: Pack
    sort: Sort


PLAIN = Loops(pack, sort)
"""The loops in numpy."""


def difference(base: Buffer, model: Buffer, loops: Loops = PLAIN, *, word: int = 1, quick: bool = False) -> ByteArray:
    """The patch that makes `model` of `base`, which must be as long. It may be overwritten by the thread's next one.

    Args:
        base: A policy, or some bytes of it.
        model: Another one, or the same bytes of that.
        loops: The learner has them compiled.
        word: Bytes of a number: 4 in float32, 2 in float16, 1 in int8.
        quick: For what does not leave this machine: larger, and sooner made and applied.
    """
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(model, np.uint8)
    if word in _WORDS:
        return _whole(new) if quick else _sorted(old, new, word, loops.sort)
    packed = None if new.size % 2 else _packed(old, new, loops.pack)
    if packed is None:
        return _whole(new) if quick else _compressed(np.subtract(new, old, out=_scratch(new.size)))
    return packed if quick else np.concatenate([np.frombuffer(_IN_NIBBLES, np.uint8), _compressed(packed[1:])])


def _compressed(data: ByteArray) -> ByteArray:
    if not hasattr(_kept, "compressor"):
        _kept.compressor = zstandard.ZstdCompressor(compression_params=_PACKING)
    return np.frombuffer(_kept.compressor.compress(data), np.uint8)


def _whole(new: ByteArray) -> ByteArray:
    room = _scratch(1 + new.size)
    room[0], room[1:] = _WHOLE[0], new
    return room


def _sorted(old: ByteArray, new: ByteArray, word: int, sort: Sort) -> ByteArray:
    count = new.size // word
    planes, end = _scratch(word * count).reshape(word, count), word * count
    sort(old[:end], new[:end], planes)
    parts, pays = [np.frombuffer(_SORTED + bytes([word]), np.uint8)], True
    for plane in planes:
        smaller = _compressed(plane) if pays else plane
        pays = smaller.size < _PAYS * count
        chosen = smaller if pays else plane
        parts += [np.frombuffer(chosen.size.to_bytes(_LENGTH_BYTES, "little"), np.uint8), chosen]
    patch = np.concatenate([*parts, new[end:]])
    return patch if patch.size <= new.size else _whole(new)


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
    """Returns the `model` that `difference` was given; `patch` is any buffer. Raises as `apply_to`."""
    made, view = room.of(len(base))
    apply_to(base, patch, view)
    return made


def apply_to(base: Buffer, patch: Any, model: ByteArray) -> None:
    """Does what `apply` does, writing to `model`, which is as long as `base`.

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
    elif kind == _SORTED:
        _unsort(kept, whole[1:], model)
    elif kind == _WHOLE:
        if len(whole) - 1 != kept.size:
            raise errors.PolicyError(f"a patch of {len(whole) - 1} bytes for {kept.size}", reason="patch")
        model[:] = np.frombuffer(whole[1:], np.uint8)
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


def _unsort(base: ByteArray, sorted_: memoryview, model: ByteArray) -> None:
    word = sorted_[0] if sorted_ else 0
    if word not in _WORDS:
        raise errors.PolicyError(f"a patch of numbers of {word} bytes", reason="patch")
    count, at = base.size // word, 1
    planes: list[ByteArray] = []
    for _ in range(word):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(sorted_[at:start], "little")
        if at > len(sorted_):
            raise errors.PolicyError("a patch that was cut off", reason="patch")
        part = sorted_[start:at]
        planes.append(
            np.frombuffer(part, np.uint8) if len(part) == count else _unpressed(part, range(count, count + 1))
        )
    end, kind = word * count, np.dtype(f"<u{word}")
    if len(sorted_) - at != base.size - end:
        raise errors.PolicyError(f"a sorted patch for {at + base.size - end} bytes", reason="patch")
    old, new = base[:end].view(kind), model[:end].view(kind)
    for begin in range(0, count, _BLOCK):
        cut = slice(begin, begin + _BLOCK)
        folded = planes[0][cut].astype(kind)
        for plane in planes[1:]:
            folded <<= 8
            folded |= plane[cut]
        np.add(old[cut], (folded >> 1) ^ (0 - (folded & 1)), out=new[cut])
    model[end:] = np.frombuffer(sorted_[at:], np.uint8)
