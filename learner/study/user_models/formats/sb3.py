"""Reads agents that Stable-Baselines3 and its contrib saved, as layers; nothing in them is executed.

What an agent does greedily is read: of distributions their mode. DQN and QR-DQN (the mean of the quantiles) choose by
value; A2C, PPO and TRPO by logits, or by the mean of a Gaussian, which is clipped to the bounds; DDPG and TD3 by a
tanh; SAC and TQC by the tanh of their mean, which with gSDE is clipped to 2 before. The names of tensors are those of
https://github.com/DLR-RM/stable-baselines3 2.x, stable_baselines3/*/policies.py.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors
from learner.study.user_models.formats import arrays, chain, symbolic_pickle, torch_file

Array = NDArray[Any]
Tensors = Mapping[str, Array]
_CLIP_MEAN = 2.0
"""The `clip_mean` of SAC's and TQC's policies with gSDE."""
_NATURE = {0: 4, 2: 2, 4: 1}
"""Strides of NatureCNN, by the number of the module."""
_ACTIVATIONS = {"ReLU": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Identity": "none"}
_DATA_BYTES_MAX = 256 << 20
_UNREADABLE = (
    OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, NotImplementedError, RuntimeError, EOFError,
    zipfile.BadZipFile, zlib.error, binascii.Error, RecursionError,
)  # fmt: skip


def read(
    path: Path, normaliser: Path | None = None, *, low: Array | None = None, high: Array | None = None
) -> chain.Policy:
    """Reads an agent.

    Args:
        path: What `model.save()` wrote.
        normaliser: What `VecNormalize.save()` wrote; None if it was trained on observations as they are.
        low: Lower bounds of its actions [size], instead of those in the file.
        high: Upper bounds.

    Raises:
        PolicyError: It is damaged, or no agent that is known here; says which part.
        Unmapped: Its network is no chain of dense layers and convolutions.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(arrays.unpacked(archive, "data", _DATA_BYTES_MAX))
            tensors = torch_file.read(arrays.unpacked(archive, "policy.pth"))
        return _policy(data, tensors, _statistics(normaliser) if normaliser else None, low, high)
    except _UNREADABLE as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise errors.PolicyError(
            f"the agent cannot be read: {what}",
            reason="model",
            where=str(path),
            todo="it must be what model.save() of Stable-Baselines3 wrote, whole: DQN, QR-DQN, A2C, PPO, TRPO, DDPG, "
            "TD3, SAC or TQC, with an MLP or CNN policy; export others to ONNX",
        ) from error


def _policy(
    data: dict[str, Any],
    tensors: Tensors,
    statistics: tuple[Array, Array] | None,
    given_low: Array | None,
    given_high: Array | None,
) -> chain.Policy:
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise ValueError(f"{name} is NaN or infinite: training diverged")
    options = _options(data.get("policy_kwargs"))
    space = _attributes(data["observation_space"])
    shape = _observation_shape(space)
    is_image = len(shape) == 3
    observed = (*shape[1:], shape[0]) if is_image else shape
    grown = chain.Chain(observed)
    if statistics is not None:
        mean, gain = (np.asarray(a, np.float64).reshape(shape) for a in statistics)
        if is_image:
            raise ValueError("statistics of images are not read")
        grown.affine(gain, -mean * gain)
    choices, low, high = _action(data["action_space"])
    if low is not None and high is not None:
        low = low if given_low is None else np.broadcast_to(given_low, low.shape)
        high = high if given_high is None else np.broadcast_to(given_high, high.shape)
        if not (np.isfinite([low, high]).all() and (low < high).all()):
            raise ValueError(f"its actions have the bounds {low} and {high}: give --action-low and --action-high")
    if "q_net.q_net.0.weight" in tensors:
        _features(grown, tensors, ("q_net.features_extractor.",))
        _mlp(grown, tensors, "q_net.q_net.", options, "relu")
        return chain.Policy(grown.value(), observed, "values", None, None, False, "SB3 DQN")
    if "quantile_net.quantile_net.0.weight" in tensors:
        _features(grown, tensors, ("quantile_net.features_extractor.",))
        _mlp(grown, tensors, "quantile_net.quantile_net.", options, "relu", group=choices)
        return chain.Policy(grown.value(), observed, "values", None, None, False, "SB3 QR-DQN")
    if any("lstm" in name for name in tensors):
        raise ValueError("its policy is recurrent")
    if "action_net.weight" in tensors:
        _features(grown, tensors, ("pi_features_extractor.", "features_extractor."))
        for part in ("shared_net", "policy_net"):
            _mlp(grown, tensors, f"mlp_extractor.{part}.", options, "tanh", is_last_linear=False)
        grown.dense(tensors["action_net.weight"], tensors["action_net.bias"])
        if choices:
            return chain.Policy(grown.value(), observed, "values", None, None, False, "SB3 A2C/PPO/TRPO, logits")
        if options.get("squash_output"):
            return _squashed(grown, observed, low, high, "SB3 A2C/PPO, squashed mean")
        bounded, clips = grown.bounded(low, high)
        return chain.Policy(bounded, observed, "actions", low, high, clips, "SB3 A2C/PPO/TRPO, mean of a Gaussian")
    if any(name.startswith("actor.latent_pi.") for name in tensors):
        _features(grown, tensors, ("actor.features_extractor.",))
        _mlp(grown, tensors, "actor.latent_pi.", options, "relu", is_last_linear=False)
        is_gsde = "actor.mu.0.weight" in tensors
        grown.dense(*(tensors[f"actor.mu.{'0.' if is_gsde else ''}{part}"] for part in ("weight", "bias")))
        if is_gsde:
            most = float(options.get("clip_mean", _CLIP_MEAN))
            grown.clip(-most, most)
        return _squashed(grown, observed, low, high, "SB3 SAC/TQC, squashed mean")
    if "actor.mu.0.weight" in tensors:
        _features(grown, tensors, ("actor.features_extractor.",))
        _mlp(grown, tensors, "actor.mu.", options, "relu")
        return _squashed(grown, observed, low, high, "SB3 DDPG/TD3")
    raise ValueError(f"its policy is of no known kind: tensors {', '.join(list(tensors)[:4])}, ...")


