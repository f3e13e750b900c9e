"""Compares an int8 model with its fp32 twin on held-back observations, before anything is published.

The int8 model runs as .tflite on the runtime that actors use, so what is judged is what ships.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from learner import config
from learner.quantize import compare
from learner.quantize.tflite import interpreter

FloatArray = NDArray[np.float32]
Exact = FloatArray | concurrent.futures.Future[FloatArray]
"""Outputs of fp32 [N, n], or their future: another thread can compute them beside the int8 run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's decision. `reason` is empty when the policy may be published.

    Attributes:
        passed: Whether the policy may be published.
        reason: Slug under which refusals are counted: `identical` (nothing new, a skip rather than a failure),
            `unrunnable` (the runtime refuses the model), `not_finite`, `dead`, `disagrees`, `diverges`, `ties` or
            `saturated`.
        error_max: Largest difference of an output, in its own unit.
        error_mean: Mean absolute difference.
    """

    passed: bool
    reason: str
    error_max: float = 0.0
    error_mean: float = 0.0

    @property
    def measures(self) -> dict[str, float]:
        """The measures that people are shown, by name."""
        return {}


@dataclass(frozen=True, slots=True)
class ChoiceVerdict(Verdict):
    """The decision on a policy whose largest output is the choice.

    Attributes:
        agreement: Share of observations where both choose the same action.
        agreement_weighted: The same, each observation weighted by fp32's gap between its best two actions: near-ties,
            where either choice is as good, hardly count.
        ties: Share of observations where the best two int8 outputs are equal.
        saturation: Share of observations where the range ends too early: the best two int8 outputs are equal, at an end
            of it. A single output there is as good as any that is clear.
    """

    agreement: float = 0.0
    agreement_weighted: float = 0.0
    ties: float = 0.0
    saturation: float = 0.0

    @property
    def measures(self) -> dict[str, float]:
        return {"agreement": self.agreement, "agreement_weighted": self.agreement_weighted, "ties": self.ties}


@dataclass(frozen=True, slots=True)
class ActionVerdict(Verdict):
    """The decision on a policy whose outputs are the action.

    Attributes:
        action_error_mean: Mean error of an element of the action, relative to the range between its bounds; of the
            element where it is largest.
        action_error_p99: The same for the 99th percentile.
    """

    action_error_mean: float = 0.0
    action_error_p99: float = 0.0

    @property
    def measures(self) -> dict[str, float]:
        return {"action_error_mean": self.action_error_mean, "action_error_p99": self.action_error_p99}


@dataclass(frozen=True, slots=True)
class SquashedVerdict(ActionVerdict):
    """The decision on a policy whose outputs are a distribution of actions; errors are those of its mode.

    Attributes:
        kl_mean: Mean divergence of the distribution (compare.SquashedActions). No policy is held back for it.
        kl_p99: The same for the 99th percentile.
    """

    kl_mean: float = 0.0
    kl_p99: float = 0.0

    @property
    def measures(self) -> dict[str, float]:
        actions = {"action_error_mean": self.action_error_mean, "action_error_p99": self.action_error_p99}
        return actions | {"kl_mean": self.kl_mean, "kl_p99": self.kl_p99}


@dataclass(frozen=True, slots=True)
class DistributionVerdict(Verdict):
    """The decision on a policy that samples its actions; see compare.Distributions."""

    kl_mean: float = 0.0
    kl_p99: float = 0.0
    agreement: float | None = None
    action_error_mean: float | None = None

    @property
    def measures(self) -> dict[str, float]:
        modes = {"agreement": self.agreement, "action_error_mean": self.action_error_mean}
        known = {name: value for name, value in modes.items() if value is not None}
        return {"kl_mean": self.kl_mean, "kl_p99": self.kl_p99, **known}


def judge_policy(
    int8: bytes,
    exact: Exact,
    observations: NDArray[Any],
    action: specs.ActionSpec,
    settings: config.GateConfig,
    previous: bytes | None = None,
    head: specs.Head = "q_values",
) -> Verdict:
    """Calls `judge_distribution` for heads that sample, else `judge` for choices and `judge_actions` for the rest."""
    if head == "squashed_gaussian":
        return judge_actions(int8, exact, observations, action, settings, previous, compare.squashed)
    if head in specs.SAMPLED_HEADS:
        return judge_distribution(int8, exact, observations, action, settings, previous)
    if action.kind == "discrete":
        return judge(int8, exact, observations, settings, previous)
    return judge_actions(int8, exact, observations, action, settings, previous)


def judge_faithful(exact: FloatArray, head: specs.Head) -> Verdict:
    """Decides on a policy whose file holds its numbers as they are, or as float16, where there is nothing to compare.

    A float16 weight is off by at most 2^-11 of it: the actions differ by a hundredth of what the gate lets pass
    (docs/decisions.md).

    Args:
        exact: Outputs [N, n] of the policy in fp32 for some observations; a few show what overflows or is dead.
        head: What the outputs mean. That actions, or distributions of them, are the same everywhere is no fault.
    """
    if not np.isfinite(exact).all():
        return Verdict(False, "not_finite")
    if head == "q_values" and not np.ptp(exact, axis=0).any():
        return Verdict(False, "dead")
    return Verdict(True, "")


def judge_actions(
    int8: bytes,
    exact: Exact,
    observations: NDArray[Any],
    action: specs.ActionSpec,
    settings: config.GateConfig,
    previous: bytes | None = None,
    compared: Callable[[FloatArray, FloatArray, specs.ActionSpec], compare.Actions] = compare.actions,
) -> ActionVerdict:
    """Decides whether a policy whose outputs are the action, or its distribution, may be published.

    A constant output is no fault by itself: where fp32 acts so too, the error is small.

    Args:
        int8: The model to judge.
        exact: Outputs [N, size] of the same policy in fp32.
        observations: Sample [N, *shape] that took no part in calibration.
        action: Bounds of the action.
        settings: Thresholds.
        previous: The model that was published last.
        compared: What makes actions of outputs, and compares them.
    """
    if int8 == previous:
        return ActionVerdict(False, "identical")
    try:
        quantized, _, _ = interpreter.run(int8, observations)
    except RuntimeError:  # as in `judge`
        return ActionVerdict(False, "unrunnable")
    exact = _known(exact)
    if not (np.isfinite(quantized).all() and np.isfinite(exact).all()):
        return ActionVerdict(False, "not_finite")
    error = np.abs(quantized - exact)
    relative = compared(exact, quantized, action)
    off = (
        relative.error_mean > settings.gate_action_error_max or relative.error_p99 > settings.gate_action_error_p99_max
    )
    verdict = ActionVerdict(
        passed=not off,
        reason="disagrees" if off else "",
        error_max=float(error.max()),
        error_mean=float(error.mean()),
        action_error_mean=relative.error_mean,
        action_error_p99=relative.error_p99,
    )
    if isinstance(relative, compare.SquashedActions):
        return SquashedVerdict(**dataclasses.asdict(verdict), kl_mean=relative.kl_mean, kl_p99=relative.kl_p99)
    return verdict


def judge_distribution(
    int8: bytes,
    exact: Exact,
    observations: NDArray[Any],
    action: specs.ActionSpec,
    settings: config.GateConfig,
    previous: bytes | None = None,
) -> DistributionVerdict:
    """Decides whether a policy that samples its actions may be published.

    What counts is how far int8's distribution is from fp32's. One that is the same everywhere is no fault: so policies
    begin. Nor are ties: which of two choices of one probability is the likeliest is of no account.

    Args:
        int8: The model to judge.
        exact: Outputs of the same policy in fp32: logits [N, n], or means and log deviations [N, 2 size].
        observations: Sample [N, *shape] that took no part in calibration.
        action: What is sampled.
        settings: Thresholds.
        previous: The model that was published last.
    """
    if int8 == previous:
        return DistributionVerdict(False, "identical")
    try:
        quantized, _, _ = interpreter.run(int8, observations)
    except RuntimeError:  # as in `judge`
        return DistributionVerdict(False, "unrunnable")
    exact = _known(exact)
    if not (np.isfinite(quantized).all() and np.isfinite(exact).all()):
        return DistributionVerdict(False, "not_finite")
    error = np.abs(quantized - exact)
    found = compare.distributions(exact, quantized, action)
    off = not (found.kl_mean <= settings.gate_kl_max and found.kl_p99 <= settings.gate_kl_p99_max)
    return DistributionVerdict(
        passed=not off,
        reason="diverges" if off else "",
        error_max=float(error.max()),
        error_mean=float(error.mean()),
        **dataclasses.asdict(found),
    )


def judge(
    int8: bytes,
    exact: Exact,
    observations: NDArray[Any],
    settings: config.GateConfig,
    previous: bytes | None = None,
) -> ChoiceVerdict:
    """Decides whether a policy with action values or advantages as outputs may be published.

    Args:
        int8: The model to judge.
        exact: Outputs [N, n] of the same policy in fp32 (`fp32.outputs`).
        observations: Sample [N, *shape] that took no part in calibration.
        settings: Thresholds.
        previous: The model that was published last.
    """
    if int8 == previous:
        return ChoiceVerdict(False, "identical", agreement=1.0, agreement_weighted=1.0)
    try:
        quantized, low, high = interpreter.run(int8, observations)
    except RuntimeError:  # XNNPACK takes no rescaling factor beyond its range, as behind a layer that is nearly dead
        return ChoiceVerdict(False, "unrunnable")
    exact = _known(exact)
    if not (np.isfinite(quantized).all() and np.isfinite(exact).all()):
        return ChoiceVerdict(False, "not_finite")

    same = quantized.argmax(1) == exact.argmax(1)
    best, second = compare.best_two(exact)
    gap = (best - second).astype(np.float64)
    best8, second8 = compare.best_two(quantized)
    error = np.abs(quantized - np.clip(exact, low, high))  # what is clear may saturate (`ptq.decisive_range`)
    verdict = ChoiceVerdict(
        passed=True,
        reason="",
        agreement=float(same.mean()),
        agreement_weighted=float(gap[same].sum() / gap.sum()) if gap.any() else 1.0,
        ties=float((best8 == second8).mean()),
        error_max=float(error.max()),
        error_mean=float(error.mean()),
        saturation=float(((best8 == second8) & ((best8 <= low) | (best8 >= high))).mean()),
    )
    reason = _reason(verdict, settings, dead=not np.ptp(quantized, axis=0).any())
    return dataclasses.replace(verdict, passed=not reason, reason=reason)


def _reason(verdict: ChoiceVerdict, settings: config.GateConfig, dead: bool) -> str:
    if dead:
        return "dead"
    if verdict.agreement_weighted < settings.gate_agreement_min:
        return "disagrees"
    if verdict.saturation > settings.gate_saturation_max:
        return "saturated"
    if verdict.ties > settings.gate_ties_max:
        return "ties"
    return ""


def _known(exact: Exact) -> FloatArray:
    return exact.result() if isinstance(exact, concurrent.futures.Future) else exact
