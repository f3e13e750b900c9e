"""Frames on the wire: observations of bytes, packed by zstd.

Consecutive frames are nearly alike, and zstd finds each part of one in the one before: packed, they have a fortieth of
their bytes and less, at 0.2 to 0.6 ms a megabyte (docs/benchmarks/speed.md). Subtracting the previous frame first
gained nothing with any game.

What does not get smaller is sent as it is, so that packed frames are never longer than frames.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from broker.contract import errors

_LEVEL = 3
_kept = threading.local()
"""A compressor and a decompressor per thread: none serves two."""

ByteArray = NDArray[np.uint8]


def pack(frames: NDArray[Any]) -> ByteArray:
    """Returns uint8 frames [N, *shape] as bytes [n], n at most their number."""
    if not hasattr(_kept, "compressor"):
        _kept.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    plain = np.ascontiguousarray(frames).reshape(-1)
    packed = np.frombuffer(_kept.compressor.compress(plain.data), np.uint8)
    return packed if packed.size < plain.size else plain


def unpack(packed: NDArray[Any], shape: tuple[int, ...]) -> ByteArray:
    """Returns the frames [N, *shape], read-only, that `pack` was given.

    Args:
        packed: Bytes [n].
        shape: Of all frames together, as the receiver knows it: nothing larger is ever allocated.

    Raises:
        DecodeError: They are not so many frames. `reason` is `frames`.
    """
    size = math.prod(shape)
    if packed.ndim != 1 or packed.dtype != np.uint8 or packed.size > size:
        raise _odd(f"{packed.size} bytes for frames of {size}")
    if packed.size == size:
        return packed.reshape(shape)
    if not hasattr(_kept, "decompressor"):
        _kept.decompressor = zstandard.ZstdDecompressor()
    try:
        claimed = zstandard.frame_content_size(packed.data)  # zstd holds what it unpacks against it
        if claimed != size:
            raise _odd(f"packed frames of {claimed} bytes, not {size}")
        plain = _kept.decompressor.decompress(packed.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _odd(f"frames cannot be unpacked: {error}") from error
    return np.frombuffer(plain, np.uint8).reshape(shape)


def stacked(frames: NDArray[Any], stack: int) -> NDArray[Any]:
    """Returns the observations [N, *shape] of consecutive frames [N + stack - 1, *frame_shape] (ObservationSpec)."""
    if stack == 1:
        return frames
    observations = len(frames) - stack + 1
    return np.concatenate([frames[at : at + observations] for at in range(stack)], axis=-1)


def _odd(what: str) -> errors.DecodeError:
    return errors.DecodeError(what, reason="frames")
