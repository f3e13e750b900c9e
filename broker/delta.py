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


class Difference:
    """The patch that makes another model of `base`, while that one is still being made.

    Args:
        base: As long as the model.

    Attributes:
        size: Bytes of the model that were added.
    """

    def __init__(self, base: Buffer) -> None:
        if not hasattr(_kept, "compressor"):
            _kept.compressor = zstandard.ZstdCompressor(compression_params=_PACKING)
        self._base = np.frombuffer(base, np.uint8)
        # One chunk: whoever asks for small ones takes Python's lock from the other threads for each
        self._packing = _kept.compressor.chunker(size=self._base.size, chunk_size=max(1, self._base.size))
        self._packed: list[bytes] = []
        self.size = 0

    def add(self, piece: Buffer) -> None:
        """The next bytes of the model. In the thread that made this, and before it makes another."""
        model = np.frombuffer(piece, np.uint8)
        change = np.subtract(model, self._base[self.size : self.size + model.size])
        self._packed += self._packing.compress(change)
        self.size += model.size

    def finish(self) -> bytes:
        """The patch, once all is there."""
        return b"".join((*self._packed, *self._packing.finish()))


def difference(base: Buffer, model: Buffer) -> bytes:
    """The patch that makes `model` of `base`, which must be as long."""
    made = Difference(base)
    made.add(model)
    return made.finish()


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
