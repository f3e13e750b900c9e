"""Measures how far a policy acts like its fp32 original: on states, and by the returns of paired episodes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from broker.contract.acting import factored

FloatArray = NDArray[np.floating[Any]]

DECIDED_GAP = 0.01
"""A state is decided where the gap between fp32's best two actions exceeds this share of the advantages' range."""
MARGIN = 0.05
"""Share of (fp32 - random) that a non-inferior policy may lose at most."""
_RESAMPLES = 10_000
_CONFIDENCE = 0.95


def best_two(outputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the largest and the second largest of each row of outputs [N, n]: [N] each."""
    best, second = np.partition(outputs, -2, axis=1)[:, :-3:-1].T
    return best, second


@dataclass(frozen=True, slots=True)
class States:
    """A comparison of greedy actions, state by state.

    The range that some of these refer to is the largest less the smallest of fp32's advantages (values less their mean
    over actions), over all states and actions.

    Attributes:
        agreement: Share of states where both choose the same action.
        agreement_decided: The same among decided states; None where there are none.
        decided: Share of states that are decided.
        ties: Share of states where the best two outputs of the compared policy are equal.
        regret: Mean fp32 value of fp32's choice less that of the other's, relative to the range.
    """

    agreement: float
    agreement_decided: float | None
    decided: float
    ties: float
    regret: float


