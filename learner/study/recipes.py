"""Ways to make a .tflite of a trained network: what ships, each of its measures alone, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import layers
from learner.quantize import calibrate, ptq
from learner.quantize.distil import aware, distillation
from learner.quantize.tflite import convert, quantizer
from learner.study import trained


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row of the fidelity table.

    Attributes:
        name: As the table shows it; `+` is on top of the row before, `only` on top of plain int8.
        precision: One of config.PRECISIONS.
        advantages: Subtract the mean over actions in the last layer.
        dueling: Leave the value stream out, and with it its half of the last hidden layer.
        per_feature: Give each feature of the input a range of its own.
        steps: Steps of `ptq`.
        hysteresis: Make scales as wide as publishing makes those that it is going to keep (`ptq`).
        method: How ranges are calibrated where no step is applied.
        aware: Distil with quantization in the loop.
    """

    name: str
    precision: str = "int8"
    advantages: bool = False
    dueling: bool = False
    per_feature: bool = False
    steps: Sequence[ptq.Step] = ()
    hysteresis: bool = False
    method: calibrate.Method = "minmax"
    aware: bool = False


_PLAIN = Recipe("plain int8")
_ADVANTAGES = replace(_PLAIN, name="+ advantages", advantages=True)
_DUELING = replace(_ADVANTAGES, name="+ dueling export", dueling=True)
_PER_FEATURE = replace(_DUELING, name="+ per-feature input", per_feature=True)
REFERENCE = replace(_PER_FEATURE, name="fp32", precision="float32")
SHIPPED = replace(_PER_FEATURE, name="all together (ships)", steps=ptq.STEPS, hysteresis=True)
"""The recipe of published policies."""
CHOICES = (
    REFERENCE,
    _PLAIN,
    _ADVANTAGES,
    _DUELING,
    _PER_FEATURE,
    replace(_PER_FEATURE, name="+ levelled outputs", steps=ptq.STEPS[:1]),
    replace(_PER_FEATURE, name="+ split input", steps=ptq.STEPS[:2]),
    replace(_PER_FEATURE, name="+ equalised channels", steps=ptq.STEPS[:3]),
    SHIPPED,
    replace(SHIPPED, name="all and aware", aware=True),
    replace(_PLAIN, name="only dueling export", dueling=True),
    replace(_PLAIN, name="only per-feature input", per_feature=True),
    replace(_PLAIN, name="only levelled outputs", steps=("centred_outputs",)),
    replace(_PLAIN, name="only equalised channels", steps=("cross_layer_equalization",)),
    replace(_PLAIN, name="only corrected biases", steps=("bias_correction",)),
    replace(_PER_FEATURE, name="aware", aware=True),
    replace(_PER_FEATURE, name="percentile ranges", method="percentile"),
    replace(_PER_FEATURE, name="least-squares ranges", method="mse"),
    replace(_PER_FEATURE, name="dynamic", precision="dynamic"),
    replace(_PER_FEATURE, name="float16", precision="float16"),
)
"""Recipes for policies whose largest output is the choice. From `aware` on, compare rows with `+ per-feature
input`."""

_SCALED = replace(_PLAIN, name="+ per-feature input", per_feature=True)
_SHIPPED_ACTIONS = replace(_SCALED, name=SHIPPED.name, steps=ptq.ACTION_STEPS)
ACTIONS = (
    replace(_SCALED, name=REFERENCE.name, precision="float32"),
    _PLAIN,
    _SCALED,
    replace(_SCALED, name="+ bounded tanh", steps=ptq.ACTION_STEPS[:1]),
    replace(_SCALED, name="+ split input", steps=ptq.ACTION_STEPS[:2]),
    replace(_SCALED, name="+ equalised channels", steps=ptq.ACTION_STEPS[:3]),
    _SHIPPED_ACTIONS,
    replace(_SHIPPED_ACTIONS, name="all and aware", aware=True),
    replace(_PLAIN, name="only bounded tanh", steps=("clipped_tanh_input",)),
    replace(_SCALED, name="only per feature, split", steps=("hi_lo_input",)),
    replace(_PLAIN, name="only equalised channels", steps=("cross_layer_equalization",)),
    replace(_PLAIN, name="only corrected biases", steps=("bias_correction",)),
    replace(_SCALED, name="percentile ranges", method="percentile"),
    replace(_SCALED, name="least-squares ranges", method="mse"),
    replace(_SCALED, name="dynamic", precision="dynamic"),
    replace(_SCALED, name="float16", precision="float16"),
)
"""Recipes for policies whose outputs are the action. From `percentile ranges` on, compare rows with `+ per-feature
input`."""


