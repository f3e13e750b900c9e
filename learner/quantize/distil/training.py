"""Trains a student's weights in simulated int8 (`simulation`) against a teacher's answers, one round at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import errors
from learner.networks import layers, optimizer
from learner.quantize import input_scaling
from learner.quantize.distil import compression, distillation, goals, simulation, students

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types

_BATCH = 256
_STEPS, _STEPS_FRESH = 2000, 5000
"""Gradient steps of a round; of the first one of a student that begins with random weights."""
_REFRESHES = 12
"""Times in a round that ranges are measured anew, as they move with the weights."""
_RATE, _RATE_FREE = 1e-3, 1e-2
"""Step sizes relative to the size of what is trained; the large one where weights have far to go."""
_RATE_LATER = 0.7
"""What each round leaves of the step size."""
_HURRY_S = 5.0
"""Seconds that are left, below which step sizes fall with them."""
_FLOAT_SHARE = 0.3
"""Share of the first steps of a student with random weights that nothing is rounded in."""


class Seen(NamedTuple):
    """Observations [N, *shape], the teacher's outputs [N, n] for them, and those by which the student is calibrated."""

    rows: NDArray[Any]
    exact: FloatArray
    sample: NDArray[Any]


def run(
    teacher: goals.Teacher,
    goal: goals.Goal,
    policy: layers.PolicyLayers,
    seen: Seen,
    number: int,
    rng: np.random.Generator,
    end: float,
) -> tuple[layers.PolicyLayers, int]:
    """Runs a round of Adam with a falling step size.

    Args:
        teacher: What the student is to do.
        goal: What it is to be.
        policy: Its weights so far, not pruned or rounded for good.
        seen: What to learn from.
        number: Of the round, from 0.
        rng: Draws batches.
        end: Time (monotonic, s) at which to end.

    Returns:
        The trained weights, in the same form, and the number of steps.

    Raises:
        PolicyError: They are not finite.
    """
    is_fresh = number == 0 and goal.hidden is not None
    steps = _STEPS_FRESH if is_fresh else _STEPS
    float_steps = int(_FLOAT_SHARE * steps) if is_fresh else 0
    affine = students.calibrator(teacher, goal, trained=True).calibrate(policy, seen.sample).params.affine
    flat = dataclasses.replace(affine, hi_lo=False) if affine else None
    scaled = input_scaling.compensate(policy, flat) if flat else policy
    learner = _Learner(teacher, goal, scaled, affine, seen.exact, _RATE_FREE if goal.is_free else _RATE)

    def refresh(done: float) -> None:
        """Measures anew; in the first round the share that is pruned grows (Zhu and Gupta 2017)."""
        share = goal.compressed.prune * (1 - (1 - min(1.0, 2 * done)) ** 3 if number == 0 else 1)
        learner.prune(share)
        now = dataclasses.replace(goal, compressed=dataclasses.replace(goal.compressed, prune=share))
        unscaled = learner.policy(scaled)
        unscaled = layers.absorb(unscaled, flat.gain, flat.offset) if flat else unscaled
        learner.simulated.refresh(students.fitted(teacher, unscaled, seen.sample, now)[1])

    target, taken = teacher.target(seen.exact), 0
    while taken < steps and (left_s := end - time.monotonic()) > 0:
        rounds = taken >= float_steps
        if rounds and (taken - float_steps) % (steps // _REFRESHES) == 0:
            refresh(taken / steps)
        picked = rng.integers(0, len(seen.rows), _BATCH)
        x = simulation.inputs(affine if rounds else flat, seen.rows[picked])
        pace = 0.5 * (1 + math.cos(math.pi * taken / steps)) * _RATE_LATER**number * min(1.0, left_s / _HURRY_S)
        taken += 1
        learner.step(x, target[picked], taken, pace, rounds=rounds)
    learner.prune(goal.compressed.prune)
    trained = learner.policy(scaled)
    if not layers.finite(trained):
        raise errors.PolicyError(
            "the student's weights became NaN or infinite",
            reason="not_finite",
            todo="look for observations of very large size in calibration, and leave those out",
        )
    return (layers.absorb(trained, flat.gain, flat.offset) if flat else trained), taken


class _Learner:
    """Weights in training, for scaled inputs, with their optimizer."""

    def __init__(
        self,
        teacher: goals.Teacher,
        goal: goals.Goal,
        scaled: layers.PolicyLayers,
        affine: input_scaling.Affine | None,
        exact: FloatArray,
        rate: float,
    ) -> None:
        self.simulated = simulation.Simulation(scaled, goal.compressed, affine, passes=teacher.outputs == "actions")
        start = list(layers.arrays(scaled).values())
        self._variables = [tf.Variable(array) for array in start]
        self._moments1, self._moments2 = ([tf.Variable(tf.zeros_like(v)) for v in self._variables] for _ in range(2))
        self._rates = [rate * size for size in distillation.sizes(start)]
        self._teacher = teacher
        self._gap = distillation.typical_gap(exact) if teacher.outputs == "values" else 1.0
        unit = distillation.spread(exact)
        self._unit = tf.constant(unit if teacher.outputs == "actions" and teacher.rescale is None else unit * 0 + 1)
        self._step = tf.function(self._traced, autograph=False)

    def policy(self, like: layers.PolicyLayers) -> layers.PolicyLayers:
        """Returns the weights as they are now."""
        return layers.with_arrays(like, [v.numpy() for v in self._variables])

    def prune(self, share: float) -> None:
        """Makes the smallest weights of each output 0, and keeps them there."""
        for kernel, mask in zip(self._variables[::2], self.simulated.masks, strict=True):
            mask.assign(compression.mask(kernel.numpy(), share).astype(np.float32))
            kernel.assign(kernel * mask)

    def step(self, x: FloatArray, target: FloatArray, number: int, pace: float, *, rounds: bool) -> None:
        """Takes one step towards targets [B, n] at inputs [B, ...]."""
        numbers = tf.constant(number), tf.constant(pace, tf.float32)
        self._step(tf.constant(x), tf.constant(target), *numbers, rounds=rounds)

    def _traced(self, x: Tensor, target: Tensor, number: Tensor, pace: Tensor, rounds: bool) -> None:
        with tf.GradientTape() as tape:
            answer = self.simulated.run(self._variables, x, rounds=rounds) / self._unit
            if self._teacher.clips:  # what is beyond the bounds is at them; its gradient passes all the same
                answer = answer + tf.stop_gradient(tf.clip_by_value(answer, -1, 1) - answer)
            loss = distillation.loss(answer, target, self._teacher.outputs, self._gap)
        # A weight that the outputs do not depend on has no gradient
        found = tape.gradient(loss, self._variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        paces = [pace * rate for rate in self._rates]
        changed, *moments = optimizer.adam(self._variables, found, self._moments1, self._moments2, number, paces)
        for at, mask in enumerate(self.simulated.masks):
            changed[2 * at] = changed[2 * at] * mask
        for variable, now in zip(
            [*self._variables, *self._moments1, *self._moments2], itertools.chain(changed, *moments), strict=True
        ):
            variable.assign(now)
