"""Post-training quantization: what makes eight bits hold a policy better, so that it acts as before.

One fp32 pass over the calibration observations shows how large each channel is. Then:

* Centred outputs: only differences between outputs choose an action, so whatever all outputs have in common is
  subtracted in the last layer: the linear function of its inputs that comes closest to the middle of the best two
  outputs. What remains is near 0 where it matters, and the range of the int8 output shrinks with it: to a tenth on
  LunarLander. Outputs beyond every close call may then saturate (`decisive_range`).
* Cross-layer equalization: an int8 tensor has one scale, so a channel that reaches 1 beside one that reaches 100 keeps
  two levels. ReLU and linear layers let a factor pass from a layer's output to the next layer's kernel (Nagel et al.
  2019, https://arxiv.org/abs/1906.04721; the factor is that of Xiao et al. 2023, https://arxiv.org/abs/2211.10438).
* Bias correction: behind ReLUs the mean input is far from 0, and so is its product with the rounding errors of the
  weights. The bias makes up for that (Nagel et al. 2019, section 4.2).
* Clipped tanh input: what goes into a tanh may saturate where tanh has reached an end of int8. A trained policy brings
  it to 30 and more, and 256 steps over that are too coarse in the middle, where the action is decided.
* Clipped outputs: the same for outputs that actors clip: of the head `squashed_gaussian`, in front of a tanh.
* Hi/lo input: each feature of the observation is two int8 numbers (`input_scaling`), and may go beyond what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap, zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import layers
from learner.quantize import calibrate, compare, fp32, input_scaling, scales

FloatArray = NDArray[np.float32]
Step = Literal[
    "centred_outputs", "clipped_tanh_input", "clipped_outputs", "hi_lo_input", "cross_layer_equalization",
    "bias_correction",
]  # fmt: skip
STEPS: tuple[Step, ...] = ("centred_outputs", "hi_lo_input", "cross_layer_equalization", "bias_correction")
"""The steps for policies whose largest output is the choice."""
ACTION_STEPS: tuple[Step, ...] = ("clipped_tanh_input", "hi_lo_input", "cross_layer_equalization", "bias_correction")
"""The steps for policies whose outputs are the action."""
SQUASHED_STEPS: tuple[Step, ...] = ("clipped_outputs", *ACTION_STEPS[1:])
"""The steps for policies whose outputs actors clip, and bring through a tanh."""
STEPS_BY_HEAD: dict[specs.Head, tuple[Step, ...]] = {
    "q_values": STEPS,
    "categorical": STEPS[1:],
    "deterministic": ACTION_STEPS,
    "gaussian": STEPS[1:],
    "squashed_gaussian": SQUASHED_STEPS,
}

HYSTERESIS_HEADS: tuple[specs.Head, ...] = ("q_values",)
"""Heads whose scales have hysteresis, for the sake of small patches, and whose ranges serve the next policy. A choice
hardly changes by it; an action's error grows by a third to a half (two LunarLanderContinuous runs). A sampled policy
goes out once a phase, after hundreds of updates: by ranges of the one before, its KL divergence from fp32 was 0.01
nats, and 0.00001 by its own (CartPole)."""

_TANH_END = math.atanh(127.5 / 128)
"""Input from which on tanh in int8, whose scale is 1/128, has only its last level."""
_ACTIVATIONS = 0.75
"""The share of a channel's factor that its activations decide; its weights, which have more scales, decide the rest."""
_FLOOR = 0.1
"""Channels and weights smaller than this beside the largest count as that large: they may yet grow."""
_OUTPUTS = 256
"""This many outputs of a wide layer show how large the weights behind a channel are."""
_RIDGE = 0.01
"""A share of the mean square of the inputs: keeps small what is subtracted in the last layer."""
_CG_STEPS = 16
"""Steps of conjugate gradients. Any result leaves the choices alone, so it need not be exact."""
_PARTS = 4
"""Of the observations: each is foretold by the others."""
_HEADROOM = 1.5
"""Other observations have wider close calls than the sample."""
BEYOND = 0.125
"""The share of its range that a hi/lo feature may go beyond either end, unclipped: it has levels to spare."""
_CLEAR = 50.0
"""Percentile of the gaps between the best two; beyond such a gap an output is clear, and may saturate."""


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """The values seen in a tensor's channels [c] (features behind a dense layer)."""

    low: FloatArray
    high: FloatArray
    mean: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """The result of calibrating on a policy; serves those that training makes of it next, too.

    Attributes:
        params: What to fit the int8 model to.
        common_kernel: Weights [features] to subtract from each row of the last kernel; None where outputs stay what
            they are.
        common_bias: Number to subtract from each of the last biases.
    """

    params: calibrate.QuantParams
    common_kernel: FloatArray | None
    common_bias: float

    def centred(self, policy: layers.PolicyLayers) -> layers.PolicyLayers:
        """Returns the policy without what its outputs have in common: it chooses as before."""
        return policy if self.common_kernel is None else _subtract(policy, self.common_kernel, self.common_bias)


