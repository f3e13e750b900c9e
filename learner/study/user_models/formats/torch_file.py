"""Reads the tensors of a PyTorch file (`state_dict`), without PyTorch and without executing anything.

Both layouts: the zip of PyTorch 1.6 and later (a pickle `data.pkl` beside one file per storage), and the older
one (pickles one after the other, and the storages behind them).
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.study.user_models.formats import arrays, symbolic_pickle

_DTYPES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "LongStorage": "<i8", "IntStorage": "<i4",
    "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "?",
}  # fmt: skip
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_REBUILD, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
Storages = Callable[[Any, np.dtype[Any]], NDArray[Any]]


def read(data: bytes) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a file by name; what is no tensor is left out.

    Raises:
        Unreadable: It is no such file, or damaged.
    """
    try:
        return _read_zip(data) if data[:2] == b"PK" else _read_legacy(data)
    except (zipfile.BadZipFile, KeyError, ValueError, NotImplementedError, EOFError, OSError, struct.error) as error:
        raise symbolic_pickle.Unreadable(f"no PyTorch file: {error}") from error


def _read_zip(data: bytes) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (pickle,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        folder = pickle.removesuffix("data.pkl")
        if (
            f"{folder}byteorder" in archive.namelist()
            and arrays.unpacked(archive, f"{folder}byteorder", 16) != b"little"
        ):
            raise symbolic_pickle.Unreadable("numbers whose bytes are in big-endian order")
        content = symbolic_pickle.read(arrays.unpacked(archive, pickle))

        def storage(key: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
            return np.frombuffer(arrays.unpacked(archive, f"{folder}data/{key}"), dtype)

        return _tensors(content, storage)


def _read_legacy(data: bytes) -> dict[str, NDArray[Any]]:
    stream = io.BytesIO(data)
    if symbolic_pickle.read(stream) != _LEGACY_MAGIC:
        raise symbolic_pickle.Unreadable("no PyTorch file")
    for _ in range(2):  # version and machine
        symbolic_pickle.read(stream)
    content, keys = symbolic_pickle.read(stream), symbolic_pickle.read(stream)
    if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
        raise symbolic_pickle.Unreadable("a PyTorch file without its list of storages")
    dtypes = {place[2]: _dtype(place[1]) for place in _places(content)}
    found: dict[Any, NDArray[Any]] = {}
    for key in keys:
        (count,) = struct.unpack("<q", stream.read(8))
        dtype = dtypes.get(key, np.dtype("<f4"))
        raw = stream.read(max(count, 0) * dtype.itemsize)
        if count < 0 or len(raw) != count * dtype.itemsize:
            raise symbolic_pickle.Unreadable("it ends too early")
        found[key] = np.frombuffer(raw, dtype)
    return _tensors(content, lambda key, dtype: found[key])


def _tensors(content: Any, storage: Storages) -> dict[str, NDArray[Any]]:
    found, left = {}, arrays.BYTES_MAX  # tensors may share a storage
    for name, value in _items(content).items():
        if isinstance(value, symbolic_pickle.Call) and value.name in (_REBUILD, _PARAMETER):
            found[str(name)] = tensor = _tensor(value, storage)
            left -= tensor.nbytes
            if left < 0:
                raise symbolic_pickle.Unreadable(f"its tensors take more than {arrays.BYTES_MAX / 1e6:,.0f} MB")
    return found


def _items(content: Any) -> dict[Any, Any]:
    if isinstance(content, symbolic_pickle.Call) and content.name == "collections.OrderedDict":
        return content.items
    if isinstance(content, dict):
        return content
    raise symbolic_pickle.Unreadable("it holds no dictionary of tensors")


def _places(content: Any) -> list[tuple[Any, ...]]:
    calls = [value for value in _items(content).values() if isinstance(value, symbolic_pickle.Call)]
    return [_place(_inner(call).arguments[0]) for call in calls if call.name in (_REBUILD, _PARAMETER)]


def _inner(call: symbolic_pickle.Call) -> symbolic_pickle.Call:
    inner = call.arguments[0] if call.name == _PARAMETER else call
    if not isinstance(inner, symbolic_pickle.Call) or inner.name != _REBUILD or len(inner.arguments) < 4:
        raise symbolic_pickle.Unreadable("a tensor of no known kind")
    return inner


def _place(reference: Any) -> tuple[Any, ...]:
    key = reference.key if isinstance(reference, symbolic_pickle.Persistent) else ()
    if not isinstance(key, tuple) or len(key) < 5 or key[0] != "storage" or not isinstance(key[2], str | int):
        raise symbolic_pickle.Unreadable("a tensor without a storage")
    return key


def _dtype(named: Any) -> np.dtype[Any]:
    name = named.name if isinstance(named, symbolic_pickle.Named) else type(named).__name__
    if name not in _DTYPES:
        raise symbolic_pickle.Unreadable(f"tensors of {name} are not read")
    return np.dtype(_DTYPES[name])


def _tensor(call: symbolic_pickle.Call, storage: Storages) -> NDArray[Any]:
    reference, offset, size, stride = _inner(call).arguments[:4]
    _, kind, key, *_ = _place(reference)
    numbers = storage(key, _dtype(kind))
    sizes, strides = tuple(map(int, size)), tuple(map(int, stride))
    last = int(offset) + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    is_empty = math.prod(sizes) == 0
    if min((*sizes, *strides, int(offset)), default=0) < 0 or math.prod(sizes) > numbers.size:
        raise symbolic_pickle.Unreadable("a tensor that its storage does not hold")
    if not is_empty and last >= numbers.size:
        raise symbolic_pickle.Unreadable("a tensor that reaches beyond its storage")
    step_bytes = tuple(step * numbers.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(numbers[int(offset) :], sizes, step_bytes).copy()
