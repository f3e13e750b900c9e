"""Exploration and all that is random in acting: drawn ahead in blocks, consumed one row per step.

Epsilon follows the assignment: linear from `epsilon_start` to `epsilon_end`. A step that explores takes a uniformly
random action and costs no inference. Of several environments all explore in the same step or none does: each still
explores with probability epsilon, and the batched inference is saved there too.

Actions of a deterministic policy get noise; correlated noise goes on over an episode's end, where it is as random as
elsewhere.

Blocks have a fixed size and a row belongs to a step whatever message or burst it lands in, so that a run with the same
seed, slot and policies repeats bit for bit. What a row holds is agreed upon (broker/contract/acting/draws.py): a
learner can draw it again from the row's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import messages, specs
from broker.contract.acting import draws

BLOCK = draws.BLOCK
"""Rows drawn at once, and therefore the longest burst."""
_ROWS = np.arange(BLOCK, dtype=np.int64)
_AHEAD = 4
"""Blocks drawn at once for a single environment: the first takes five times as long as those right behind it."""
_PART = 1 << 15
"""Numbers of noise for stochastic heads that are drawn at once: some three milliseconds'."""
_PART_ROWS_MIN = 4
"""Rows that are drawn at once, whatever that takes: each burst costs a turn of the acting loop."""


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

    @property
    def explores(self) -> bool:
        """Returns whether epsilon is ever above 0."""
        return self.start > 0 or self.end > 0

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
        self._block, self._next = -1, BLOCK
        self._begun_at = 0  # steps recorded before the block
        self._chosen: list[Any] | None = None  # of the block, as soon as somebody asks: what explores, or None
        self._drawn: dict[int, tuple[NDArray[np.float64], NDArray[Any]]] = {}  # `draws.exploring` of some blocks
        self._noise: NDArray[np.float32] | None = None
        # Of what stochastic heads sample with: what is left of the block, the newest part, and the row behind it
        self._parts: Iterator[NDArray[np.float32]] | None = None
        self._part, self._part_end = np.zeros((0, n_envs, 0), np.float32), 0
        self._part_rows = BLOCK
        while self._part_rows > _PART_ROWS_MIN and self._part_rows * n_envs * action.size > _PART:
            self._part_rows //= 2
        self._reseed(seed, 0)

    def assign(self, assignment: messages.Assignment) -> None:
        """Follows an assignment's seed, slot and schedule. Where one is new, so is the next row's block."""
        schedule = Schedule.of(assignment)
        if schedule != self._schedule:
            self._schedule, self._next = schedule, BLOCK
        self._reseed(assignment.seed, assignment.slot)

    @property
    def left(self) -> int:
        """Rows until the next block: the most that may be drawn at once."""
        start: int = self._window(0).start
        return BLOCK - start

    @property
    def row(self) -> int:
        """The number of the next row since seed or slot changed."""
        start: int = self._window(0).start
        return self._block * BLOCK + start

    def draw(self, rows: int) -> Sequence[Any]:
        """Returns for each row a random action, or None to ask the policy. At most `left` rows."""
        window = self._window(rows)
        return self._choices()[window]

    def draw_random(self, rows: int) -> Sequence[Any]:
        """Returns a random action for each row. At most `left` rows."""
        window = self._window(rows)
        return self._listed(self._uniform()[1][window])

    @property
    def perturbs(self) -> bool:
        """Returns whether a deterministic policy's actions get noise."""
        return self._schedule.noise_std > 0

    def draw_perturbed(self, rows: int) -> tuple[Sequence[Any], Sequence[NDArray[np.float32]]]:
        """Returns what `draw` does, and noise [n_envs, size] in the action's units per row that asks the policy."""
        window = self._window(rows)
        if self._noise is None:
            schedule = self._schedule
            self._noise = draws.perturbations(
                *self._place, self._action, self._n_envs, schedule.noise_std, schedule.noise_correlation_steps
            )
        drawn = self._choices()[window]
        noise = self._noise[window]
        return drawn, [noise[i] for i, action in enumerate(drawn) if action is None]

    @property
    def noise_left(self) -> int:
        """Rows until the next part of noise is drawn: the most of it that may be drawn at once."""
        start: int = self._window(0).start
        return self._part_rows - start % self._part_rows

    def draw_noise(self, rows: int, head: specs.Head) -> NDArray[np.float32]:
        """Returns noise [rows, n_envs, size] of the kind that a stochastic head samples with. At most `noise_left`."""
        window = self._window(rows)
        if self._parts is None:
            self._parts = draws.sampling_parts(*self._place, self._action, self._n_envs, head, self._part_rows)
        while window.start >= self._part_end:
            self._part, self._part_end = next(self._parts), self._part_end + self._part_rows
        first = window.start - self._part_end + self._part_rows
        return self._part[first : first + rows]

    def give_back(self, rows: int) -> None:
        """Takes back the last `rows` that were drawn and not used: the next ones drawn are these again."""
        self._next -= rows

    def _window(self, rows: int) -> slice:
        if self._next == BLOCK:
            self._begin_block()
        start, self._next = self._next, self._next + rows
        return slice(start, self._next)

    @property
    def _place(self) -> tuple[int, int, int]:
        return (*self._seed, self._block)

    def _reseed(self, seed: int, slot: int) -> None:
        if (seed, slot) != self._seed:
            self._seed, self._block, self._next, self._drawn = (seed, slot), -1, BLOCK, {}

    def _begin_block(self) -> None:
        """Begins the next block, of which nothing is drawn before it is asked for."""
        self._block, self._next = self._block + 1, 0
        self._begun_at = self._recorded()
        self._chosen = self._noise = None
        self._parts, self._part_end = None, 0

    def _choices(self) -> list[Any]:
        """Returns for each row of the block a random action, or None."""
        if self._chosen is None:
            self._chosen = [None] * BLOCK
            if self._schedule.explores:
                chances, actions = self._uniform()
                steps = self._begun_at + self._n_envs * _ROWS
                explores = np.flatnonzero(chances < self._schedule.epsilon(steps))
                # Few, most of the time: to make all of a block into Python's numbers took as long as to draw it
                for row, action in zip(explores.tolist(), self._listed(actions[explores]), strict=True):
                    self._chosen[row] = action
        return self._chosen

    def _uniform(self) -> tuple[NDArray[np.float64], NDArray[Any]]:
        """Returns what `draws.exploring` does of the block."""
        if self._block not in self._drawn:
            blocks = range(self._block, self._block + (_AHEAD if self._n_envs == 1 else 1))
            self._drawn = {block: draws.exploring(*self._seed, block, self._action, self._n_envs) for block in blocks}
        return self._drawn[self._block]

    def _listed(self, actions: NDArray[Any]) -> list[Any]:
        if self._n_envs > 1:
            return list(actions)
        return actions[:, 0].tolist() if self._action.kind == "discrete" else list(actions[:, 0])
