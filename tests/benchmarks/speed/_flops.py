"""Counts the multiplications and additions of an update's matrix products, and what a core does of them in a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from learner import config
from learner.networks import actor_critic

_SIZE = (64, 256, 256)
_REPEATS = 100


def of_update(settings: config.AlgorithmConfig, inputs: int, outputs: int) -> int:
    """Returns the floating-point operations of one gradient step of DQN, DDPG or D4PG on vectors.

    A product of [B, m] by [m, n] has 2 B m n. A layer costs one forward; backwards one for the gradient of its kernel,
    and one for that of its inputs, which the first layer of a network does not need. What is done element by element is
    left out: biases, activations, losses, Adam (a dozen operations a weight), the projection of D4PG's distribution.

        DQN   target and, if double, online network on the bootstrap observations; online forward and backward
        DDPG  target actor and target critic; critic forward and backward; actor forward, critic forward, critic
              backward to its inputs (of the first layer's, the actions alone), actor backward; and the actor once more
              on a quarter of the rows, rounded, whatever that costs it
        SAC   as DDPG, with two critics, and two outputs of the actor for each element of an action

    Args:
        settings: Widths, heads and batch size.
        inputs: Features of an observation.
        outputs: Actions to choose from, or elements of an action.
    """
    rows = settings.batch_size
    if isinstance(settings, config.DqnConfig):
        stacks = _q_network(settings, inputs, outputs)
        forward = sum(map(_forward, stacks))
        entries = stacks[:1] if len(stacks[0]) > 1 else stacks[1:]
        to_inputs = forward - sum(map(_first, entries))
        return 2 * rows * (forward * (3 if settings.double else 2) + forward + to_inputs)
    assert isinstance(settings, config.ContinuousConfig)
    atoms = settings.atoms if isinstance(settings, config.D4pgConfig) else 1
    is_sac = isinstance(settings, config.SacConfig)
    critics = 2 if is_sac else 1
    actor = (inputs, *settings.hidden, 2 * outputs if is_sac else outputs)
    critic = (inputs + outputs, *settings.critic_hidden, atoms)
    critic_step = 3 * _forward(critic) - _first(critic)
    actor_step = 3 * _forward(actor) - _first(actor)
    through_critic = 2 * _forward(critic) - _first(critic) + outputs * settings.critic_hidden[0]
    of_critics = critics * (_forward(critic) + critic_step + through_critic)
    total = 2 * rows * (_forward(actor) + of_critics + actor_step)
    return total + 2 * max(1, rows // actor_critic.ROUNDED) * actor_step


def core_rate() -> float:
    """Returns the operations per second of CPU of float32 products of 64x256x256 by numpy, as the run sets BLAS up.

    A mean, as that of the updates beside it: the quickest product would tell what the core does at its best.
    """
    m, k, n = _SIZE
    rng = np.random.default_rng(0)
    one, other = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    out = np.empty((m, n), np.float32)
    np.matmul(one, other, out)
    began = time.process_time()
    for _ in range(_REPEATS):
        np.matmul(one, other, out)
    return _REPEATS * 2 * m * k * n / (time.process_time() - began)


def _q_network(settings: config.DqnConfig, inputs: int, outputs: int) -> list[tuple[int, ...]]:
    """Returns the widths of each stack of layers; with dueling, the last hidden layer is there twice."""
    if not settings.dueling:
        return [(inputs, *settings.hidden, outputs)]
    torso = (inputs, *settings.hidden[:-1])
    return [torso, (torso[-1], settings.hidden[-1], outputs), (torso[-1], settings.hidden[-1], 1)]


def _forward(widths: Sequence[int]) -> int:
    return sum(one * other for one, other in pairwise(widths))


def _first(widths: Sequence[int]) -> int:
    return widths[0] * widths[1]
