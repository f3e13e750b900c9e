"""Takes over the policy that a fleet acts on, where nothing else is left of the run that made it.

Its weights are those of the file: rounded to int8, and rewritten for that, so that the function is the same and single
numbers are not. Critics, value streams and the optimizer's moments begin anew.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker.contract import messages, specs
from learner import algorithms, config
from learner.networks import layers, networks
from learner.quantize import fp32, scales
from learner.quantize.tflite import interpreter, template

_SAMPLES = 64
_REACH = 0.5
"""The part of the input's range from which samples are drawn: its corners lie where no state does."""
_ERROR_MAX = 0.25
"""Largest error of what was read back, relative to how far outputs reach on average: rounding costs a few per cent."""
_Settings = TypeVar("_Settings", bound=config.AlgorithmConfig)

FloatArray = NDArray[np.float32]


def adopt(
    algorithm: algorithms.Algorithm, found: messages.Policy, spec: specs.EnvSpec, settings: config.AlgorithmConfig
) -> str:
    """Gives an algorithm that has made no update the weights of a policy.

    Args:
        algorithm: Changed only if the policy fits, and says what its file says.
        found: Genuine.
        spec: Of the fleet.
        settings: Of the algorithm.

    Returns:
        Why not; empty if it has them.
    """
    manifest = found.manifest
    if manifest.fingerprint != spec.fingerprint:
        return "it is for another environment"
    if manifest.head != algorithm.head:
        return f"its outputs are {manifest.head}, and those of {algorithm.name} are {algorithm.head}"
    if not isinstance(settings, config.OffPolicyConfig):
        return f"{algorithm.name} scales its inputs anew with each phase"
    model = found.model.tobytes()
    own = algorithm.policy_layers()
    try:
        weights, normalizer = _read(model, own, spec.observation)
        read = layers.absorb(layers.with_arrays(own, weights), normalizer.gain, normalizer.offset)
        if not _answers_alike(read, model, spec.observation, normalizer):
            return "what was read back of its weights acts otherwise than it does"
    except (scales.Unmapped, ValueError, IndexError, TypeError, RuntimeError, struct.error) as error:
        return f"its weights cannot be read back: {error}"
    algorithm.adopt(weights, normalizer.gain, normalizer.offset)
    return ""


def explored(settings: _Settings) -> _Settings:
    """Returns the settings with exploration at its end: whoever has a policy need not begin with random actions."""
    if isinstance(settings, config.OffPolicyConfig):
        return dataclasses.replace(settings, epsilon_start=settings.epsilon_end)
    return settings


def _read(
    model: bytes, own: layers.PolicyLayers, observation: specs.ObservationSpec
) -> tuple[list[FloatArray], networks.Normalizer]:
    """Returns the numbers of a policy in the order of `layers.arrays`, and what scales its inputs in front of them.

    Raises:
        Unmapped: It is no int8 policy of this architecture.
    """
    weighted = layers.weighted(own)
    found = template.locate(model, len(weighted))
    normalizer = networks.Normalizer.identity(observation)
    bytes_gain = normalizer.gain if found.gain is None else np.ones(1, np.float32)
    if found.gain is not None and found.offset is not None:
        normalizer = networks.Normalizer(found.gain.flatten(), found.offset.flatten())
    elif observation.dtype != "uint8":
        raise scales.Unmapped("it does not scale its inputs")
    numbers: list[FloatArray] = []
    for place, layer in zip(found.layers, weighted, strict=True):
        if place.weights.dtype != np.int8 or place.bias.dtype != np.int32 or not place.weight_scale.size:
            raise scales.Unmapped("it is not int8")
        kernel = place.weights * place.weight_scale[:, None]
        if not numbers:
            if kernel.shape[1] == 2 * layer.kernel[0].size:  # a feature's second number is what rounding took away
                last = observation.shape[-1]
                kernel = kernel.reshape(len(kernel), -1, 2 * last)[..., :last]
            kernel = kernel / bytes_gain
        if kernel.size != layer.kernel.size:
            raise scales.Unmapped(f"a layer has {kernel.size} weights, and that of this network {layer.kernel.size}")
        numbers += [kernel.reshape(layer.kernel.shape).astype(np.float32), (place.bias * place.bias_scale).astype("f4")]
    return numbers, normalizer


def _answers_alike(
    policy: layers.PolicyLayers, model: bytes, observation: specs.ObservationSpec, normalizer: networks.Normalizer
) -> bool:
    """Returns whether layers answer as the model does, but for its rounding."""
    rng, shape = np.random.default_rng(0), (_SAMPLES, *observation.shape)
    seen: NDArray[Any]
    if observation.dtype == "uint8":
        seen = rng.integers(0, 256, shape) * rng.integers(0, 2, (_SAMPLES, *([1] * len(observation.shape))))
    else:
        scaled = rng.uniform(-_REACH, _REACH, (_SAMPLES, observation.size))
        seen = ((scaled - normalizer.offset) / normalizer.gain).reshape(shape)
    seen = seen.astype(observation.dtype)
    # Outputs of choices saturate where the choice is clear
    expected, low, high = interpreter.run(model, seen)
    found = fp32.outputs(policy, seen)
    if found.shape != expected.shape:
        return False
    found, expected = np.clip(found, low, high), np.clip(expected, low, high)
    reach = float(np.abs(expected - expected.mean(0)).mean())
    return float(np.abs(found - expected).mean()) <= _ERROR_MAX * reach
