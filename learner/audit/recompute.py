"""Computes steps again: what a policy answers to what was observed, with the random row that belonged to each step.

The second half of a policy, from outputs to actions, is that of edge_actor/policies/policy.py, for many steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker.contract import messages, specs
from broker.contract.acting import draws, factored
from learner.quantize.tflite import interpreter

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_ROUNDING = 1e-5
"""The most by which float32 arithmetic behind the outputs differs between machines, relative to what it computes."""
_LOG_ROUNDING = 1e-3
"""The same for log-probabilities, which are sums of exponentials and differences of large numbers."""
_ROWS_MAX = 1 << 18
"""Random rows, of each environment, that are drawn for one message."""
_FEW = slice(64)
"""Steps on which nearly any other policy shows that it is not the one."""
_RELATIVE = {"float32": 1e-4, "float16": 1e-4, "dynamic": 2e-2}
"""The most by which kernels of machines differ in an output, relative to the largest, where it is not int8."""


class Acting(NamedTuple):
    """The way in which an actor acts: as it was assigned, how many environments it has, and by which kernels."""

    assignment: messages.Assignment
    n_envs: int
    kernels: str

    @property
    def is_exact(self) -> bool:
        """Returns whether its int8 outputs are those of this machine, bit for bit."""
        return self.kernels == "XNNPACK"


class Verdict(NamedTuple):
    """The steps of a message that were computed again, those of them that cannot be true, and what explains these."""

    steps: int
    wrong: int
    why: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Draws:
    """The random rows of n steps: chances [n], random actions [n, ...], and noise [n, size], if the head takes any."""

    chances: NDArray[np.float64]
    actions: NDArray[Any]
    noise: FloatArray | None


def audit(
    experience: messages.Experience,
    spec: specs.EnvSpec,
    head: specs.Head,
    precision: str,
    acting: Acting,
    chosen: NDArray[np.int64],
    model: bytes,
    others: Callable[[], list[tuple[str, bytes]]],
) -> Verdict:
    """Computes steps of a message again.

    Args:
        experience: Checked and unpacked, chosen by a policy (no version 0).
        spec: Of the environment.
        head: What the policy puts out.
        precision: One of config.PRECISIONS.
        acting: How the actor says it acts.
        chosen: Which steps, ascending; those whose random rows lie in too many blocks are left out.
        model: The policy that it names.
        others: Returns other policies that it may have played, by what to call them; asked only if steps are wrong.

    Raises:
        RuntimeError, ValueError: The runtime does not run the policy.
    """
    chosen = _of_few_blocks(experience, acting.n_envs, chosen)
    seen = observed(experience, chosen, spec.observation.stack)
    if int(experience.env_index.max()) >= acting.n_envs:
        return Verdict(len(chosen), len(chosen), "it has more environments than it says")
    drawn = _drawn(experience, spec.action, head, acting, chosen)
    lowest, highest = _epsilon(experience, acting, chosen)
    action = experience.action[chosen]
    log_prob = experience.log_prob[chosen] if len(experience.log_prob) else None
    explored = _is_same(action, drawn.actions, spec.action)

    def wrong(bytes_: bytes, kernels: str, few: slice = slice(None)) -> int:
        outputs, quantum = interpreter.answer(bytes_, seen[few], delegated=kernels == "XNNPACK")
        slack: Any = 0.0
        if precision in _RELATIVE:
            slack = _RELATIVE[precision] * float(np.abs(outputs).max(initial=0.0))
        elif not acting.is_exact:
            slack = quantum or _range(spec.action) / 254  # a Rescale brings a tanh, of 127 steps, to the bounds
        noise = None if drawn.noise is None else drawn.noise[few]
        density = None if log_prob is None else log_prob[few]
        own = _is_own(outputs, slack, spec.action, head, action[few], density, noise)
        true = (own & (drawn.chances >= lowest)[few]) | (explored & (drawn.chances < highest))[few]
        return int(np.count_nonzero(~true))

    kernels = "XNNPACK" if acting.is_exact else "built-in"
    # Kernels but XNNPACK are those of another machine: ours, within a step of int8, whichever they are
    found = wrong(model, kernels)
    if not found:
        return Verdict(len(chosen), 0)
    if acting.is_exact and not wrong(model, "built-in"):
        return Verdict(len(chosen), found, "its kernels are not XNNPACK, as it says")
    for name, other in others():
        if not wrong(other, kernels, _FEW) and not wrong(other, kernels):
            return Verdict(len(chosen), found, f"it plays {name}")
    return Verdict(len(chosen), found, "no policy here explains them: a broken model file, or it did something else")


def _of_few_blocks(experience: messages.Experience, n_envs: int, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the steps of as many blocks as are cheap to draw: who says where they lie may want to keep us busy."""
    block = _rows(experience, chosen)[1] // draws.BLOCK
    kept: NDArray[np.int64] = chosen[np.isin(block, np.unique(block)[: max(1, _ROWS_MAX // (n_envs * draws.BLOCK))])]
    return kept


def observed(experience: messages.Experience, chosen: NDArray[np.int64], stack: int) -> NDArray[Any]:
    """Returns what a policy saw before the steps `chosen` [n, *shape]."""
    segment = np.repeat(np.arange(len(experience.length)), experience.length)[chosen]
    newest = chosen + segment * stack + stack - 1
    if stack == 1:
        found: NDArray[Any] = experience.observation.take(newest, axis=0)
        return found
    return np.concatenate([experience.observation.take(newest - back, axis=0) for back in reversed(range(stack))], -1)


def _drawn(
    experience: messages.Experience,
    action: specs.ActionSpec,
    head: specs.Head,
    acting: Acting,
    chosen: NDArray[np.int64],
) -> _Draws:
    segment, row = _rows(experience, chosen)
    env = experience.env_index[segment]
    assignment, n_envs = acting.assignment, acting.n_envs
    chances = np.empty(len(chosen))
    actions: NDArray[Any] = np.empty(
        (len(chosen), *action.shape), np.float32 if action.kind == "continuous" else np.int64
    )
    perturbed = head == "deterministic" and assignment.noise_std > 0
    noise = np.zeros((len(chosen), action.size), np.float32) if perturbed or head in specs.SAMPLED_HEADS else None
    for block in np.unique(row // draws.BLOCK).tolist():
        in_block = row // draws.BLOCK == block
        at, place = row[in_block] % draws.BLOCK, (assignment.seed, assignment.slot, block)
        block_chances, block_actions = draws.exploring(*place, action, n_envs)
        chances[in_block], actions[in_block] = block_chances[at], block_actions[at, env[in_block]]
        if noise is not None and perturbed:
            std, correlation = assignment.noise_std, assignment.noise_correlation_steps
            noise[in_block] = draws.perturbations(*place, action, n_envs, std, correlation)[at, env[in_block]]
        elif noise is not None:
            noise[in_block] = draws.sampling(*place, action, n_envs, head)[at, env[in_block]]
    if head in specs.SAMPLED_HEADS:
        chances[:] = 1.0  # they explore by sampling alone
    return _Draws(chances, actions, noise)


def _rows(experience: messages.Experience, chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns segment and random row of each step."""
    length = experience.length.astype(np.int64)
    segment: NDArray[np.int64] = np.repeat(np.arange(len(length)), length)[chosen]
    within = chosen - (np.cumsum(length) - length)[segment]
    return segment, experience.draw + experience.row[segment].astype(np.int64) + within


def _epsilon(
    experience: messages.Experience, acting: Acting, chosen: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the least and the largest epsilon that may have ruled each step.

    It follows from the steps that were recorded when a row's block was drawn, of which the message says as much as that
    they lie within a block before it and its own end.
    """
    a, (_, row) = acting.assignment, _rows(experience, chosen)
    within = acting.n_envs * (row % draws.BLOCK) + a.epsilon_offset
    earliest = max(0, experience.step - acting.n_envs * draws.BLOCK)
    ends = []
    for recorded in (earliest, experience.step + len(experience.reward)):
        done = np.minimum((recorded + within) / max(1, a.epsilon_decay_steps), 1.0)
        ends.append(a.epsilon_start + (a.epsilon_end - a.epsilon_start) * done)
    return np.minimum(*ends) - 1e-12, np.maximum(*ends) + 1e-12


def _is_same(action: NDArray[Any], drawn: NDArray[Any], spec: specs.ActionSpec) -> BoolArray:
    if spec.kind != "continuous":
        same: BoolArray = (action == drawn).reshape(len(action), -1).all(1)
        return same
    return _is_near(action.reshape(len(action), -1), drawn.reshape(len(action), -1), _ROUNDING * _range(spec))


def _is_own(
    y: FloatArray,
    slack: Any,
    spec: specs.ActionSpec,
    head: specs.Head,
    action: NDArray[Any],
    log_prob: FloatArray | None,
    noise: FloatArray | None,
) -> BoolArray:
    """Returns which actions [n] are those of a policy with these outputs, each of which may be off by `slack`."""
    if spec.kind == "multi_discrete":
        return _are_chosen(y, slack, spec, action, log_prob, noise)
    if head in ("q_values", "categorical"):
        return _is_chosen(y, slack, head, action, log_prob, noise)
    size, flat = spec.size, action.reshape(len(action), -1)
    low, high = np.array(spec.low, np.float32), np.array(spec.high, np.float32)
    half = (high - low) / 2
    if head == "deterministic":
        expected = np.clip(y if noise is None else y + noise, low, high)
        return _is_near(flat, expected, slack + _ROUNDING * _range(spec))
    assert noise is not None
    assert log_prob is not None
    mean, spread = y[:, :size], y[:, size:]
    if head == "gaussian":
        std = np.exp(spread)
        expected = mean + std * noise
        density = (-0.5 * noise * noise - spread - _HALF_LOG_2PI).sum(1)
        margin = slack * (1.0 + std * np.abs(noise)) + _ROUNDING * (std + np.abs(expected))
        return _is_near(flat, expected, margin) & _is_likely(log_prob, density, slack * size)
    lowest, highest = specs.SQUASHED_LOG_STD
    slope = (highest - lowest) / 2
    log_std = np.tanh(spread) * slope + (highest + lowest) / 2
    moved = np.exp(log_std) * noise
    u = np.clip(mean, -specs.SQUASHED_MEAN_MAX, specs.SQUASHED_MEAN_MAX) + moved
    expected = np.clip(np.tanh(u) * half + (high + low) / 2, low, high)
    constant = size * (_HALF_LOG_2PI + 2.0 * math.log(2.0)) + np.log(half).sum()
    density = (2.0 * np.logaddexp(u, -u) - 0.5 * noise * noise - log_std).sum(1) - constant
    margin = half * (slack * (1.0 + slope * np.abs(moved)) + 10 * _ROUNDING)
    density_slack = slack * float(np.max(2.0 + slope * (1.0 + 2.0 * np.abs(moved)), initial=0.0)) * size
    return _is_near(flat, expected, margin) & _is_likely(log_prob, density, density_slack)


def _is_chosen(
    y: FloatArray,
    slack: Any,
    head: specs.Head,
    action: NDArray[Any],
    log_prob: FloatArray | None,
    noise: FloatArray | None,
) -> BoolArray:
    each = np.arange(len(y))
    chosen: BoolArray
    if head == "q_values":
        chosen = y[each, action] >= y.max(1) - 2 * slack if slack else action == y.argmax(1)
        return chosen
    assert noise is not None
    assert log_prob is not None
    sampled = y + noise
    best = sampled.max(1)
    logits = y - y.max(1, keepdims=True)
    expected = logits[each, action] - np.log(np.exp(logits).sum(1))
    chosen = sampled[each, action] >= best - 2 * slack - _ROUNDING * (1.0 + np.abs(best))
    return chosen & _is_likely(log_prob, expected, 2 * slack)


def _are_chosen(
    y: FloatArray,
    slack: Any,
    spec: specs.ActionSpec,
    action: NDArray[Any],
    log_prob: FloatArray | None,
    noise: FloatArray | None,
) -> BoolArray:
    """Does what `_is_chosen` does of a choice for each element [n, D]; all of them must be."""
    assert noise is not None
    assert log_prob is not None
    where = factored.places(spec.choices)
    sampled = factored.spread(y + noise, where)
    best = sampled.max(2)
    taken = np.take_along_axis(sampled, action[:, :, None].astype(np.int64), axis=2)[:, :, 0]
    chosen: BoolArray = (taken >= best - 2 * slack - _ROUNDING * (1.0 + np.abs(best))).all(1)
    expected = factored.log_probs(factored.spread(y, where), action.astype(np.int64))
    return chosen & _is_likely(log_prob, expected, 2 * slack * spec.elements)


def _is_likely(log_prob: FloatArray, expected: NDArray[Any], slack: Any) -> BoolArray:
    near: BoolArray = np.abs(log_prob - expected) <= slack + _LOG_ROUNDING * (1.0 + np.abs(expected))
    return near


def _is_near(actions: NDArray[Any], expected: NDArray[Any], margin: Any) -> BoolArray:
    near: BoolArray = (np.abs(actions - expected) <= margin).all(1)
    return near


def _range(spec: specs.ActionSpec) -> FloatArray:
    return np.array(spec.high, np.float32) - np.array(spec.low, np.float32)
