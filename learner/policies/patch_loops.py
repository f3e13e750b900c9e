"""The loops that make patches of policies, compiled; `broker.contract.policies.policy_patch` says what they do.

Nothing here holds Python's lock.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from broker.contract.policies import policy_patch
from learner.quantize import kernels

_BYTES_IN, _BYTES_OUT = types.Array(types.uint8, 1, "C", readonly=True), types.Array(types.uint8, 1, "C")
_PLANES_OUT, _INDEX_OUT = types.Array(types.uint8, 2, "C"), types.Array(types.uint32, 1, "C")
_BLOCK = 128


@numba.njit(nogil=True)
def _find(old: NDArray[np.uint8], new: NDArray[np.uint8], span: range, far: NDArray[np.uint32], count: int) -> int:
    for i in span:
        if np.uint8(new[i] - old[i] + 8) > 15:
            if count < len(far):
                far[count] = i
            count += 1
    return count


@kernels.compiled(types.int64(_BYTES_IN, _BYTES_IN, _BYTES_OUT, _INDEX_OUT))
def pack(old: NDArray[np.uint8], new: NDArray[np.uint8], packed: NDArray[np.uint8], far: NDArray[np.uint32]) -> int:
    """Does what `broker.contract.policies.policy_patch.pack` does, compiled."""
    half, count = len(new) // 2, 0
    in_blocks = half // _BLOCK * _BLOCK
    for start in range(0, in_blocks, _BLOCK):
        low, high = slice(start, start + _BLOCK), slice(half + start, half + start + _BLOCK)
        old_low, old_high, new_low, new_high, into = old[low], old[high], new[low], new[high], packed[low]
        seen = np.uint8(0)
        for i in range(_BLOCK):
            first, second = np.uint8(new_low[i] - old_low[i] + 8), np.uint8(new_high[i] - old_high[i] + 8)
            into[i] = np.uint8(first & 15 | second << 4)
            seen = np.uint8(seen | first | second)
        if seen > 15:  # one of them in a few blocks
            count = _find(old, new, range(start, start + _BLOCK), far, count)
            count = _find(old, new, range(half + start, half + start + _BLOCK), far, count)
            if count > len(far):
                return count
    for i in range(in_blocks, half):
        first, second = np.uint8(new[i] - old[i] + 8), np.uint8(new[half + i] - old[half + i] + 8)
        packed[i] = np.uint8(first & 15 | second << 4)
    count = _find(old, new, range(in_blocks, half), far, count)
    return _find(old, new, range(half + in_blocks, 2 * half), far, count)


@kernels.compiled(types.void(_BYTES_IN, _BYTES_IN, _PLANES_OUT))
def sort(old: NDArray[np.uint8], new: NDArray[np.uint8], planes: NDArray[np.uint8]) -> None:
    """Does what `broker.contract.policies.policy_patch.sort` does, compiled."""
    if len(planes) == 4:
        one, other = old.view(np.uint32), new.view(np.uint32)
        first, second, third, fourth = planes[0], planes[1], planes[2], planes[3]
        for i in range(len(one)):
            moved = np.uint32(other[i] - one[i])
            folded = np.uint32(np.uint32(moved << 1) ^ np.uint32(np.int32(moved) >> 31))
            first[i], second[i] = np.uint8(folded >> 24), np.uint8(folded >> 16)
            third[i], fourth[i] = np.uint8(folded >> 8), np.uint8(folded)
    else:
        short_one, short_other = old.view(np.uint16), new.view(np.uint16)
        high, low = planes[0], planes[1]
        for i in range(len(short_one)):
            moved16 = np.uint16(short_other[i] - short_one[i])
            folded16 = np.uint16(np.uint16(moved16 << 1) ^ np.uint16(np.int16(moved16) >> 15))
            high[i], low[i] = np.uint8(folded16 >> 8), np.uint8(folded16)


LOOPS = policy_patch.Loops(pack, sort)
"""The loops that make patches, compiled."""
