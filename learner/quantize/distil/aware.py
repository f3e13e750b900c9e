"""Quantization-aware distillation of a policy: weights that lose nothing to int8 where the originals do.

The forward pass simulates the int8 model: per-feature scaling of the input (`input_scaling`), one scale per output
channel for weights, one range per activation, measured as the converter does. The result is a plain policy, which then
goes the normal way, by template or converter. Whoever ships something else than the converter's model gives a `Judge`
of that: what helps one may harm the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from learner.networks import fake_quant, forward, layers
from learner.quantize import calibrate, fp32, input_scaling, ptq
from learner.quantize.distil import distillation
from learner.quantize.tflite import convert

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types
Judge = Callable[[layers.PolicyLayers, NDArray[Any], FloatArray], FloatArray]
"""Gives the failings [M] of what ships of a policy, for observations [M, *shape] and fp32 outputs [M, n]."""


def distil(
    policy: layers.PolicyLayers,
    observations: NDArray[Any],
    *,
    steps: int = distillation.STEPS,
    seed: int = 0,
    outputs: distillation.Outputs = "values",
    weight_bits: int = 8,
    judge: Judge | None = None,
) -> layers.PolicyLayers:
    """Trains a policy's weights against its own fp32 outputs, through simulated int8.

    Args:
        policy: Layers for raw observations.
        observations: Calibration sample [N, *shape]; a quarter of it only chooses among the results.
        steps: Gradient steps.
        seed: Determines the split and the order of observations; the same arguments give the same weights.
        outputs: `values` of actions of which the largest is taken, or continuous `actions`.
        weight_bits: 2 to 8, as it will be converted with (`bits`).
        judge: Of what ships, by which weights are chosen; None is for the model of `convert`.

    Returns:
        The policy whose int8 model does best on that quarter: `policy` itself unless another is clearly better. From
        values it may have subtracted what they have in common (`ptq.centre_outputs`), which changes no choice.
    """
    exact = fp32.outputs(policy, observations)
    learn, choose = distillation.split(len(observations), seed)
    first = layers.weighted(policy)[0]
    affine = input_scaling.from_ranges(observations) if isinstance(first, layers.Dense) else None
    scaled = input_scaling.compensate(policy, affine) if affine else policy
    x = affine.apply(observations) if affine else observations.astype(np.float32)
    ranges = _Limits(len(layers.weighted(policy)))

    def unscaled(weights: Sequence[FloatArray]) -> layers.PolicyLayers:
        trained = layers.with_arrays(scaled, weights)
        return layers.absorb(trained, affine.gain, affine.offset) if affine else trained

    def judged(weights: Sequence[FloatArray]) -> FloatArray:
        of = judge or plain
        return of(unscaled(weights), observations[choose], exact[choose])

    def plain(candidate: layers.PolicyLayers, rows: NDArray[Any], wanted: FloatArray) -> FloatArray:
        model = convert.convert(candidate, observations, "int8", weight_bits=weight_bits)
        return distillation.judge(model, rows, wanted, outputs)

    original = list(layers.arrays(scaled).values())
    rewritten = None
    if outputs == "values":
        rewritten = list(layers.arrays(ptq.centre_outputs(scaled, fp32.outputs(scaled[:-1], x), exact)).values())
    best = distillation.train(
        lambda weights, batch: _simulate(scaled, weights, batch, ranges, weight_bits),
        original,
        rewritten,
        x[learn],
        exact[learn],
        outputs=outputs,
        steps=steps,
        seed=seed,
        refresh=lambda weights: ranges.measure(layers.with_arrays(scaled, weights), x),
        judge=judged,
    )
    return policy if best is original else unscaled(best)


class _Limits:
    """The limits of the input and of each layer's output before tanh, as variables, so that tracing happens once."""

    def __init__(self, layer_count: int) -> None:
        self.limits = tf.Variable(tf.zeros((layer_count + 1, 2)), trainable=False)

    def measure(self, policy: layers.PolicyLayers, x: FloatArray) -> None:
        measured, _ = calibrate.measure(policy, x, len(x), per_feature=False)
        self.limits.assign([measured.input, *measured.outputs])

    def __getitem__(self, at: int) -> fake_quant.Range:
        return self.limits[at, 0], self.limits[at, 1]


def _simulate(
    stack: layers.PolicyLayers, weights: Sequence[Tensor], x: Tensor, ranges: _Limits, weight_bits: int
) -> Tensor:
    """Runs `forward.run` with int8 numbers: kernels rounded, and every tensor between two operations."""

    def rounding(what: str, at: int, x: Tensor) -> Tensor:
        if what == "kernel":
            return fake_quant.kernel(x, weight_bits, outputs_first=True)
        return fake_quant.activation(x, ranges[at + 1] if what == "linear" else fake_quant.TANH_RANGE)

    return forward.run(stack, weights, fake_quant.activation(x, ranges[0]), rounding)
