"""Which steps explore, and all that is random in acting: drawn ahead in blocks, consumed one row per step.

Epsilon follows the assignment: linear from `epsilon_start` to `epsilon_end`. A step that explores takes a uniformly
random action and costs no inference. Of several environments all explore in the same step or none does: each still
explores with probability epsilon, and the batched inference is saved there too.

Blocks have a fixed size and a row belongs to a step whatever message or burst it lands in, so that a run with the same
seed, slot and policies repeats bit for bit. Other noise (Ornstein-Uhlenbeck, say) would be one more kind of row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker import messages, specs

BLOCK = 1024
"""Rows drawn at once, and therefore the longest burst."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Epsilon as a function of steps. The default never explores."""

    start: float = 0.0
    end: float = 0.0
    decay_steps: int = 0
    offset: int = 0

    @classmethod
    def of(cls, assignment: messages.Assignment) -> Schedule:
        """What the learner assigned."""
        a = assignment
        return cls(a.epsilon_start, a.epsilon_end, a.epsilon_decay_steps, a.epsilon_offset)

    def epsilon(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Epsilon of this boot's recorded steps number `steps`, counted from 0."""
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
        self._reseed(seed, 0)

    def assign(self, assignment: messages.Assignment) -> None:
        """Follows an assignment: its schedule from the next block on, its seed and slot at once."""
        self._schedule = Schedule.of(assignment)
        self._reseed(assignment.seed, assignment.slot)

    @property
    def left(self) -> int:
        """Rows until the next block: the most that may be taken at once."""
        start: int = self._window(0).start
        return BLOCK - start

    def take(self, rows: int) -> Sequence[Any]:
        """Per row, a random action to take, or None to ask the policy. At most `left` rows."""
        window = self._window(rows)  # first: it may draw a new block
        return self._chosen[window]

    def take_random(self, rows: int) -> Sequence[Any]:
        """Per row, a random action. At most `left` rows."""
        window = self._window(rows)
        return self._actions[window]

    def take_noise(self, rows: int, head: specs.Head) -> NDArray[np.float32]:
        """Noise [rows, n_envs, size] for a stochastic head, of the kind it samples with. At most `left` rows."""
        window = self._window(rows)
        if self._noise is None:
            shape = (BLOCK, self._n_envs, self._action.size)
            draw = self._noise_random.gumbel if head == "categorical" else self._noise_random.standard_normal
            self._noise = draw(size=shape).astype(np.float32)
        return self._noise[window]

    def give_back(self, rows: int) -> None:
        """The last `rows` that were taken were not used: the next ones taken are these again."""
        self._next -= rows

    def _window(self, rows: int) -> slice:
        if self._next == BLOCK:
            self._draw()
        start, self._next = self._next, self._next + rows
        return slice(start, self._next)

    def _reseed(self, seed: int, slot: int) -> None:
        if (seed, slot) == self._seed:
            return
        self._seed = (seed, slot)
        steps, noise = np.random.SeedSequence([seed, slot]).spawn(2)
        self._random, self._noise_random = np.random.default_rng(steps), np.random.default_rng(noise)
        self._next = BLOCK

    def _draw(self) -> None:
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