_CLIPPED: dict[ptq.Step, ptq.Step] = {"clipped_tanh_input": "clipped_outputs"}
SQUASHED = tuple(
    replace(recipe, steps=tuple(_CLIPPED.get(step, step) for step in recipe.steps))
    for recipe in ACTIONS
    if not recipe.aware
)
"""The recipe for outputs that are a distribution before a tanh, which is the actor's. Nothing distils these."""


def sampled(head: specs.Head) -> tuple[Recipe, ...]:
    """Returns the rows for policies that sample: nothing but the input and the channels has a measure of its own."""
    steps = ptq.STEPS_BY_HEAD[head]
    ships = replace(_SCALED, name=SHIPPED.name, steps=steps, hysteresis=head in ptq.HYSTERESIS_HEADS)
    return (
        replace(_SCALED, name=REFERENCE.name, precision="float32"),
        _PLAIN,
        _SCALED,
        replace(_SCALED, name="+ split input", steps=steps[:1]),
        replace(_SCALED, name="+ equalised channels", steps=steps[:2]),
        ships,
        replace(_SCALED, name="percentile ranges", method="percentile"),
        replace(_SCALED, name="least-squares ranges", method="mse"),
        replace(_SCALED, name="dynamic", precision="dynamic"),
        replace(_SCALED, name="float16", precision="float16"),
    )


def of(run: trained.Trained) -> tuple[Recipe, ...]:
    """Returns the rows that make sense for a run; fp32 comes first."""
    if run.head == "squashed_gaussian":
        return SQUASHED
    if run.head in specs.SAMPLED_HEADS:
        return sampled(run.head)
    if run.action.kind == "continuous":
        return ACTIONS
    return tuple(recipe for recipe in CHOICES if run.dueling or "dueling" not in recipe.name)


def make(recipe: Recipe, run: trained.Trained, calibration: NDArray[Any]) -> bytes:
    """Returns the model that a recipe makes of a run's network.

    Args:
        recipe: What to do.
        run: The network.
        calibration: Observations [N, *shape] that set the ranges.
    """
    policy = _layers(recipe, run)
    if recipe.aware:
        outputs: distillation.Outputs = "values" if run.action.kind == "discrete" else "actions"
        policy = aware.distil(policy, calibration, outputs=outputs)
    if recipe.precision != "int8":
        return convert.convert(policy, calibration, recipe.precision, per_feature=recipe.per_feature)
    rows = len(calibration)
    if recipe.steps:
        calibrator = ptq.Calibrator(recipe.steps, hysteresis=recipe.hysteresis)
        policy, params, _ = calibrator.prepare(policy, calibration, rows, per_feature=recipe.per_feature)
    else:
        params, _ = calibrate.measure(policy, calibration, rows, method=recipe.method, per_feature=recipe.per_feature)
    return quantizer.Quantizer().quantize(policy, params, calibration)


def _layers(recipe: Recipe, run: trained.Trained) -> layers.PolicyLayers:
    policy = run.needed if recipe.dueling else run.whole
    if not recipe.advantages:
        return policy
    last = policy[-1]
    assert isinstance(last, layers.Dense)
    return (*policy[:-1], layers.centred(last))
