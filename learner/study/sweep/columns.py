"""Makes each column's model of a policy, for a study."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from broker.contract import errors
from learner.networks import layers
from learner.quantize import bits, ptq
from learner.quantize.distil import aware, dagger, goals
from learner.quantize.tflite import convert
from learner.study import play
from learner.study.sweep import plan
from learner.study.user_models import distilled, recipe, subject


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """What a model may be made with.

    Attributes:
        calibration: Observations [N, *shape] of fp32's own episodes.
        task: Where more of them come from.
        steps: Of quantization-aware training.
        rounds: Of distillation.
        seed: Of both.
    """

    calibration: NDArray[Any]
    task: play.Task
    steps: int
    rounds: int
    seed: int


Maker = Callable[[subject.Subject, Means], bytes]
"""Makes a .tflite of a policy.

Raises of all:
    PolicyError: Of such a policy it makes none.
"""


def make(column: str, policy: subject.Subject, means: Means) -> bytes:
    """Makes the model of a column. Raises as a `Maker`."""
    if (found := plan.bits_of(column)) is not None:
        return _bits(policy, means, *found)
    return MAKERS[column](policy, means)


def _fp16(policy: subject.Subject, means: Means) -> bytes:
    return policy.make(means.calibration, "float16", beyond=ptq.BEYOND).model


def _weights(policy: subject.Subject, means: Means) -> bytes:
    """Rounds each layer's weights by one scale, and computes in float32, as QuaRL does."""
    rounded = bits.rounded_by_layer(_layers(policy), bits.BITS_MAX)
    return convert.convert(rounded, means.calibration, "float32", per_feature=False)


def _plain(policy: subject.Subject, means: Means) -> bytes:
    """Quantizes as TFLiteConverter does with nothing of ours: one range for the whole input."""
    if not isinstance(policy, recipe.ChainSubject):
        return policy.make(means.calibration, "int8", beyond=0.0).model
    return convert.convert(policy.policy.layers, means.calibration, "int8", per_feature=False)


def _recipe(policy: subject.Subject, means: Means) -> bytes:
    """Quantizes as the learner's own policies are published."""
    return _chain(policy).make(means.calibration, "int8").model


def _refined(policy: subject.Subject, means: Means) -> bytes:
    made = _chain(policy).make_refined(means.calibration)
    if made is None:
        raise errors.PolicyError("no hidden layer of it can be refined", reason="model")
    return made.model


def _aware(policy: subject.Subject, means: Means) -> bytes:
    return policy.make_aware(means.calibration, means.steps, means.seed).model


def _distilled(policy: subject.Subject, means: Means) -> bytes:
    """Trains a student of the same shape, which plays between rounds; so many rounds, whatever they come to."""
    with tempfile.TemporaryDirectory(prefix="actorq-") as scratch:

        def explore(model: bytes, number: int) -> NDArray[Any]:
            return distilled.explored(model, number, policy, means.task, Path(scratch), means.seed)[1]

        student = dagger.distil(
            distilled.teacher(policy),
            means.calibration,
            goals.Goal(),
            seed=means.seed,
            budget_s=math.inf,
            rounds=means.rounds,
            explore=explore,
        )
    return student.model


MAKERS: dict[str, Maker] = {
    "fp16": _fp16,
    "int8-weights": _weights,
    "int8-plain": _plain,
    "int8-recipe": _recipe,
    "int8-refined": _refined,
    "int8-aware": _aware,
    "int8-distilled": _distilled,
}
"""Functions by name of `plan.PRECISIONS`."""


def _bits(policy: subject.Subject, means: Means, weight_bits: int, is_aware: bool) -> bytes:
    """Weights of few bits in an int8 graph; both ways are converted alike, so that they differ in training alone."""
    found = _layers(policy)
    if is_aware:
        found = aware.distil(
            found,
            means.calibration,
            steps=means.steps,
            seed=means.seed,
            outputs=policy.outputs,
            weight_bits=weight_bits,
        )
    return convert.convert(found, means.calibration, "int8", weight_bits=weight_bits)


def _layers(policy: subject.Subject) -> layers.PolicyLayers:
    return _chain(policy).policy.layers


def _chain(policy: subject.Subject) -> recipe.ChainSubject:
    if not isinstance(policy, recipe.ChainSubject):
        raise errors.PolicyError("it is no chain of dense layers and convolutions", reason="model")
    return policy
