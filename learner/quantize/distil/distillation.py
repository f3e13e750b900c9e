"""Trains weights so that their int8 model answers as the fp32 original does; the best int8 model seen is kept.

No rewards and no environment: the original's outputs on calibration observations are the target.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from learner.networks import optimizer
from learner.quantize import compare
from learner.quantize.tflite import interpreter

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types
Outputs = Literal["values", "actions"]
"""`values`: one per action, and the largest decides. `actions`: continuous, and each counts."""

STEPS = 400
_UNRUNNABLE = 1e6
_TINY = float(np.finfo(np.float32).tiny)
_BATCH = 256
_CHECKS = 5  # times that ranges are measured anew, and that the int8 model is made and scored
_LEARNING_RATE = 1e-3  # relative to the size of what is trained: a weight step of int8 is about 0.02 of it
_HELD_OUT = 0.25
_BETTER_BY = 1.0  # standard errors: with so many candidates one is the best by luck


def split(rows: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns shuffled indices of observations: three quarters to learn from, a quarter to choose by."""
    order = np.random.default_rng(seed).permutation(rows)
    held_out = max(1, int(rows * _HELD_OUT))
    return order[held_out:], order[:held_out]


def spread(exact: FloatArray) -> FloatArray:
    """Returns the range of each output of [N, n], the unit of errors; 1 for an output that stands still."""
    ranges = np.ptp(exact, axis=0)
    return np.where(ranges > 0, ranges, 1).astype(np.float32)


def failings(answer: FloatArray, exact: FloatArray, outputs: Outputs) -> FloatArray:
    """Returns how badly int8 outputs [N, n] stand for fp32's, per observation [N]; 0 is perfect.

    For values that is 1 plus the gap between fp32's best two relative to its mean, where the greedy action differs. For
    actions it is the mean error relative to each output's range.
    """
    if outputs == "actions":
        failing: FloatArray = (np.abs(answer - exact) / spread(exact)).mean(1)
        return failing
    best, second = compare.best_two(exact)
    weighted: FloatArray = 1 + (best - second) / max(float(np.mean(best - second)), _TINY)
    return np.where(answer.argmax(1) != exact.argmax(1), weighted, 0)


def judge(model: bytes, observations: NDArray[Any], exact: FloatArray, outputs: Outputs) -> FloatArray:
    """Returns the `failings` [N] of a .tflite beside fp32 outputs [N, n]; large ones if the runtime refuses it."""
    try:
        answer, _, _ = interpreter.run(model, observations)
    except RuntimeError:  # XNNPACK takes no rescaling factor beyond its range, as behind a layer that is nearly dead
        return np.full(len(exact), _UNRUNNABLE, np.float32)
    return failings(answer, exact, outputs)


def loss(answer: Tensor, exact: Tensor, outputs: Outputs, gap: float) -> Tensor:
    """Returns the mean squared error relative to the outputs' variance; for values plus the divergence of decisions.

    Args:
        answer: Simulated int8 outputs [B, n].
        exact: fp32 outputs [B, n].
        outputs: Kind of the outputs. Only differences between values count: what all have in common is removed first.
        gap: Typical difference between the best two values: the temperature at which two choices are compared, as
            Kullback-Leibler divergence of softmax(values / gap).
    """
    if outputs == "actions":
        return tf.reduce_mean(tf.square(answer - exact)) / _variance(exact)
    answer, exact = (x - tf.reduce_mean(x, axis=1, keepdims=True) for x in (answer, exact))
    error = tf.reduce_mean(tf.square(answer - exact)) / _variance(exact)
    chosen = tf.nn.softmax(exact / gap)
    divergence = tf.reduce_sum(chosen * (tf.nn.log_softmax(exact / gap) - tf.nn.log_softmax(answer / gap)), axis=1)
    return error + tf.reduce_mean(divergence)


