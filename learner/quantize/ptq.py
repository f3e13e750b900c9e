"""Rewrites a policy so that eight bits hold it better, and chooses as before.

One fp32 pass over the calibration observations shows how large each channel is. Then:

* `levelled`: only differences between outputs choose an action, so whatever all outputs have in common is taken out of
  the last layer: the linear function of its inputs that comes closest to the middle of the best two outputs. What
  remains is near 0 where it matters, and the range of the int8 output shrinks with it: to a tenth on LunarLander.
* `exponents`: an int8 tensor has one scale, so a channel that reaches 1 beside one that reaches 100 keeps two levels.
  ReLU and linear layers let a factor pass from a layer's output to the next layer's kernel (Nagel et al. 2019,
  https://arxiv.org/abs/1906.04721; the factor is that of Xiao et al. 2023, https://arxiv.org/abs/2211.10438).
* `correct`: behind ReLUs the mean input is far from 0, and so is its product with the rounding errors of the weights.
  The bias takes that back (Nagel et al. 2019, section 4.2).
* `decisive_range`: outputs beyond every close call may saturate.
* `bound`: so may what goes into the last tanh, where tanh has reached an end of int8. A trained policy drives it to 30
  and more, and 256 steps over that are too coarse in the middle, where the action is decided.
* `split`: each feature of the observation is two int8 numbers (`fold`), and may go beyond what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import layers
from learner.quantize import exact, input_scaling, requantize

FloatArray = NDArray[np.float32]
Step = Literal["level", "bound", "split", "equalise", "correct"]
STEPS: tuple[Step, ...] = ("level", "split", "equalise", "correct")
"""Of policies whose largest output is the choice."""
ACTION_STEPS: tuple[Step, ...] = ("bound", "split", "equalise", "correct")
"""Of policies whose outputs are the action."""
STEPS_BY_HEAD: dict[specs.Head, tuple[Step, ...]] = {
    "q_values": STEPS,
    "categorical": STEPS[1:],
    "deterministic": ACTION_STEPS,
    "gaussian": STEPS[1:],
}

STEADY_HEADS: tuple[specs.Head, ...] = ("q_values", "categorical")
"""Whose scales are kept for the sake of small differences. A choice hardly feels it; an action's error grows by a third
to a half (two LunarLanderContinuous runs)."""

_TANH_END = math.atanh(127.5 / 128)
"""From here on tanh in int8, whose scale is 1/128, has only its last level."""
_ACTIVATIONS = 0.75
"""Share of a channel's factor that goes by its activations; the rest goes by its weights, which have more scales."""
_FLOOR = 0.1
"""Channels and weights smaller than this beside the largest count as that large: they may yet grow."""
_OUTPUTS = 256
"""Of a wide layer, this many outputs show how large the weights behind a channel are."""
_RIDGE = 0.01
"""Of the mean square of the inputs: keeps small what is taken out of the last layer."""
_STEPS = 16
"""Of conjugate gradients. Any result leaves the choices alone, so it need not be exact."""
_HEADROOM = 1.5
"""Other observations have wider close calls than the sample."""
_BEYOND = 0.125
"""Share of its range that a split feature may go beyond at either end, unclipped: it has levels to spare."""
_CLEAR = 50.0
"""Percentile of the gaps between the best two; beyond such a gap an output is clear, and may saturate."""


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """What a tensor's channels [c] (features behind a dense layer) were seen to hold."""

    low: FloatArray
    high: FloatArray
    mean: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What makes eight bits hold a policy, and those that training makes of it next.

    Attributes:
        ranges: What to fit the int8 model to.
        common: Weights [features] to subtract from each row of the last kernel; None where outputs stay what they are.
        level: To subtract from each of its biases.
    """

    ranges: requantize.Ranges
    common: FloatArray | None
    level: float

    def levelled(self, policy: layers.PolicyLayers) -> layers.PolicyLayers:
        """The policy without what its outputs have in common: it chooses as before."""
        return policy if self.common is None else _without(policy, self.common, self.level)


class Refiner:
    """Refines one policy after another.

    It keeps each channel's factor until the best one is more than twice as large or small: with factors that came and
    went with the calibration sample, the int8 weights would change more from one publish to the next than training
    changes them, and what is sent of a policy would double.

    Args:
        steps: Which to take. `level`, with `decisive_range`, only where nothing but the largest output counts, as with
            action values; without it, or where the last layer is not linear, outputs stay what they are.
        steady: Whether ranges and scales are kept like the factors, as long as they are at most a quarter too wide.
    """

    def __init__(self, steps: Collection[Step] = STEPS, *, steady: bool = False) -> None:
        self._steps = steps
        self._steady = steady
        self._exponents: list[FloatArray] = []
        self._spans: list[requantize.Range] = []
        self._ends: tuple[NDArray[Any], NDArray[Any]] | None = None

    def measure(
        self, policy: layers.PolicyLayers, observations: NDArray[Any], rows: int, *, per_feature: bool = True
    ) -> tuple[layers.PolicyLayers, requantize.Ranges, FloatArray]:
        """Makes a policy fit for int8. In the place of `calibrate.measure`.

        Args:
            policy: Layers for raw observations.
            observations: Sample [N, *shape] in any dtype.
            rows: The first so many observations decide everything.
            per_feature: Whether each input feature gets a range of its own; never in front of a convolution.

        Returns:
            The policy with levelled outputs, what to fit its int8 model to, and fp32 outputs [N, n] that int8 is to
            come close to. All three are NaN or infinite where the policy is: `requantize` refuses them.
        """
        fit = self.fit(policy, observations[:rows], per_feature=per_feature)
        policy = fit.levelled(policy)
        return policy, fit.ranges, exact.outputs(policy, observations)

    def fit(self, policy: layers.PolicyLayers, observations: NDArray[Any], *, per_feature: bool = True) -> Fit:
        """What eight bits need to hold this policy, or one that training soon makes of it.

        Args:
            policy: Layers for raw observations.
            observations: Sample [N, *shape] in any dtype that decides everything.
            per_feature: As in `measure`.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return self._fit(policy, observations, per_feature)

    def _fit(self, policy: layers.PolicyLayers, observations: NDArray[Any], per_feature: bool) -> Fit:
        first = layers.weighted(policy)[0]
        affine = self._affine(observations) if per_feature and isinstance(first, layers.Dense) else None
        channels, inputs, found = _pass(policy, observations, affine)
        last, common, level = policy[-1], None, 0.0
        if "level" in self._steps and isinstance(last, layers.Dense) and last.activation == "none":
            common, level = _shared(inputs, found)
            policy = _without(policy, common, level)
            found = exact.linear_outputs(layers.weighted(policy)[-1], inputs)
            channels[-1] = _channels(found)
        factors = None
        if "equalise" in self._steps:
            self._exponents = exponents(policy, channels, self._exponents)
            factors = tuple(np.exp2(exponent) for exponent in self._exponents)
        means = _means(policy, channels) if "correct" in self._steps else None
        spans = [_range(channels[0], None), *(_range(*both) for both in zip_longest(channels[1:], factors or ()))]
        if affine:
            spans[0] = input_scaling.ENDS
        if common is not None:
            spans[-1] = decisive_range(found)
        if "bound" in self._steps and layers.weighted(policy)[-1].activation == "tanh":
            spans[-1] = max(spans[-1][0], -_TANH_END), min(spans[-1][1], _TANH_END)
        if self._steady:
            spans[1:] = self._spans = [_held(span, kept) for span, kept in zip_longest(spans[1:], self._spans)]
        ranges = requantize.Ranges(spans[0], tuple(spans[1:]), affine, factors, means, self._steady)
        return Fit(ranges, common, level)

    def _affine(self, observations: NDArray[Any]) -> input_scaling.Affine:
        """Of all that was seen, where that is not too wide for what is seen now."""
        low, high = observations.min(0).astype(np.float64), observations.max(0).astype(np.float64)
        if self._ends is not None:
            widest = np.minimum(low, self._ends[0]), np.maximum(high, self._ends[1])
            fits = widest[1] - widest[0] <= requantize.SLACK * (high - low)
            low, high = np.where(fits, widest[0], low), np.where(fits, widest[1], high)
        self._ends = low, high
        split = "split" in self._steps
        beyond = _BEYOND * (high - low) if split else np.zeros_like(low)
        return input_scaling.from_ends(low - beyond, high + beyond, split=split)


