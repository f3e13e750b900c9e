"""Exploration and all that is random in acting: drawn ahead in blocks, consumed one row per step.

Epsilon follows the assignment: linear from `epsilon_start` to `epsilon_end`. A step that explores takes a uniformly
random action and costs no inference. Of several environments all explore in the same step or none does: each still
explores with probability epsilon, and the batched inference is saved there too.

Actions of a deterministic policy get noise: new at every step (Gaussian), or correlated over steps (Ornstein-Uhlenbeck
in its exact form for whole steps: `x' = r x + sqrt(1 - r^2) * normal`, `r = exp(-1 / correlation_steps)`, which keeps
the deviation whatever the correlation). Correlated noise goes on over an episode's
end; it is as random there as elsewhere.

Blocks have a fixed size and a row belongs to a step whatever message or burst it lands in, so that a run with the same
seed, slot and policies repeats bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import messages, specs

BLOCK = 1024
"""Rows drawn at once, and therefore the longest burst."""
_CHUNK = 32
"""Steps of correlated noise that are worked out at once; divides BLOCK."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Epsilon as a function of steps, and noise. The default never explores."""

    start: float = 0.0
    end: float = 0.0
    decay_steps: int = 0
    offset: int = 0
    noise_std: float = 0.0
    noise_correlation_steps: float = 0.0

    @classmethod
    def of(cls, assignment: messages.Assignment) -> Schedule:
        """Makes the schedule of an assignment."""
        a = assignment
        return cls(
            a.epsilon_start,
            a.epsilon_end,
            a.epsilon_decay_steps,
            a.epsilon_offset,
            a.noise_std,
            a.noise_correlation_steps,
        )

    def epsilon(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns epsilon [T] for this boot's recorded steps with the numbers `steps` [T], counted from 0."""
        done = np.minimum((steps + self.offset) / max(1, self.decay_steps), 1.0)
        return self.start + (self.end - self.start) * done


class Explorer:
    """Random rows for `n_envs` environments.

    Args:
        action: What random actions look like.
        n_envs: Actions per row; with 1, an action is a number or one array.
        seed: First seed; `assign` sets another.
        recorded: Steps recorded by this boot up to now; epsilon depends on it. Asked once per block.
    """

    def __init__(self, action: specs.ActionSpec, n_envs: int, seed: int, recorded: Callable[[], int]) -> None:
        self._action = action
        self._n_envs = n_envs
        self._recorded = recorded
        self._schedule = Schedule()
        self._seed = (-1, -1)
        self._next = BLOCK
        self._chosen: list[Any] = []
        self._actions: list[Any] = []
        self._noise: NDArray[np.float32] | None = None
        self._correlated = np.zeros((n_envs, action.size))  # the state of the noise, of deviation 1
        if action.kind == "continuous":
            self._half = (np.array(action.high) - np.array(action.low)) / 2
        self._reseed(seed, 0)

    def assign(self, assignment: messages.Assignment) -> None:
        """Follows an assignment: its schedule from the next block on, its seed and slot at once."""
        self._schedule = Schedule.of(assignment)
        self._reseed(assignment.seed, assignment.slot)

    @property
    def left(self) -> int:
        """Rows until the next block: the most that may be drawn at once."""
        start: int = self._window(0).start
        return BLOCK - start

    def draw(self, rows: int) -> Sequence[Any]:
        """Returns for each row a random action, or None to ask the policy. At most `left` rows."""
        window = self._window(rows)  # first: it may draw a new block
        return self._chosen[window]

    def draw_random(self, rows: int) -> Sequence[Any]:
        """Returns a random action for each row. At most `left` rows."""
        window = self._window(rows)
        return self._actions[window]

    @property
    def perturbs(self) -> bool:
        """Returns whether a deterministic policy's actions get noise."""
        return self._schedule.noise_std > 0

    def draw_perturbed(self, rows: int) -> tuple[Sequence[Any], Sequence[NDArray[np.float32]]]:
        """Returns what `draw` does, and noise [n_envs, size] in the action's units per row that asks the policy."""
        window = self._window(rows)
        if self._noise is None:
            self._noise = self._perturbations()
        drawn = self._chosen[window]
        noise = self._noise[window]
        return drawn, [noise[i] for i, action in enumerate(drawn) if action is None]

    def _perturbations(self) -> NDArray[np.float32]:
        """Draws a block of noise [BLOCK, n_envs, size]."""
        schedule = self._schedule
        noise = self._noise_random.standard_normal((BLOCK, self._n_envs, self._action.size))
        if schedule.noise_correlation_steps > 0:
            keep = math.exp(-1 / schedule.noise_correlation_steps)
            noise *= math.sqrt(1 - keep * keep)
            step = np.arange(_CHUNK)
            since = keep ** np.maximum(step[:, None] - step, 0)  # what is left at each step of each step's noise
            since, before = np.tril(since), keep ** (step + 1)
            for chunk in noise.reshape(-1, _CHUNK, self._correlated.size):
                chunk[:] = since @ chunk + before[:, None] * self._correlated.ravel()
                self._correlated = chunk[-1].reshape(self._correlated.shape)
        scaled: NDArray[np.float32] = (schedule.noise_std * self._half * noise).astype(np.float32)
        return scaled

    def draw_noise(self, rows: int, head: specs.Head) -> NDArray[np.float32]:
        """Returns noise [rows, n_envs, size] of the kind that a stochastic head samples with. At most `left` rows."""
        window = self._window(rows)
        if self._noise is None:
            shape = (BLOCK, self._n_envs, self._action.size)
            draw = self._noise_random.gumbel if head == "categorical" else self._noise_random.standard_normal
            self._noise = draw(size=shape).astype(np.float32)
        return self._noise[window]

    def give_back(self, rows: int) -> None:
        """Takes back the last `rows` that were drawn and not used: the next ones drawn are these again."""
        self._next -= rows

    def _window(self, rows: int) -> slice:
        if self._next == BLOCK:
            self._draw_block()
        start, self._next = self._next, self._next + rows
        return slice(start, self._next)

    def _reseed(self, seed: int, slot: int) -> None:
        if (seed, slot) == self._seed:
            return
        self._seed = (seed, slot)
        steps, noise = np.random.SeedSequence([seed, slot]).spawn(2)
        self._random, self._noise_random = np.random.default_rng(steps), np.random.default_rng(noise)
        # Correlated noise begins anywhere it may be later, not at 0
        self._correlated = self._noise_random.standard_normal(self._correlated.shape)
        self._next = BLOCK

    def _draw_block(self) -> None:
        self._next = 0
        self._noise = None
        steps = self._recorded() + self._n_envs * np.arange(BLOCK, dtype=np.int64)
        explores = self._random.random(BLOCK) < self._schedule.epsilon(steps)
        self._actions = self._uniform()
        self._chosen = [None] * BLOCK
        for row in np.flatnonzero(explores).tolist():
            self._chosen[row] = self._actions[row]

    def _uniform(self) -> list[Any]:
        n, action = self._n_envs, self._action
        if action.kind == "discrete":
            drawn = self._random.integers(0, action.n, (BLOCK, n))
            return drawn[:, 0].tolist() if n == 1 else list(drawn)
        low, high = np.reshape(action.low, action.shape), np.reshape(action.high, action.shape)
        values = self._random.uniform(low, high, (BLOCK, n, *action.shape)).astype(np.float32)
        return list(values[:, 0] if n == 1 else values)
