"""Converts policies to .tflite by TFLiteConverter, the reference for every faster way.

The graph is traced with the numbers as constants, so nothing depends on how training holds them: 70 ms for a 256x2 MLP,
half of what a Keras model takes, and the same bytes for the same numbers.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import errors
from learner import config
from learner.networks import convolutions, forward, layers
from learner.quantize import bits, input_scaling
from learner.quantize.tflite import graph_edits, stderr_filter


def convert(
    policy: layers.PolicyLayers,
    observations: NDArray[Any],
    precision: str,
    *,
    per_feature: bool = True,
    hi_lo: bool = False,
    per_channel: bool = True,
    weight_bits: int = 8,
) -> bytes:
    """Makes a model that takes raw float32 observations [1, *shape] and gives float32 outputs [1, n].

    | precision | weights | arithmetic |
    |---|---|---|
    | `int8` | int8, one scale per output channel | int8 throughout, between QUANTIZE and DEQUANTIZE |
    | `float32` | float32 | float32 |
    | `float16` | float16, widened when the model is loaded | float32 |
    | `dynamic` | int8, one scale per dense layer; layers of under 1024 weights float32 | int8 sums of float32 values |

    All of them scale the input per feature in the same way, unless the first layer is a convolution, whose pixels share
    one range anyhow: `dynamic` quantizes each observation as a whole, `float16` has too few exponents for the weights
    of a feature that moves by 1e-5, and float32 is to differ in nothing else. In `dynamic` a dense layer has one scale
    because more need a version of FULLY_CONNECTED that tflite-runtime, so every 32-bit board, cannot load.

    Args:
        policy: Layers for raw observations.
        observations: Sample [N, *shape] in any dtype; its ranges are what int8 can represent.
        precision: One of config.PRECISIONS.
        per_feature: Whether each input feature gets a range of its own (`input_scaling`). Else one serves all.
        hi_lo: Whether each of them is two int8 numbers (`input_scaling`), where it has a range of its own.
        per_channel: Whether in int8 each output of a layer has a weight scale of its own.
        weight_bits: 2 to 8; weights are rounded to so many bits first (`bits`).

    Raises:
        PolicyError: A weight is NaN or infinite.
    """
    if precision not in config.PRECISIONS:
        raise errors.ConfigError(f"unknown precision {precision!r}", todo=f"use one of {', '.join(config.PRECISIONS)}")
    if not layers.finite(policy):
        raise errors.PolicyError(
            "the policy has weights that are NaN or infinite",
            reason="not_finite",
            todo="training has diverged: lower learning_rate or max_grad_norm and start from an older checkpoint",
        )
    if isinstance(last := policy[-1], layers.Rescale):
        model = convert(
            policy[:-1],
            observations,
            precision,
            per_feature=per_feature,
            hi_lo=hi_lo,
            per_channel=per_channel,
            weight_bits=weight_bits,
        )
        return graph_edits.append_rescale(model, last)
    first = layers.weighted(policy)[0]
    if isinstance(first, layers.Conv2D) or not per_feature:
        rounded = bits.rounded(policy, weight_bits)
        return _run_converter(rounded, observations.astype(np.float32), precision, per_channel)
    affine = input_scaling.from_ranges(observations, hi_lo=hi_lo)
    rounded = bits.rounded(input_scaling.compensate(policy, affine), weight_bits)
    return graph_edits.insert_scaling(
        _run_converter(rounded, affine.apply(observations), precision, per_channel), affine
    )


def _run_converter(
    policy: layers.PolicyLayers, observations: NDArray[np.float32], precision: str, per_channel: bool = True
) -> bytes:
    def traced(observation: Any) -> Any:
        weights = [tf.constant(array) for array in layers.arrays(policy).values()]
        return forward.run(policy, weights, observation, convolve=convolutions.native)

    # All in one batch: 1 ms, not 30
    made = from_function(traced, observations.shape[1:], precision, [observations], per_channel)
    return graph_edits.with_own_constants(made)


def from_function(
    forward: Callable[[Any], Any],
    shape: tuple[int, ...],
    precision: str,
    calibration: Sequence[NDArray[np.float32]],
    per_channel: bool = True,
) -> bytes:
    """Converts a TensorFlow function, traced with a batch of one.

    Args:
        forward: Maps a float32 tensor [1, *shape] to one tensor; its weights are constants.
        shape: Of one observation.
        precision: One of config.PRECISIONS.
        calibration: Batches whose ranges are what int8 can represent; of more than one row only if nothing in the graph
            reshapes to a fixed batch.
        per_channel: As in `convert`.
    """
    # A fixed batch of 1 lets the converter drop reshapes; actors with several environments resize the input.
    signature = tf.TensorSpec((1, *shape), tf.float32, name="observation")
    graph = tf.function(forward, input_signature=[signature], autograph=False).get_concrete_function()
    with _quiet():
        converter = tf.lite.TFLiteConverter.from_concrete_functions([graph])
        if precision != "float32":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if precision == "int8":
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            converter.representative_dataset = lambda: ([batch] for batch in calibration)
            converter._experimental_disable_per_channel = not per_channel
        elif precision == "float16":
            converter.target_spec.supported_types = [tf.float16]
        elif precision == "dynamic":
            converter._experimental_disable_per_channel_quantization_for_dense_layers = True
        model: bytes = converter.convert()
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what the converter says every time; everything else reaches stderr when it is done."""
    absl = logging.getLogger("absl")
    absl.addFilter(_not_about_trackables)
    try:
        with stderr_filter.filtered(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Statistics for quantized inputs were expected")
            yield
    finally:
        absl.removeFilter(_not_about_trackables)


def _not_about_trackables(record: logging.LogRecord) -> bool:
    # There is nothing to track: the graph holds constants.
    return "trackable_obj" not in record.getMessage()