def states(exact: FloatArray, other: FloatArray) -> States:
    """Compares action values or advantages [N, n] of fp32 with those of another policy for the same states.

    Where the best outputs are equal, the first of them is the choice, as on an actor.
    """
    exact = exact.astype(np.float64)
    span = float(np.ptp(exact - exact.mean(1, keepdims=True)))
    choice, chosen = exact.argmax(1), other.argmax(1)
    best, second = best_two(exact)
    best_other, second_other = best_two(other)
    same = choice == chosen
    decided = best - second > DECIDED_GAP * span
    lost = best - np.take_along_axis(exact, chosen[:, None], axis=1)[:, 0]
    return States(
        agreement=float(same.mean()),
        agreement_decided=float(same[decided].mean()) if decided.any() else None,
        decided=float(decided.mean()),
        ties=float((best_other == second_other).mean()),
        regret=float(lost.mean() / span) if span else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Actions:
    """A comparison of continuous actions, state by state; errors are relative to the range between an element's bounds.

    Attributes:
        error_mean: Mean error of the element where it is largest.
        error_p99: 99th percentile of the element where it is largest.
        error_max: Largest of all.
        error_means: Mean error of each element.
        error_p99s: 99th percentile of each element.
    """

    error_mean: float
    error_p99: float
    error_max: float
    error_means: list[float]
    error_p99s: list[float]


def actions(exact: FloatArray, other: FloatArray, action: specs.ActionSpec) -> Actions:
    """Compares the actions [N, size] of fp32 with those of another policy for the same states."""
    error = np.abs(other.astype(np.float64) - exact) / (np.array(action.high) - action.low)
    means, p99s = error.mean(0), np.percentile(error, 99, axis=0)
    return Actions(float(means.max()), float(p99s.max()), float(error.max()), means.tolist(), p99s.tolist())


def clipped_actions(exact: FloatArray, other: FloatArray, action: specs.ActionSpec) -> Actions:
    """Compares actions [N, size] as `actions` does, both clipped to their bounds, as actors clip them."""
    return actions(np.clip(exact, action.low, action.high), np.clip(other, action.low, action.high), action)


def categorical_divergence(exact: FloatArray, other: FloatArray) -> NDArray[np.float64]:
    """Returns the KL divergence [N] in nats of one softmax from that of fp32: `other` and `exact` are logits [N, n].

    Of several independent ones, [N, D, n], it is the sum.
    """
    log_p, log_q = _log_softmax(other), _log_softmax(exact)
    divergence: NDArray[np.float64] = (np.exp(log_p) * (log_p - log_q)).reshape(len(log_p), -1).sum(1)
    return np.maximum(divergence, 0.0)


def gaussian_divergence(exact: FloatArray, other: FloatArray) -> NDArray[np.float64]:
    """Returns the KL divergence [N] in nats of one diagonal Gaussian from that of fp32.

    Both are means [N, D] beside log deviations [N, D]: [N, 2 D].
    """
    (mean_p, log_p), (mean_q, log_q) = (np.split(outputs.astype(np.float64), 2, axis=1) for outputs in (other, exact))
    variances = np.exp(2 * (log_p - log_q)) + np.square((mean_p - mean_q) * np.exp(-log_q))
    divergence: NDArray[np.float64] = (log_q - log_p + 0.5 * variances - 0.5).sum(1)
    return divergence


def _log_softmax(logits: FloatArray) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


@dataclass(frozen=True, slots=True)
class Distributions:
    """A comparison of the distributions that actions are sampled from, and of their modes, state by state.

    Attributes:
        kl_mean: Mean KL divergence from fp32's, in nats.
        kl_p99: Its 99th percentile.
        agreement: Share of states where both have the same most likely choice, of several at once each the same; None
            of continuous actions.
        action_error_mean: Mean error of the likeliest continuous action, clipped to its bounds, relative to the range
            between them; of the element where it is largest. None of choices.
    """

    kl_mean: float
    kl_p99: float
    agreement: float | None
    action_error_mean: float | None


def distributions(exact: FloatArray, other: FloatArray, action: specs.ActionSpec) -> Distributions:
    """Compares outputs of a policy that samples, logits [N, n] or means and log deviations [N, 2 D], with fp32's."""
    if action.kind != "continuous":
        if action.choices:
            where = factored.places(action.choices)
            exact, other = factored.spread(exact, where), factored.spread(other, where)
        kl = categorical_divergence(exact, other)
        same = exact.argmax(-1) == other.argmax(-1)
        agreement = float(same.reshape(len(same), -1).all(1).mean())
        return Distributions(float(kl.mean()), float(np.percentile(kl, 99)), agreement, None)
    kl = gaussian_divergence(exact, other)
    mode, other_mode = (np.clip(outputs[:, : action.size], action.low, action.high) for outputs in (exact, other))
    error = actions(mode, other_mode, action).error_mean
    return Distributions(float(kl.mean()), float(np.percentile(kl, 99)), None, error)


@dataclass(frozen=True, slots=True)
class SquashedActions(Actions):
    """A comparison of distributions of continuous actions: of their modes, and of all of each.

    Attributes:
        kl_mean: Mean Kullback-Leibler divergence of the other's distribution from fp32's, KL(other || fp32), in nats.
        kl_p99: 99th percentile of it.
    """

    kl_mean: float
    kl_p99: float


def squashed(exact: FloatArray, other: FloatArray, action: specs.ActionSpec) -> SquashedActions:
    """Compares outputs [N, 2 * size] of fp32 for the head `squashed_gaussian` with those of another policy."""
    (mean, log_std), (mean_other, log_std_other) = (_squashed(outputs) for outputs in (exact, other))
    half, middle = (np.array(action.high) - action.low) / 2, (np.array(action.high) + action.low) / 2
    modes = actions(np.tanh(mean) * half + middle, np.tanh(mean_other) * half + middle, action)
    divergence = gaussian_divergence(  # tanh is one-to-one, and changes none
        np.hstack([mean, log_std]), np.hstack([mean_other, log_std_other])
    )
    return SquashedActions(
        **dataclasses.asdict(modes), kl_mean=float(divergence.mean()), kl_p99=float(np.percentile(divergence, 99))
    )


def _squashed(outputs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns mean and log deviation before the tanh [N, size], as actors have them of such outputs."""
    mean, unbounded = np.split(outputs.astype(np.float64), 2, axis=1)
    low, high = specs.SQUASHED_LOG_STD
    most = specs.SQUASHED_MEAN_MAX
    return np.clip(mean, -most, most), (low + high) / 2 + (high - low) / 2 * np.tanh(unbounded)


@dataclass(frozen=True, slots=True)
class Returns:
    """A comparison of returns with those of fp32 in the same episodes.

    Attributes:
        mean: Mean return.
        difference: Mean of return less fp32's, episode by episode.
        low, high: Its paired bootstrap interval, 95 %.
        low_relative: `low` in units of (fp32 - random); None where fp32 is no better than random.
        non_inferior: Whether `low` is at least -5 % of (fp32 - random); None as above.
    """

    mean: float
    difference: float
    low: float
    high: float
    low_relative: float | None
    non_inferior: bool | None


def returns(exact: FloatArray, other: FloatArray, chance: FloatArray) -> Returns:
    """Compares returns [episodes] of another policy with fp32's on the same seeds.

    Args:
        exact: Returns of fp32.
        other: Returns of the policy compared, in the same order.
        chance: Returns of random actions; any number of episodes.
    """
    difference = other.astype(np.float64) - exact
    low, high = interval(difference)
    scale = float(exact.mean(dtype=np.float64) - chance.mean(dtype=np.float64))
    relative = low / scale if scale > 0 else None
    return Returns(
        mean=float(other.mean(dtype=np.float64)),
        difference=float(difference.mean()),
        low=low,
        high=high,
        low_relative=relative,
        non_inferior=None if relative is None else relative >= -MARGIN,
    )


def interval(values: FloatArray, confidence: float = _CONFIDENCE) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of the mean of `values` [N].

    There are 10 000 resamples, always the same ones for one N.
    """
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(_RESAMPLES, len(values)))].mean(1)
    low, high = np.percentile(means, [50 * (1 - confidence), 50 * (1 + confidence)])
    return float(low), float(high)
