"""numpy arrays out of `symbolic_pickle`, and sizes that a file may have."""

from __future__ import annotations

import math
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.study.user_models.formats import symbolic_pickle

BYTES_MAX = 1 << 30
"""The limit of what is unpacked of a file."""
_RECONSTRUCT = {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
_FROM_BUFFER = {"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"}
_SCALAR = {"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"}


def of(value: Any) -> NDArray[Any]:
    """Returns the array that a pickle describes; of a number, one without dimensions.

    Raises:
        Unreadable: It describes no array of numbers.
    """
    if isinstance(value, int | float):
        return np.array(value)
    if not isinstance(value, symbolic_pickle.Call):
        raise symbolic_pickle.Unreadable(f"{type(value).__name__} where an array should be")
    if value.name in _RECONSTRUCT and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, dtype, fortran, data = value.state
        return _array(data, _dtype(dtype), shape, "F" if fortran else "C")
    if value.name in _FROM_BUFFER and len(value.arguments) == 4:
        data, dtype, shape, order = value.arguments
        return _array(data, _dtype(dtype), shape, "F" if order == "F" else "C")
    if value.name in _SCALAR and len(value.arguments) == 2:
        dtype, data = value.arguments
        return _array(data, _dtype(dtype), (), "C")
    raise symbolic_pickle.Unreadable(f"{value.name} where an array should be")


def _dtype(value: Any) -> np.dtype[Any]:
    if isinstance(value, symbolic_pickle.Call) and value.name == "numpy.dtype" and value.arguments:
        code = value.arguments[0] if isinstance(value.arguments[0], str) else ""
        order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "="
        if code[:1] in "fiub" and code[1:].isdigit():
            return np.dtype(f">{code}" if order == ">" else code)
    raise symbolic_pickle.Unreadable("an array of no known kind of number")


def _array(data: Any, dtype: np.dtype[Any], shape: Any, order: Any) -> NDArray[Any]:
    raw = data.encode("latin-1") if isinstance(data, str) else bytes(data)
    sizes = tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0 or math.prod(sizes) * dtype.itemsize != len(raw):
        raise symbolic_pickle.Unreadable("an array whose bytes do not fit its shape")
    return np.frombuffer(raw, dtype).reshape(sizes, order=order)


def unpacked(archive: zipfile.ZipFile, name: str, limit: int = BYTES_MAX) -> bytes:
    """Returns one file of an archive.

    Raises:
        KeyError: There is none of that name.
        Unreadable: It would be larger than the limit.
    """
    member = archive.getinfo(name)
    if member.file_size > limit:
        raise symbolic_pickle.Unreadable(
            f"{name} would unpack to {member.file_size / 1e6:,.0f} MB, and {limit / 1e6:,.0f} MB are the limit"
        )
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack all, and then count
        raise symbolic_pickle.Unreadable(f"{name} is packed in a way that no agent is")
    with archive.open(member) as stream:
        return stream.read(member.file_size)  # with a size no more than that is unpacked
