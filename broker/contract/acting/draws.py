"""What is random in acting, as a function of seed, slot and row: an actor draws it, and a learner can draw it again.

A row belongs to a step of all of an actor's environments, counted from 0 since its seed or slot changed. Rows come in
blocks, and each block has generators of its own: what a row holds does not depend on how many were drawn before it, nor
on which kinds were drawn at all. `random()`, integers and normal numbers are the same on every machine with numpy's
PCG64; Gumbel noise goes through the machine's own logarithm, and may differ by a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs

BLOCK = 1024
"""Rows drawn at once."""
_CHUNK = 32
"""Steps of correlated noise that are worked out at once; divides BLOCK."""
_EXPLORING, _NOISE = range(2)


def exploring(
    seed: int, slot: int, block: int, action: specs.ActionSpec, n_envs: int
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Returns what decides whether each row explores, and the random actions with which it does.

    Args:
        seed: Of the assignment.
        slot: Of the assignment.
        block: Number of the block, from 0.
        action: What random actions look like.
        n_envs: Environments.

    Returns:
        Numbers in [0, 1) [BLOCK]: a row explores where its number is below epsilon; and actions, int64
        [BLOCK, n_envs] or [BLOCK, n_envs, D], or float32 [BLOCK, n_envs, *shape], uniform.
    """
    random = _generator(seed, slot, block, _EXPLORING)
    chances = random.random(BLOCK)
    if action.kind == "discrete":
        return chances, random.integers(0, action.n, (BLOCK, n_envs))
    if action.kind == "multi_discrete":
        return chances, random.integers(0, action.choices, (BLOCK, n_envs, action.elements))
    low, high = np.reshape(action.low, action.shape), np.reshape(action.high, action.shape)
    return chances, random.uniform(low, high, (BLOCK, n_envs, *action.shape)).astype(np.float32)


def perturbations(
    seed: int, slot: int, block: int, action: specs.ActionSpec, n_envs: int, std: float, correlation_steps: float
) -> NDArray[np.float32]:
    """Returns noise for a deterministic policy's actions [BLOCK, n_envs, size], in their units.

    New at every step (Gaussian), or correlated over steps: Ornstein-Uhlenbeck in its exact form for whole steps,
    `x' = r x + sqrt(1 - r^2) * normal`, `r = exp(-1 / correlation_steps)`, which keeps the deviation whatever the
    correlation. Correlated noise begins each block anew, anywhere it may be.

    Args:
        seed: Of the assignment.
        slot: Of the assignment.
        block: Number of the block, from 0.
        action: Bounds.
        n_envs: Environments.
        std: Deviation, relative to half the range of each element.
        correlation_steps: Steps over which it forgets itself; 0: at once.
    """
    random = _generator(seed, slot, block, _NOISE)
    noise = random.standard_normal((BLOCK, n_envs, action.size))
    if correlation_steps > 0:
        keep = math.exp(-1 / correlation_steps)
        noise[1:] *= math.sqrt(1 - keep * keep)
        step = np.arange(_CHUNK)
        since = np.tril(keep ** np.maximum(step[:, None] - step, 0))  # what is left at each step of each step's noise
        before, last = keep ** (step + 1), np.zeros(n_envs * action.size)
        for chunk in noise.reshape(-1, _CHUNK, len(last)):
            chunk[:] = since @ chunk + before[:, None] * last
            last = chunk[-1]
    half = (np.array(action.high) - np.array(action.low)) / 2
    scaled: NDArray[np.float32] = (std * half * noise).astype(np.float32)
    return scaled


def sampling(
    seed: int, slot: int, block: int, action: specs.ActionSpec, n_envs: int, head: specs.Head
) -> NDArray[np.float32]:
    """Returns the noise [BLOCK, n_envs, size] that a stochastic head samples with: Gumbel noise, or normal."""
    return next(sampling_parts(seed, slot, block, action, n_envs, head, BLOCK))


def sampling_parts(
    seed: int, slot: int, block: int, action: specs.ActionSpec, n_envs: int, head: specs.Head, rows: int
) -> Iterator[NDArray[np.float32]]:
    """Yields what `sampling` returns in parts of `rows` rows, each drawn when it is asked for; `rows` divides BLOCK."""
    random = _generator(seed, slot, block, _NOISE)
    draw = random.gumbel if head == "categorical" else random.standard_normal
    for _ in range(BLOCK // rows):
        yield draw(size=(rows, n_envs, action.size)).astype(np.float32)


def _generator(seed: int, slot: int, block: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, slot, block], spawn_key=(purpose,)))