def _squashed(
    grown: chain.Chain, shape: tuple[int, ...], low: Array | None, high: Array | None, source: str
) -> chain.Policy:
    assert low is not None
    assert high is not None
    grown.activate("tanh")
    grown.affine((high - low) / 2, (high + low) / 2)
    bounded, clips = grown.bounded(low, high)
    return chain.Policy(bounded, shape, "actions", low, high, clips, source)


def _mlp(
    grown: chain.Chain,
    tensors: Tensors,
    prefix: str,
    options: Mapping[str, Any],
    default: str,
    *,
    is_last_linear: bool = True,
    group: int = 0,
) -> None:
    """Adds the dense layers of a torch Sequential; `group` outputs of each quantile are averaged over quantiles."""
    numbers = sorted(
        int(m[1]) for m in (re.fullmatch(rf"{re.escape(prefix)}(\d+)\.weight", name) for name in tensors) if m
    )
    activation = options.get("activation_fn")
    name = default if activation is None else _ACTIVATIONS.get(activation.name, activation.name)
    for number in numbers:
        kernel, bias = tensors[f"{prefix}{number}.weight"], tensors[f"{prefix}{number}.bias"]
        if kernel.ndim != 2:
            raise ValueError(f"{prefix}{number} is no dense layer")
        is_last = number == numbers[-1]
        if is_last and group:
            kernel = kernel.astype(np.float64).reshape(-1, group, kernel.shape[1]).mean(0)
            bias = bias.astype(np.float64).reshape(-1, group).mean(0)
        grown.dense(kernel, bias)
        if not (is_last and is_last_linear):
            grown.activate(name)


def _features(grown: chain.Chain, tensors: Tensors, prefixes: tuple[str, ...]) -> None:
    """Adds what brings observations to features: NatureCNN of bytes, or a mere reshape."""
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in tensors)), "")
    if not prefix:
        grown.flatten()
        return
    known = {f"cnn.{n}.{part}" for n in _NATURE for part in ("weight", "bias")} | {"linear.0.weight", "linear.0.bias"}
    own = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    if own != known:
        raise ValueError(f"its features extractor is not NatureCNN: {', '.join(sorted(own ^ known)[:4])}")
    grown.affine(1 / 255, 0.0)
    for number, stride in _NATURE.items():
        kernel = tensors[f"{prefix}cnn.{number}.weight"].transpose(0, 2, 3, 1)
        grown.convolve(kernel, tensors[f"{prefix}cnn.{number}.bias"], stride)
        grown.activate("relu")
    height, width, channels = grown.shape
    grown.flatten()
    kernel = tensors[f"{prefix}linear.0.weight"]  # torch's images have their channels first
    kernel = kernel.reshape(len(kernel), channels, height, width).transpose(0, 2, 3, 1).reshape(len(kernel), -1)
    grown.dense(kernel, tensors[f"{prefix}linear.0.bias"])
    grown.activate("relu")


def _described(value: Any) -> Any:
    """Returns what an entry of `data` describes: JSON as it is, or the record of a pickle."""
    if isinstance(value, dict) and ":serialized:" in value:
        return symbolic_pickle.read(base64.b64decode(value[":serialized:"], validate=True))
    return value


def _options(value: Any) -> dict[str, Any]:
    described = _described(value)
    return described if isinstance(described, dict) else {}


def _attributes(space: Any) -> dict[str, Any]:
    described = _described(space)
    if not isinstance(described, symbolic_pickle.Call):
        raise ValueError("a space that is not described")
    return {**described.attributes, "kind": described.name.rpartition(".")[2]}


def _observation_shape(space: dict[str, Any]) -> tuple[int, ...]:
    if space["kind"] != "Box":
        raise ValueError(f"it observes a {space['kind']} space, and one array (Box) is read")
    shape = space.get("_shape", space.get("shape"))
    return tuple(int(size) for size in shape)  # type: ignore[union-attr]


def _action(value: Any) -> tuple[int, Array | None, Array | None]:
    """Returns the number of choices, or 0 and the bounds [size]."""
    space = _attributes(value)
    if space["kind"] == "Discrete":
        return int(arrays.of(space["n"])), None, None
    if space["kind"] == "Box":
        low, high = (arrays.of(space[end]).astype(np.float64).reshape(-1) for end in ("low", "high"))
        return 0, low, high
    raise ValueError(f"its actions are a {space['kind']} space: choices (Discrete) and numbers (Box) are read")


def _statistics(path: Path) -> tuple[Array, Array] | None:
    """Returns mean and 1 / deviation of observations that VecNormalize divided; None if it left them alone."""
    if path.stat().st_size > _DATA_BYTES_MAX:
        raise ValueError(f"{path} is larger than {_DATA_BYTES_MAX / 1e6:,.0f} MB")
    found = symbolic_pickle.read(path.read_bytes())
    state = found.attributes if isinstance(found, symbolic_pickle.Call) else {}
    if not state.get("norm_obs", True):
        return None
    running = state.get("obs_rms")
    if not isinstance(running, symbolic_pickle.Call):
        raise ValueError(f"{path} holds no statistics of observations")
    mean, variance = (arrays.of(running.attributes[name]) for name in ("mean", "var"))
    return mean, 1 / np.sqrt(variance + float(arrays.of(state.get("epsilon", 1e-8))))
