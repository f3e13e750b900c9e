"""Files as Stable-Baselines3 and PyTorch write them, made without either: pickles are put together byte by byte."""

from __future__ import annotations

import base64
import io
import itertools
import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.study.user_models.formats import symbolic_pickle

Array = NDArray[Any]
Named, Call, Persistent = symbolic_pickle.Named, symbolic_pickle.Call, symbolic_pickle.Persistent


def pickled(value: Any) -> bytes:
    """The pickle of what `symbolic_pickle` reads."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(raw)]) + raw
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
        case tuple() | list():
            return b"(" + b"".join(map(_opcodes, value)) + (b"t" if isinstance(value, tuple) else b"l")
        case dict():
            return b"}(" + b"".join(_opcodes(one) for pair in value.items() for one in pair) + b"u"
        case symbolic_pickle.Named():
            return b"c" + f"{value.module}\n{value.name}\n".encode()
        case symbolic_pickle.Persistent():
            return _opcodes(value.key) + b"Q"
        case symbolic_pickle.Call():
            made = _opcodes(value.function) + _opcodes(value.arguments) + b"R"
            made += (
                b"(" + b"".join(_opcodes(one) for pair in value.items.items() for one in pair) + b"u"
                if value.items
                else b""
            )
            return made + (b"" if value.state is None else _opcodes(value.state) + b"b")
    raise TypeError(type(value))


def array(value: Any) -> symbolic_pickle.Call:
    """An array as numpy pickles it."""
    value = np.asarray(value)
    dtype = Call(Named("numpy", "dtype"), (value.dtype.str[1:], False, True), (3, "<", None, None, None, -1, -1, 0))
    made = Call(Named("numpy.core.multiarray", "_reconstruct"), (Named("numpy", "ndarray"), (0,), b"b"))
    made.state = (1, value.shape, dtype, False, value.tobytes())
    return made


def torch_file(tensors: Mapping[str, Array], *, extra: Any = None) -> bytes:
    """A state_dict as torch.save writes it."""
    names, packed = {}, io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for key, (name, tensor) in enumerate(tensors.items()):
            storage = Persistent(("storage", Named("torch", "FloatStorage"), str(key), "cpu", tensor.size))
            strides = tuple(int(step) // tensor.itemsize for step in np.ascontiguousarray(tensor).strides)
            rebuilt = (storage, 0, tensor.shape, strides, False, Call(Named("collections", "OrderedDict"), ()))
            names[name] = Call(Named("torch._utils", "_rebuild_tensor_v2"), rebuilt)
            archive.writestr(f"archive/data/{key}", tensor.astype("<f4").tobytes())
        content = Call(Named("collections", "OrderedDict"), (), items=names)
        if extra is not None:
            content.items["extra"] = extra
        archive.writestr("archive/data.pkl", pickled(content))
        archive.writestr("archive/version", "3\n")
    return packed.getvalue()


def box(low: Any, high: Any) -> symbolic_pickle.Call:
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    state = {"_shape": low.shape, "low": array(low), "high": array(high)}
    return Call(Named("gymnasium.spaces.box", "Box"), (), state)


def images(*shape: int) -> symbolic_pickle.Call:
    return Call(Named("gymnasium.spaces.box", "Box"), (), {"_shape": shape})


def discrete(n: int) -> symbolic_pickle.Call:
    return Call(Named("gymnasium.spaces.discrete", "Discrete"), (), {"n": n})


def save(
    path: Path,
    tensors: Mapping[str, Array],
    observation: symbolic_pickle.Call,
    action: symbolic_pickle.Call,
    options: dict[str, Any] | None = None,
    policy: bytes | None = None,
) -> Path:
    """An agent as model.save() writes it."""

    def described(value: Any) -> dict[str, str]:
        return {":type:": "", ":serialized:": base64.b64encode(pickled(value)).decode()}

    data = {"observation_space": described(observation), "action_space": described(action)}
    data["policy_kwargs"] = described(options or {})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", json.dumps(data))
        archive.writestr("policy.pth", torch_file(tensors) if policy is None else policy)
    return path


def mlp(rng: np.random.Generator, prefix: str, sizes: list[int], *, step: int = 2) -> dict[str, Array]:
    """Random dense layers of a torch Sequential with a module between two of them."""
    found: dict[str, Array] = {}
    for k, (width, following) in enumerate(itertools.pairwise(sizes)):
        found[f"{prefix}{k * step}.weight"] = (rng.normal(size=(following, width)) / np.sqrt(width)).astype(np.float32)
        found[f"{prefix}{k * step}.bias"] = (0.1 * rng.normal(size=following)).astype(np.float32)
    return found


def normaliser(path: Path, mean: Array, variance: Array) -> Path:
    """Statistics as VecNormalize.save() writes them."""
    running = Call(Named("stable_baselines3.common.running_mean_std", "RunningMeanStd"), ())
    running.state = {"mean": array(mean), "var": array(variance), "count": 1.0}
    whole = Call(Named("stable_baselines3.common.vec_env.vec_normalize", "VecNormalize"), ())
    whole.state = {"norm_obs": True, "epsilon": 1e-8, "clip_obs": 10.0, "obs_rms": running}
    path.write_bytes(pickled(whole))
    return path