def _held(span: requantize.Range, kept: requantize.Range | None) -> requantize.Range:
    """The range kept from an earlier policy where it serves for `span`; else that with some headroom."""
    low, high = min(span[0], 0.0), max(span[1], 0.0)  # as `requantize` widens it
    if kept and kept[0] <= low and high <= kept[1] and kept[1] - kept[0] <= requantize.SLACK * (high - low):
        return kept
    width = high - low
    scale = requantize.roomy(np.array([width / 255], np.float32))
    grown = float(scale[0]) * 255 / width if width else 1.0
    return grown * low, grown * high


def _range(channels: Channels, factor: FloatArray | None) -> requantize.Range:
    """Of all channels, each divided by its factor."""
    low, high = (channels.low, channels.high) if factor is None else (channels.low / factor, channels.high / factor)
    return float(low.min()), float(high.max())


def _means(policy: layers.PolicyLayers, channels: Sequence[Channels]) -> tuple[FloatArray, ...]:
    """Mean input of each layer with weights, one per weight of an output."""
    # A convolution meets each channel at every place of its kernel; so does a dense layer behind one
    inputs = [layer.kernel[0].size for layer in layers.weighted(policy)]
    repeats = (max(1, n // seen.mean.size) for n, seen in zip(inputs, channels, strict=False))  # a split input has more
    return tuple(np.tile(seen.mean, n) for n, seen in zip(repeats, channels, strict=False))


def _pass(
    policy: layers.PolicyLayers, observations: NDArray[Any], affine: input_scaling.Affine | None
) -> tuple[list[Channels], FloatArray, FloatArray]:
    """Channels of the input and of each layer with weights (before tanh, but for the mean); last inputs; outputs."""
    scaled = affine.apply(observations).reshape(len(observations), -1) if affine else observations.astype(np.float32)
    channels = [_channels(scaled)]
    last_inputs = scaled

    def see(layer: layers.Weighted, inputs: FloatArray, linear: FloatArray, outputs: FloatArray) -> None:
        nonlocal last_inputs
        last_inputs, seen = inputs, _channels(linear)
        if outputs is not linear:
            seen = replace(seen, mean=outputs.reshape(-1, outputs.shape[-1]).mean(0))
        channels.append(seen)

    found = exact.outputs(policy, observations, see)
    return channels, last_inputs, found


def levelled(policy: layers.PolicyLayers, inputs: FloatArray, outputs: FloatArray) -> layers.PolicyLayers:
    """Subtracts the same linear function of the last layer's inputs from all outputs; each choice stays.

    Args:
        policy: Layers, the last of them dense and linear.
        inputs: Of its last layer [N, features].
        outputs: Of the policy [N, n].
    """
    return _without(policy, *_shared(inputs, outputs))


def _shared(inputs: FloatArray, outputs: FloatArray) -> tuple[FloatArray, float]:
    """Weights [features] and bias that outputs [N, n] have in common, by the last layer's inputs [N, features]."""
    middle = np.partition(outputs, -2, axis=1)[:, -2:].mean(1)
    level, mean = middle.mean(), inputs.mean(0)
    common = _ridge(inputs - mean, middle - level)
    return common, float(level - mean @ common)


def _without(policy: layers.PolicyLayers, common: FloatArray, level: float) -> layers.PolicyLayers:
    last = policy[-1]
    assert isinstance(last, layers.Dense)
    return (*policy[:-1], replace(last, kernel=last.kernel - common, bias=last.bias - np.float32(level)))


def _ridge(inputs: FloatArray, target: FloatArray) -> FloatArray:
    """Weights [features] that take inputs [N, features] towards target [N], by conjugate gradients."""
    ridge = _RIDGE * float(np.square(inputs).sum()) / inputs.shape[1]
    weights = np.zeros(inputs.shape[1], np.float32)
    residual = direction = target @ inputs
    square = float(residual @ residual)
    for _ in range(_STEPS):
        if square < np.finfo(np.float32).tiny:
            break
        image = (inputs @ direction) @ inputs + ridge * direction
        step = square / float(direction @ image)
        weights = weights + step * direction
        residual = residual - step * image
        before, square = square, float(residual @ residual)
        direction = residual + (square / before) * direction
    return weights if np.isfinite(weights).all() else np.zeros_like(weights)


def exponents(
    policy: layers.PolicyLayers, channels: Sequence[Channels], kept: Sequence[FloatArray] = ()
) -> list[FloatArray]:
    """Powers of two by which to divide the channels of each hidden layer, so that they become of similar size.

    Args:
        policy: Layers.
        channels: Of the input, and of the output of each layer with weights.
        kept: What this gave for an earlier policy; an exponent stays unless it is off by more than 1.
    """
    found = []
    weighted = layers.weighted(policy)
    for n, (layer, following) in enumerate(pairwise(weighted)):
        count = layer.bias.size
        kernel = following.kernel.reshape(following.bias.size, -1, count)[:_OUTPUTS]
        activations = np.maximum(np.abs(channels[n + 1].low), np.abs(channels[n + 1].high))
        weights = np.maximum(kernel.max((0, 1)), -kernel.min((0, 1)))
        if layer.activation == "tanh" or not (activations.any() and weights.any()):  # no factor can pass, or matters
            found.append(np.zeros(count, np.float32))
            continue
        activations, weights = (np.maximum(a, _FLOOR * a.max()) for a in (activations, weights))
        best = _ACTIVATIONS * np.log2(activations) - (1 - _ACTIVATIONS) * np.log2(weights)
        before = kept[n] if n < len(kept) and kept[n].size == count else best
        found.append(np.rint(np.where(np.abs(best - before) <= 1, before, best)))
    return found


def decisive_range(outputs: FloatArray) -> requantize.Range:
    """The output range in which close calls are decided; what lies beyond may saturate.

    An output above every runner-up wins even when it saturates, and one below every winner loses.

    Args:
        outputs: In fp32, of a `levelled` policy [N, n].
    """
    runner_up, best = np.partition(outputs, -2, axis=1)[:, -2:].T
    clear = float(np.percentile(best - runner_up, _CLEAR))
    low = min(_HEADROOM * float(best.min()), -clear)
    high = max(_HEADROOM * float(runner_up.max()), clear)
    return max(low, float(outputs.min())), min(high, float(outputs.max()))


def _channels(x: FloatArray) -> Channels:
    flat = x.reshape(-1, x.shape[-1])
    return Channels(flat.min(0), flat.max(0), flat.mean(0))
