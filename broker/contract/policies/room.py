"""Room for the bytes of a policy, which are written in place and never copied."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALWAYS_ANEW = 1 << 25
"""Bytes from which on malloc has the kernel map memory anew each time, whatever was freed before."""
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def of(size: int) -> tuple[bytes, NDArray[np.uint8]]:
    """Returns new bytes, of which nothing is set, and the array to write them by.

    Whoever asked keeps both to himself until all is written, as Python's C interface has it. A `BytesIO` would copy
    them once more, as long as somebody has a view of a part.

    Large ones lie in huge pages where the kernel has them: with pages of 4 KB, 34 MB took 36 ms to write for the first
    time and 5 with these (two cores shared with others).
    """
    made: bytes = _new(None, size)
    told = np.frombuffer(made, np.uint8).__array_interface__ if size else np.empty(0, np.uint8).__array_interface__
    start = told["data"][0]
    if size >= _ALWAYS_ANEW and hasattr(mmap, "MADV_HUGEPAGE"):
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return made, np.asarray(_Place(made, {**told, "data": (start, False)}))


class _Place:
    """Memory that numpy may write; `ctypes` would make a type for each length, which took 60 us."""

    def __init__(self, owner: bytes, told: dict[str, Any]) -> None:
        self._owner, self.__array_interface__ = owner, told
