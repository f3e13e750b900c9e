"""Ways to make a .tflite of a trained network: what ships, each of its measures alone, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from learner import layers, trained
from learner.quantize import aware, calibrate, convert, quantizer, refine


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row of the fidelity table.

    Attributes:
        name: As the table shows it; `+` is on top of the row before, `only` on top of plain int8.
        precision: One of config.PRECISIONS.
        advantages: Subtract the mean over actions in the last layer.
        dueling: Leave the value stream out, and with it its half of the last hidden layer.
        per_feature: Give each feature of the input a range of its own.
        steps: Of `refine`.
        steady: Make scales as wide as publishing makes those that it is going to keep (`refine`).
        method: How ranges are calibrated where nothing is refined.
        aware: Distil with quantization in the loop.
    """

    name: str
    precision: str = "int8"
    advantages: bool = False
    dueling: bool = False
    per_feature: bool = False
    steps: Sequence[refine.Step] = ()
    steady: bool = False
    method: calibrate.Method = "minmax"
    aware: bool = False


_PLAIN = Recipe("plain int8")
_ADVANTAGES = replace(_PLAIN, name="+ advantages", advantages=True)
_DUELING = replace(_ADVANTAGES, name="+ dueling export", dueling=True)
_PER_FEATURE = replace(_DUELING, name="+ per-feature input", per_feature=True)
REFERENCE = replace(_PER_FEATURE, name="fp32", precision="float32")
SHIPPED = replace(_PER_FEATURE, name="all together (ships)", steps=refine.STEPS, steady=True)
"""What `publish` does."""
RECIPES = (
    REFERENCE,
    _PLAIN,
    _ADVANTAGES,
    _DUELING,
    _PER_FEATURE,
    replace(_PER_FEATURE, name="+ levelled outputs", steps=refine.STEPS[:1]),
    replace(_PER_FEATURE, name="+ equalised channels", steps=refine.STEPS[:2]),
    SHIPPED,
    replace(SHIPPED, name="all and aware", aware=True),
    replace(_PLAIN, name="only dueling export", dueling=True),
    replace(_PLAIN, name="only per-feature input", per_feature=True),
    replace(_PLAIN, name="only levelled outputs", steps=("level",)),
    replace(_PLAIN, name="only equalised channels", steps=("equalise",)),
    replace(_PLAIN, name="only corrected biases", steps=("correct",)),
    replace(_PER_FEATURE, name="aware", aware=True),
    replace(_PER_FEATURE, name="percentile ranges", method="percentile"),
    replace(_PER_FEATURE, name="least-squares ranges", method="mse"),
    replace(_PER_FEATURE, name="dynamic", precision="dynamic"),
    replace(_PER_FEATURE, name="float16", precision="float16"),
)
"""From `aware` on, rows are to be compared with `+ per-feature input`."""


def make(recipe: Recipe, run: trained.Trained, calibration: NDArray[Any]) -> bytes:
    """The model that a recipe makes of a run's network.

    Args:
        recipe: What to do.
        run: The network.
        calibration: Observations [N, *shape] that set the ranges.
    """
    policy = _layers(recipe, run)
    if recipe.aware:
        policy = aware.distil(policy, calibration)
    if recipe.precision != "int8":
        return convert.convert(policy, calibration, recipe.precision, per_feature=recipe.per_feature)
    rows = len(calibration)
    if recipe.steps:
        refiner = refine.Refiner(recipe.steps, steady=recipe.steady)
        policy, ranges, _ = refiner.measure(policy, calibration, rows, per_feature=recipe.per_feature)
    else:
        ranges, _ = calibrate.measure(policy, calibration, rows, method=recipe.method, per_feature=recipe.per_feature)
    return quantizer.Quantizer().quantize(policy, ranges, calibration)


def _layers(recipe: Recipe, run: trained.Trained) -> layers.PolicyLayers:
    export = run.network.advantage_layers if recipe.dueling else run.network.q_layers
    policy = export(run.weights, run.normalizer)
    last = policy[-1]
    assert isinstance(last, layers.Dense)
    return (*policy[:-1], layers.centred(last)) if recipe.advantages else policy