def train(
    simulate: Callable[[Sequence[Tensor], Tensor], Tensor],
    original: Sequence[FloatArray],
    rewritten: Sequence[FloatArray] | None,
    observations: FloatArray,
    exact: FloatArray,
    *,
    outputs: Outputs,
    steps: int,
    seed: int,
    refresh: Callable[[Sequence[FloatArray]], None],
    judge: Callable[[Sequence[FloatArray]], FloatArray],
) -> Sequence[FloatArray]:
    """Runs Adam with a falling step size; the same arguments give the same weights.

    Args:
        simulate: Maps weights and observations [B, ...] to outputs [B, n] as int8 would; traced once.
        original: Weights that are kept unless others are clearly better; each kernel before its bias.
        rewritten: Other weights for the same function, to train from if they are clearly better.
        observations: [N, ...] in float32.
        exact: fp32 outputs [N, n] for them.
        outputs: Kind of the outputs.
        steps: Gradient steps.
        seed: Determines the order of observations.
        refresh: Sets the ranges that `simulate` uses to those of the weights given.
        judge: The failings [M] of the real int8 model of the weights given, on observations that are not among those
            above.

    Returns:
        The weights of the fewest failings: a list of its own, or `original` itself.
    """
    before = judge(original)
    best, fewest = original, float(before.mean())

    def consider(weights: Sequence[FloatArray]) -> None:
        nonlocal best, fewest
        now = judge(weights)
        clear = _BETTER_BY * float((before - now).std()) / math.sqrt(len(now))
        if now.mean() < min(fewest, before.mean() - clear):
            best, fewest = weights, float(now.mean())

    if rewritten is not None:
        consider(rewritten)

    rng = np.random.default_rng(seed)
    variables = [tf.Variable(array) for array in best]
    moments1, moments2 = ([tf.Variable(tf.zeros_like(v)) for v in variables] for _ in range(2))
    rates = [_LEARNING_RATE * size for size in sizes(best)]
    gap = typical_gap(exact) if outputs == "values" else 1.0
    x_all, exact_all = tf.constant(observations), tf.constant(exact)

    @tf.function(autograph=False)
    def step(rows: Tensor, number: Tensor, pace: Tensor) -> None:
        with tf.GradientTape() as tape:
            value = loss(simulate(variables, tf.gather(x_all, rows)), tf.gather(exact_all, rows), outputs, gap)
        # A weight that the outputs do not depend on has no gradient
        found = tape.gradient(value, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        paces = [pace * rate for rate in rates]
        changed = optimizer.adam(variables, found, moments1, moments2, number, paces)
        for variable, now in zip([*variables, *moments1, *moments2], itertools.chain(*changed), strict=True):
            variable.assign(now)

    period = max(1, steps // _CHECKS)
    for number in range(steps):
        if number % period == 0:
            refresh([v.numpy() for v in variables])
        rows = rng.integers(0, len(observations), _BATCH)
        pace = 0.5 * (1 + math.cos(math.pi * number / steps))
        step(tf.constant(rows), tf.constant(number + 1), tf.constant(pace, tf.float32))
        if (number + 1) % period == 0 or number + 1 == steps:
            consider([v.numpy() for v in variables])
    return best


def _variance(exact: Tensor) -> Tensor:
    return tf.maximum(tf.math.reduce_variance(exact), _TINY)


def typical_gap(exact: FloatArray) -> float:
    """Returns the mean difference between the best two of values [N, n], above 0."""
    best, second = compare.best_two(exact)
    return max(float(np.mean(best - second)), _TINY)


def sizes(arrays: Sequence[FloatArray]) -> list[float]:
    """Returns the scale of each array's steps: its root mean square; for a small bias a tenth of its layer's sums'."""
    sizes: list[float] = []
    norm: float | None = None
    for array in arrays:
        size = float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))
        if array.ndim > 1:
            norm = size * math.sqrt(array.size)
        sums = 1.0 if norm is None else norm / math.sqrt(array.size)
        sizes.append(size if array.ndim > 1 else max(size, 0.1 * sums))
    return sizes
