"""A student: a policy of a chosen size, what weights are left to it, and the int8 model that the recipe makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import layers
from learner.quantize import calibrate, fp32, input_scaling, ptq
from learner.quantize.distil import compression, goals
from learner.quantize.tflite import quantizer

Ended = Literal["accepted", "converged", "rounds", "budget"]
FIT_ROWS = 8192
"""Observations by which a student is calibrated, at most: the same while it is trained as when it ships, so that its
weights stay on their grid."""


@dataclass(frozen=True, slots=True, eq=False)
class Student:
    """A policy that was distilled, or compressed.

    Attributes:
        layers: For raw observations.
        params: What its int8 model is fitted to.
        model: The .tflite.
        failing: Mean of `Teacher.failings` on observations that it has not learned from; NaN where none were held back.
        rounds, steps: Rounds and gradient steps of training.
        rows: Observations that it learned from.
        ended: Why training ended.
    """

    layers: layers.PolicyLayers
    params: calibrate.QuantParams
    model: bytes
    failing: float = math.nan
    rounds: int = 0
    steps: int = 0
    rows: int = 0
    ended: Ended = "accepted"


def plain(teacher: goals.Teacher, rows: NDArray[Any], goal: goals.Goal) -> Student:
    """Compresses a teacher's layers without training: the weights as they are, biases corrected for what goes."""
    assert teacher.own is not None
    sample = spaced(rows, FIT_ROWS)
    calibration = calibrator(teacher, goal, trained=False).calibrate(teacher.own, sample)
    policy, params = calibration.centred(teacher.own), calibration.params
    policy = compression.compress(policy, goal.compressed, params.affine, params.means)
    policy, params = fitted(teacher, policy, sample, goal)  # what is rounded already stays
    return Student(policy, params, quantizer.Quantizer().quantize(policy, params, sample))


def spaced(rows: NDArray[Any], most: int) -> NDArray[Any]:
    """Returns every k-th row, so that there are at most so many."""
    return rows[:: max(1, -(-len(rows) // most))]


def calibrator(teacher: goals.Teacher, goal: goals.Goal, *, trained: bool) -> ptq.Calibrator:
    """Returns what finds the ranges of such a policy, as `recipe` does; a student has learned some steps' part itself.

    Factors between channels would take weights off the grid of few bits: those are left out then, too.
    """
    steps = ptq.STEPS if teacher.outputs == "values" else ptq.SQUASHED_STEPS if teacher.clips else ptq.ACTION_STEPS
    left_out: set[ptq.Step] = {"centred_outputs", "bias_correction"} if trained else set()
    if goal.compressed.weight_bits < compression.Compression().weight_bits:
        left_out.add("cross_layer_equalization")
    kept = [step for step in steps if step not in left_out]
    return ptq.Calibrator(kept, beyond=goal.beyond, output_end=1.0 if teacher.clips else specs.SQUASHED_MEAN_MAX)


def fitted(
    teacher: goals.Teacher, policy: layers.PolicyLayers, rows: NDArray[Any], goal: goals.Goal
) -> tuple[layers.PolicyLayers, calibrate.QuantParams]:
    """Returns a student with what weights are left to it, and what its int8 model is to be fitted to."""
    found = calibrator(teacher, goal, trained=True)
    params = found.calibrate(policy, rows).params
    if not goal.compressed.is_none:
        policy = compression.compress(policy, goal.compressed, params.affine)
        params = found.calibrate(policy, rows).params
    if teacher.outputs == "values":
        span = ptq.decisive_range(fp32.outputs(policy, rows))
        params = dataclasses.replace(params, outputs=(*params.outputs[:-1], span))
    return policy, params


def first(
    teacher: goals.Teacher, goal: goals.Goal, rows: NDArray[Any], rng: np.random.Generator
) -> layers.PolicyLayers:
    """Returns the weights to begin with: the teacher's own, or random ones for inputs of like size."""
    if goal.hidden is None:
        assert teacher.own is not None
        return calibrator(teacher, goal, trained=False).calibrate(teacher.own, rows).centred(teacher.own)
    sizes = [math.prod(teacher.shape), *goal.hidden, teacher.size]
    found: list[layers.Layer] = [layers.Flatten()] if len(teacher.shape) > 1 else []
    for n, (width, following) in enumerate(itertools.pairwise(sizes)):
        is_last = n == len(goal.hidden)
        kernel = rng.normal(0, math.sqrt((1 if is_last else 2) / width), (following, width))
        bias = rng.normal(0, 0 if is_last else 0.1, following)
        activation: layers.Activation = teacher.last if is_last else "relu"
        found.append(layers.Dense(kernel.astype(np.float32), bias.astype(np.float32), activation))
    if teacher.rescale is not None:
        found.append(teacher.rescale)
    affine = input_scaling.from_ranges(rows)
    return layers.absorb(tuple(found), affine.gain, affine.offset)