class Calibrator:
    """Calibrates one policy after another.

    It keeps each channel's factor until the best one is more than twice as large or small: with factors that came and
    went with the calibration sample, the int8 weights would change more from one publish to the next than training
    changes them, and what is sent of a policy would double.

    Args:
        steps: The steps to apply. `centred_outputs`, with `decisive_range`, only where nothing but the largest output
            counts, as with action values; without it, or where the last layer is not linear, outputs stay what they
            are.
        hysteresis: Whether ranges and scales are kept like the factors, as long as they are at most a quarter too wide.
        beyond: The share of its range that a hi/lo feature may go beyond either end, unclipped.
        output_end: The size at which actors clip outputs, for `clipped_outputs`.
    """

    def __init__(
        self,
        steps: Collection[Step] = STEPS,
        *,
        hysteresis: bool = False,
        beyond: float = BEYOND,
        output_end: float = specs.SQUASHED_MEAN_MAX,
    ) -> None:
        self._steps = steps
        self._hysteresis = hysteresis
        self._beyond = beyond
        self._output_end = output_end
        self._exponents: list[FloatArray] = []
        self._spans: list[scales.Range] = []
        self._ends: tuple[NDArray[Any], NDArray[Any]] | None = None

    def prepare(
        self, policy: layers.PolicyLayers, observations: NDArray[Any], count: int, *, per_feature: bool = True
    ) -> tuple[layers.PolicyLayers, calibrate.QuantParams, FloatArray]:
        """Makes a policy ready for int8, in the place of `calibrate.measure`.

        Args:
            policy: Layers for raw observations.
            observations: Sample [N, *shape] in any dtype.
            count: The first so many observations decide everything.
            per_feature: Whether each input feature gets a range of its own; never in front of a convolution.

        Returns:
            The policy with centred outputs, what to fit its int8 model to, and fp32 outputs [N, n] that int8 is to
            come close to. All three are NaN or infinite where the policy is: `requantize` refuses them.
        """
        calibration = self.calibrate(policy, observations[:count], per_feature=per_feature)
        policy = calibration.centred(policy)
        return policy, calibration.params, fp32.outputs(policy, observations)

    def calibrate(
        self, policy: layers.PolicyLayers, observations: NDArray[Any], *, per_feature: bool = True
    ) -> Calibration:
        """Finds what eight bits need to hold this policy, or one that training soon makes of it.

        Args:
            policy: Layers for raw observations.
            observations: Sample [N, *shape] in any dtype that decides everything.
            per_feature: As in `prepare`.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            return self._calibrate(policy, observations, per_feature)

    def _calibrate(self, policy: layers.PolicyLayers, observations: NDArray[Any], per_feature: bool) -> Calibration:
        first = layers.weighted(policy)[0]
        affine = self._affine(observations) if per_feature and isinstance(first, layers.Dense) else None
        channels, inputs, found = _observe(policy, observations, affine)
        last, common_kernel, common_bias = policy[-1], None, 0.0
        if "centred_outputs" in self._steps and isinstance(last, layers.Dense) and last.activation == "none":
            common_kernel, common_bias, common = _common(last, inputs, found)
            policy = _subtract(policy, common_kernel, common_bias)
            found = found - common[:, None]
            channels[-1] = _channels(found)
        factors = None
        if "cross_layer_equalization" in self._steps:
            self._exponents = equalization_exponents(policy, channels, self._exponents)
            factors = tuple(np.exp2(exponent) for exponent in self._exponents)
        means = _means(policy, channels) if "bias_correction" in self._steps else None
        entry = input_scaling.ENDS if affine else calibrate.unscaled_range(observations)
        spans = [entry, *(_range(*both) for both in zip_longest(channels[1:], factors or ()))]
        if common_kernel is not None:
            spans[-1] = decisive_range(found)
        ends = [_TANH_END if layer.activation == "tanh" else math.inf for layer in layers.weighted(policy)]
        if "clipped_tanh_input" not in self._steps:
            ends[-1] = math.inf
        if "clipped_outputs" in self._steps:
            ends[-1] = self._output_end
        spans[1:] = [(max(low, -end), min(high, end)) for (low, high), end in zip(spans[1:], ends, strict=True)]
        if self._hysteresis:
            self._spans = list(starmap(scales.range_with_hysteresis, zip_longest(spans[1:], self._spans)))
            spans[1:] = self._spans
        params = calibrate.QuantParams(spans[0], tuple(spans[1:]), affine, factors, means, self._hysteresis)
        return Calibration(params, common_kernel, common_bias)

    def _affine(self, observations: NDArray[Any]) -> input_scaling.Affine:
        """Scales the input to the range of all that was seen, where that is not too wide for what is seen now."""
        low, high = observations.min(0).astype(np.float64), observations.max(0).astype(np.float64)
        if self._ends is not None:
            widest = np.minimum(low, self._ends[0]), np.maximum(high, self._ends[1])
            fits = widest[1] - widest[0] <= scales.SLACK * (high - low)
            low, high = np.where(fits, widest[0], low), np.where(fits, widest[1], high)
        self._ends = low, high
        hi_lo = "hi_lo_input" in self._steps
        beyond = self._beyond * (high - low) if hi_lo else np.zeros_like(low)
        return input_scaling.from_ends(low - beyond, high + beyond, hi_lo=hi_lo)


def _range(channels: Channels, factor: FloatArray | None) -> scales.Range:
    """Returns the range of all channels, each divided by its factor."""
    low, high = (channels.low, channels.high) if factor is None else (channels.low / factor, channels.high / factor)
    return float(low.min()), float(high.max())


def _means(policy: layers.PolicyLayers, channels: Sequence[Channels]) -> tuple[FloatArray, ...]:
    """Returns the mean input of each layer with weights, one per weight of an output."""
    # A convolution meets each channel at every place of its kernel; so does a dense layer behind one
    inputs = [layer.kernel[0].size for layer in layers.weighted(policy)]
    repeats = (max(1, n // seen.mean.size) for n, seen in zip(inputs, channels, strict=False))  # a hi/lo input has more
    return tuple(np.tile(seen.mean, n) for n, seen in zip(repeats, channels, strict=False))


def _observe(
    policy: layers.PolicyLayers, observations: NDArray[Any], affine: input_scaling.Affine | None
) -> tuple[list[Channels], FloatArray, FloatArray]:
    """Runs the policy once.

    Returns:
        The channels of the input and of each layer with weights (in front of tanh, but for the mean), the last layer's
        inputs, and the outputs.
    """
    scaled = affine.apply(observations).reshape(len(observations), -1) if affine else observations.astype(np.float32)
    channels = [_channels(scaled)]
    last_inputs = scaled

    def see(layer: layers.Weighted, inputs: FloatArray, linear: FloatArray, outputs: FloatArray) -> None:
        nonlocal last_inputs
        last_inputs, seen = inputs, _channels(linear)
        if outputs is not linear:
            seen = replace(seen, mean=outputs.reshape(-1, outputs.shape[-1]).mean(0))
        channels.append(seen)

    found = fp32.outputs(policy, observations, see)
    return channels, last_inputs, found


def centre_outputs(policy: layers.PolicyLayers, inputs: FloatArray, outputs: FloatArray) -> layers.PolicyLayers:
    """Subtracts the same linear function of the last layer's inputs from all outputs; each choice stays.

    Args:
        policy: Layers, the last of them dense and linear.
        inputs: Inputs of its last layer [N, features].
        outputs: Outputs of the policy [N, n].
    """
    last = policy[-1]
    assert isinstance(last, layers.Dense)
    return _subtract(policy, *_common(last, inputs, outputs)[:2])


def _common(last: layers.Dense, inputs: FloatArray, outputs: FloatArray) -> tuple[FloatArray, float, FloatArray]:
    """Finds the weights [features] and the bias that outputs [N, n] have in common, from inputs [N, features].

    Their mean is such a function exactly, and regression is left with what the middle of the best two is beyond it.
    Advantages may be a hundredth of the values, and then what a ridge leaves of the values is as large as they are.

    A wide layer has more inputs than there are observations, and fits those that it knows, whatever it is of others:
    how much of it is subtracted, and what is left, is found from what each part of them foretells of the rest.

    Returns:
        Weights, bias, and what the outputs [N] of each observation would have in common, had it not been seen.
    """
    mean_outputs, mean_input = outputs.mean(1), inputs.mean(0)
    middle = np.partition(outputs, -2, axis=1)[:, -2:].mean(1) - mean_outputs
    mean_middle = middle.mean()
    inputs, middle = inputs - mean_input, middle - mean_middle
    part = np.arange(len(middle)) % _PARTS
    counts = (part[:, None] != np.arange(_PARTS + 1)).astype(np.float32)  # all but one part each time, and all of them
    fits = _ridge_regressions(inputs, middle, counts)
    answers = inputs @ fits
    unseen = np.arange(len(part)), part
    rows = np.maximum(counts.sum(0), 1)
    level = (middle @ counts / rows)[part]  # of each part's others: its own mean tells of itself
    foretold = answers[unseen] - (np.einsum("nk,nk->k", answers, counts) / rows)[part]
    square = float(foretold @ foretold)
    tiny = np.finfo(np.float32).tiny
    share = float(np.clip(foretold @ (middle - level) / square, 0.0, 1.0)) if square > tiny else 0.0
    share = share if math.isfinite(share) else 0.0
    kernel = share * fits[:, -1]
    bias = float(mean_middle - mean_input @ kernel) + float(last.bias.mean())
    return kernel + last.kernel.mean(0), bias, mean_outputs + mean_middle + level + share * foretold


def _subtract(policy: layers.PolicyLayers, kernel: FloatArray, bias: float) -> layers.PolicyLayers:
    """Subtracts the same weights [features] and bias from each output of the last layer."""
    last = policy[-1]
    assert isinstance(last, layers.Dense)
    return (*policy[:-1], replace(last, kernel=last.kernel - kernel, bias=last.bias - np.float32(bias)))


def _ridge_regressions(inputs: FloatArray, target: FloatArray, counts: FloatArray) -> FloatArray:
    """Finds weights [features, K] that bring inputs [N, features] towards a target [N], by conjugate gradients.

    All K sets are found at once. `counts` [N, K] is 1 where an observation counts for a set, else 0; inputs and target
    are centred by those that do.
    """
    shares = counts / np.maximum(counts.sum(0), 1)

    def centred(x: FloatArray) -> FloatArray:
        found: FloatArray = counts * (x - np.einsum("nk,nk->k", x, shares))
        return found

    ridge = _RIDGE * float(np.square(inputs).sum()) / inputs.shape[1]
    weights = np.zeros((inputs.shape[1], counts.shape[1]), np.float32)
    residual = direction = inputs.T @ centred(np.tile(target[:, None], counts.shape[1]))
    square = np.square(residual).sum(0)
    for _ in range(_CG_STEPS):
        image = inputs.T @ centred(inputs @ direction) + ridge * direction
        curvature = (direction * image).sum(0)
        goes_on = (square > np.finfo(np.float32).tiny) & (curvature > 0.0)  # else done, too small, or not finite
        if not goes_on.any():
            break
        step = np.divide(square, curvature, out=np.zeros_like(square), where=goes_on)
        weights = weights + step * direction
        residual = residual - step * image
        before, square = square, np.square(residual).sum(0)
        direction = residual + np.divide(square, before, out=np.zeros_like(square), where=goes_on) * direction
    return np.where(np.isfinite(weights).all(0), weights, np.float32(0.0))


def equalization_exponents(
    policy: layers.PolicyLayers, channels: Sequence[Channels], kept: Sequence[FloatArray] = ()
) -> list[FloatArray]:
    """Returns the powers of two to divide the channels of each hidden layer by, so that they become of similar size.

    Args:
        policy: Layers.
        channels: Channels of the input, and of the output of each layer with weights.
        kept: The exponents of an earlier policy; one stays unless it is off by more than 1.
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


def decisive_range(outputs: FloatArray) -> scales.Range:
    """Returns the output range in which close calls are decided; what is beyond may saturate.

    An output above every runner-up wins even when it saturates, and one below every winner loses.

    Args:
        outputs: Outputs in fp32 [N, n] of a policy whose outputs are centred.
    """
    best, runner_up = compare.best_two(outputs)
    clear = float(np.percentile(best - runner_up, _CLEAR))
    low = min(_HEADROOM * float(best.min()), -clear)
    high = max(_HEADROOM * float(runner_up.max()), clear)
    return max(low, float(outputs.min())), min(high, float(outputs.max()))


def _channels(x: FloatArray) -> Channels:
    flat = x.reshape(-1, x.shape[-1])
    return Channels(flat.min(0), flat.max(0), flat.mean(0))
