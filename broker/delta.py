"""A policy as its difference from another one of the same layout: byte-wise subtraction, then zstd.

Between two publishes an int8 weight moves by a few levels, so the difference of two bytes is near 0 (or 255), and the
structure around the weights vanishes. Layouts of equal length are compared blindly; what comes out is only ever used if
its SHA-256 is the manifest's.
"""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from broker import errors

_PACKING = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=19, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0
)
"""Such data has frequent bytes but no phrases, and each one that is found by chance costs more than Huffman's code for
its bytes. A tiny table that forgets at once finds runs and little else: 2 to 10 % smaller than level 1, and level 19 is
larger too."""
_kept = threading.local()
"""A compressor and decompressor per thread: making one costs more than a small policy, and none serves two threads."""

Buffer = bytes | memoryview | NDArray[np.uint8]


def difference(base: Buffer, model: Buffer) -> bytes:
    """The patch that makes `model` of `base`, which must be as long."""
    if not hasattr(_kept, "compressor"):
        _kept.compressor = zstandard.ZstdCompressor(compression_params=_PACKING)
    change = np.subtract(np.frombuffer(model, np.uint8), np.frombuffer(base, np.uint8))
    patch: bytes = _kept.compressor.compress(change)
    return patch


def apply(base: Buffer, patch: Any) -> bytes:
    """What `difference` was given as `model`; `patch` is any buffer.

    Raises:
        PolicyError: The patch is not zstd, or not exactly as long as `base` when unpacked. Nothing longer than that is
            ever allocated. `reason` is `patch`.
    """
    if not hasattr(_kept, "decompressor"):
        _kept.decompressor = zstandard.ZstdDecompressor()
    kept = np.frombuffer(base, np.uint8)
    try:
        # A compressor that knows its input says how long it is. What does not, or lies, does not come from `difference`
        claimed = zstandard.frame_content_size(patch)
        if claimed != kept.size:
            raise errors.PolicyError(f"a patch of {claimed} bytes for a policy of {kept.size}", reason="patch")
        # BytesIO takes the bytes over and gives them back without a copy: the sum is made where the change lies
        change = io.BytesIO(_kept.decompressor.decompress(patch, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise errors.PolicyError(f"the patch cannot be unpacked: {error}", reason="patch") from error
    with change.getbuffer() as place:
        np.add(kept, np.frombuffer(place, np.uint8), out=np.frombuffer(place, np.uint8))
    return change.getvalue()
