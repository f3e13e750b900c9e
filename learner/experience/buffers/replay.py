"""Experience replay that stores every observation once, and of stacked frames every frame.

Observations live in one ring, transitions in another. A segment of T actions takes T + 1 observation slots (of frames T
+ `stack`, see messages.Experience) and T transitions; a transition knows the observation it starts from and the one it
bootstraps from, so next observations are never copied. n-step returns are worked out once, at insertion:

    reward    = sum over j < m of gamma^j * r[t + j]
    discount  = gamma^m, or 0 if the episode terminated at t + m
    bootstrap = observation[t + m],    m = min(n_step, steps left in the segment)

so a segment that was truncated, or that goes on in a later message, bootstraps from its own last observation after
fewer steps: right in value, and no stitching of messages.

What is sampled of frames are stacks: the frame of that id, and those in the slots before it.

Ids count up for ever; the slot of an id is `id % capacity`. The oldest transitions leave first, when either ring is
full.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner import config
from learner.experience.buffers import priorities

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

_SHARE = 0.9
"""The share of the memory that is left, which replay may take."""


class Segments(Protocol):
    """The part of an experience message that is stored: S segments of N transitions in all, laid end to end."""

    @property
    def length(self) -> NDArray[np.int32]: ...  # [S]
    @property
    def terminated(self) -> NDArray[np.uint8]: ...  # [S]
    @property
    def observation(self) -> NDArray[np.generic]: ...  # [N + S * stack, *frame_shape]
    @property
    def action(self) -> NDArray[np.generic]: ...  # [N] or [N, *shape]
    @property
    def reward(self) -> FloatArray: ...  # [N]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """K minibatches of B transitions. `ids` name the transitions for `update_priorities`."""

    observation: NDArray[Any]  # [K, B, *shape]
    action: NDArray[Any]  # [K, B] int32, or [K, B, *shape] float32
    reward: FloatArray  # [K, B], discounted sum over the n steps
    discount: FloatArray  # [K, B], of the value at `bootstrap`
    bootstrap: NDArray[Any]  # [K, B, *shape]
    weight: FloatArray  # [K, B], importance weights, all 1 when sampled uniformly
    ids: IntArray  # [K, B]

    @property
    def numbers(self) -> tuple[NDArray[Any], ...]:
        """See `memory.Batch`."""
        return self.observation, self.bootstrap, self.reward


class _Dropped(NamedTuple):
    """Ids of transitions and observations that are there and shall not be drawn; ends are exclusive."""

    first: int
    end: int
    observed_first: int
    observed_end: int


class Replay:
    """Ring of transitions over a ring of observations.

    Args:
        spec: Fixes shapes and dtypes; frames stay uint8.
        capacity: Transitions that are kept.
        n_step: Most rewards summed before bootstrapping.
        gamma: Discount per step.
        prioritized: Sample in proportion to |td error| ** priority_exponent, else uniformly.
        priority_exponent: 0 is uniform, 1 fully proportional.
        importance_exponent: How far the weights correct for it; 1 is unbiased.
    """

    def __init__(
        self,
        spec: specs.EnvSpec,
        capacity: int,
        n_step: int,
        gamma: float,
        *,
        prioritized: bool = False,
        priority_exponent: float = 0.6,
        importance_exponent: float = 0.4,
    ) -> None:
        self.capacity = capacity
        self.n_step = n_step
        self.gamma = gamma
        # Room for one extra observation per 8 steps, plus one segment: shorter segments evict a little early.
        self._slots = _slots(spec, capacity)
        self._stack = spec.observation.stack
        try:
            self._observation = np.zeros((self._slots, *spec.observation.frame_shape), spec.observation.dtype)
        except (MemoryError, ValueError) as error:  # a limit, or more than there are addresses
            raise _too_large(spec, capacity, 0) from error
        self._action = np.zeros((capacity, *spec.action.shape), spec.action.dtype)
        self._reward = np.zeros(capacity, np.float32)
        self._discount = np.zeros(capacity, np.float32)
        self._start = np.zeros(capacity, np.int64)  # id of the observation it starts from
        self._bootstrap = np.zeros(capacity, np.int64)  # id of the observation it bootstraps from
        self._observed = 0  # observations ever inserted
        self.inserted = 0  # transitions ever inserted
        self.oldest = 0  # id of the oldest transition that is kept
        self._exponents = (priority_exponent, importance_exponent)
        self._tree = priorities.SumTree(capacity) if prioritized else None
        self._priority_max = 1.0
        self._dropped: list[_Dropped] = []
        self._is_out = np.zeros(capacity, bool)  # the same, by slot: there may be thousands

    def __len__(self) -> int:
        """Returns the number of transitions that may be drawn."""
        return self.inserted - self.oldest - sum(one.end - max(one.first, self.oldest) for one in self._dropped)

    def fits(self, steps: int, segments: int) -> bool:
        """Returns whether a message of so many steps in so many segments can be inserted."""
        return steps <= self.capacity and steps + segments * self._stack <= self._slots

    def insert(self, *messages: Segments) -> int:
        """Adds the segments of one or more messages; returns the number of transitions.

        Several at once take half the time that they take one by one: what an array takes is mostly its call.

        Raises:
            SpecError: One holds more than fits at all, or its arrays do not belong together; nothing was inserted.
        """
        for one in messages:
            self._check(one)
        n, n_observations = sum(len(one.reward) for one in messages), sum(len(one.observation) for one in messages)
        if not self.fits(n, sum(len(one.length) for one in messages)):
            return sum(map(self.insert, messages))
        if n == 0:
            return 0
        length = np.concatenate([one.length for one in messages], dtype=np.int64)
        terminated = np.concatenate([one.terminated for one in messages])
        rewards = np.concatenate([one.reward for one in messages], dtype=np.float32)
        start, steps, total, discount = self._n_step(length, terminated, rewards)
        start += self._observed
        self._evict(n, n_observations)
        _write(self._start, self.inserted, start)
        _write(self._bootstrap, self.inserted, start + steps)
        _write(self._action, self.inserted, np.concatenate([one.action for one in messages]))
        _write(self._reward, self.inserted, total)
        _write(self._discount, self.inserted, discount)
        if self._tree is not None:
            self._tree.set(np.arange(self.inserted, self.inserted + n) % self.capacity, self._priority_max)
        _write(self._is_out, self.inserted, np.zeros(n, bool))
        self.inserted += n
        for one in messages:  # these are large: one copy each
            _write(self._observation, self._observed, one.observation)
            self._observed += len(one.observation)
        return n

    @property
    def has_observations(self) -> bool:
        """Returns whether `observations` has any to give."""
        return len(self) > 0

    def drop(self, first: int, end: int) -> None:
        """Never draws transitions of ids `first` to `end` - 1 again, which one message brought, nor its observations.

        They keep their slots until they leave replay like others.
        """
        first = max(first, self.oldest)
        slots = np.arange(first, end) % self.capacity
        if not len(slots) or self._is_out[slots].any():
            return
        observed = int(self._start[slots[0]]) - self._stack + 1, int(self._bootstrap[slots].max()) + 1
        self._dropped.append(_Dropped(first, end, *observed))
        self._is_out[slots] = True
        if self._tree is not None:
            self._tree.set(slots, 0.0)

    def _is_dropped(self, ids: IntArray) -> NDArray[np.bool_]:
        return self._is_out[ids % self.capacity]

    def _check(self, message: Segments) -> None:
        steps, segments, n = sum(message.length.tolist()), len(message.length), len(message.reward)
        if steps != n or len(message.observation) != n + segments * self._stack or len(message.action) != n:
            raise errors.SpecError(
                f"{segments} segments of {steps} steps came with {len(message.observation)} observations, "
                f"{len(message.action)} actions and {n} rewards"
            )
        if not self.fits(n, segments):
            raise errors.SpecError(
                f"{n} transitions in one message do not fit a replay of {self.capacity}",
                todo="raise replay_capacity, or lower message_steps",
            )

    def _n_step(
        self, length: IntArray, terminated: NDArray[np.uint8], reward: FloatArray
    ) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
        """Returns per transition: place of its observation among these, steps to bootstrap over, return, discount."""
        n = len(reward)
        end = np.cumsum(length)
        start = np.arange(n)
        left = np.repeat(end, length) - start  # steps to the segment's end, this one included
        steps = np.minimum(left, self.n_step)
        total = reward.copy()
        for j in range(1, min(self.n_step, n)):
            total[:-j] += np.float32(self.gamma**j) * reward[j:] * (left[:-j] > j)
        powers = (self.gamma ** np.arange(self.n_step + 1)).astype(np.float32)
        done = np.repeat(terminated.astype(bool), length) & (steps == left)
        discount = np.where(done, np.float32(0), powers[steps])
        # More observations than steps in each segment before it, and the frames in front of its own
        start += np.repeat(np.arange(len(length)) * self._stack + self._stack - 1, length)
        return start, steps, total, discount

    def _evict(self, transitions: int, observations: int) -> None:
        """Forgets the oldest transitions, as many as what comes would overwrite."""
        oldest = max(self.oldest, self.inserted + transitions - self.capacity)
        first_kept = self._observed + observations - self._slots
        if first_kept > 0:
            ids = range(oldest, self.inserted)
            oldest += bisect.bisect_left(
                ids, first_kept + self._stack - 1, key=lambda i: self._start[i % self.capacity]
            )
        if self._tree is not None and oldest > self.oldest:
            self._tree.set(np.arange(self.oldest, oldest) % self.capacity, 0.0)
        self.oldest = oldest
        if self._dropped:
            self._dropped = [one for one in self._dropped if one.end > oldest]

    def sample(self, k: int, b: int, rng: np.random.Generator) -> Batch:
        """Draws K minibatches of B transitions, with replacement. Every array is new: TensorFlow may alias it.

        Raises:
            IndexError: Replay is empty.
        """
        if not len(self):
            raise IndexError("replay is empty")
        if self._tree is None:
            ids = rng.integers(self.oldest, self.inserted, k * b)
            while self._dropped and (odd := self._is_dropped(ids)).any():
                ids[odd] = rng.integers(self.oldest, self.inserted, int(odd.sum()))
            slots = ids % self.capacity
            weight = np.ones(k * b, np.float32)
        else:
            slots, weight = self._draw(self._tree, k * b, rng)
            ids = self.oldest + (slots - self.oldest) % self.capacity
        return Batch(
            observation=self._seen(self._start[slots], (k, b)),
            action=self._gather(self._action, slots, k, b),
            reward=self._gather(self._reward, slots, k, b),
            discount=self._gather(self._discount, slots, k, b),
            bootstrap=self._seen(self._bootstrap[slots], (k, b)),
            weight=weight.reshape(k, b),
            ids=ids.reshape(k, b),
        )

    @staticmethod
    def _gather(ring: NDArray[Any], slots: IntArray, k: int, b: int) -> NDArray[Any]:
        return ring.take(slots, axis=0).reshape(k, b, *ring.shape[1:])

    def _seen(self, ids: IntArray, lead: tuple[int, ...]) -> NDArray[Any]:
        """Returns what a policy saw when the observations of these ids were the newest [*lead, *shape]."""
        if self._stack == 1:
            found = self._observation.take(ids % self._slots, axis=0)
            return found.reshape(*lead, *found.shape[1:])
        *outer, channels = self._observation.shape[1:]
        stacked = np.empty((len(ids), *outer, self._stack, channels), self._observation.dtype)
        for at in range(self._stack):
            stacked[..., at, :] = self._observation.take((ids - self._stack + 1 + at) % self._slots, axis=0)
        return stacked.reshape(*lead, *outer, self._stack * channels)

    def _draw(self, tree: priorities.SumTree, n: int, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        """Returns slots in proportion to their priorities, one from each n-th of the total, and their weights."""
        total = tree.total
        slots = tree.draw((rng.permutation(n) + rng.random(n)) * (total / n))  # permuted: minibatches are alike
        probability = tree.get(slots) / total
        weight = (len(self) * probability) ** -self._exponents[1]
        return slots, (weight / weight.max()).astype(np.float32)

    def update_priorities(self, ids: IntArray, td_error: FloatArray) -> None:
        """Gives transitions the priority of their new TD errors; skips those that have left replay since.

        And errors that are not finite: one in the tree would make all sums above it so.
        """
        if self._tree is None:
            return
        ids, error = ids.reshape(-1), np.abs(td_error.reshape(-1))
        kept = (ids >= self.oldest) & np.isfinite(error) & ~self._is_dropped(ids)
        priority = (error[kept].astype(np.float64) + 1e-6) ** self._exponents[0]  # never 0: all stay reachable
        if len(priority):
            self._priority_max = max(self._priority_max, float(priority.max()))
            self._tree.set(ids[kept] % self.capacity, priority)

    def observations(self, n: int, rng: np.random.Generator) -> NDArray[Any]:
        """Returns up to n different observations [n, *shape] of those kept, uniformly, in their stored dtype."""
        if self._stack > 1:  # in front of a segment's own frames there are some that are no observation
            kept = np.arange(self.oldest, self.inserted)
            kept = kept[~self._is_dropped(kept)]
            chosen = rng.choice(kept, min(n, len(kept)), replace=False, shuffle=False)
            return self._seen(self._start[chosen % self.capacity], (len(chosen),))
        first = self._start[self.oldest % self.capacity] if len(self) else self._observed
        ids = first + rng.choice(self._observed - first, min(n, self._observed - first), replace=False, shuffle=False)
        for one in self._dropped:
            ids = ids[(ids < one.observed_first) | (ids >= one.observed_end)]
        return self._observation.take(ids % self._slots, axis=0)


def _slots(spec: specs.EnvSpec, capacity: int) -> int:
    return capacity + capacity // 8 + spec.observation.stack


def size_bytes(spec: specs.EnvSpec, capacity: int) -> int:
    """Returns the bytes that a full replay takes, all but its priorities."""
    return _slots(spec, capacity) * spec.observation.frame_bytes + capacity * (4 * spec.action.elements + 24)


def check_memory(spec: specs.EnvSpec, capacity: int, max_steps: int) -> None:
    """Looks whether a replay of this spec would fit into what memory is left, before it is asked for.

    Args:
        spec: Of what it holds.
        capacity: Transitions.
        max_steps: There will be no more: it never fills further.

    Raises:
        ConfigError: It would not; says what would.
    """
    available = psutil.virtual_memory().available
    if size_bytes(spec, min(capacity, max_steps)) > _SHARE * available:
        raise _too_large(spec, capacity, int(_SHARE * available / size_bytes(spec, 1000) * 1000))


def _too_large(spec: specs.EnvSpec, capacity: int, fit: int) -> errors.ConfigError:
    return errors.ConfigError(
        f"replay_capacity {capacity} of {spec.describe()} takes {size_bytes(spec, capacity) / 1e9:.1f} GB, "
        "which are not there",
        where="replay_capacity",
        todo=f"--replay-capacity {fit} would fit" if fit else "lower replay_capacity, or make observations smaller",
    )


def _write(ring: NDArray[Any], first_id: int, rows: NDArray[Any]) -> None:
    """Writes rows to the slots of ids first_id, first_id + 1, ...: one copy, or two where the ring ends."""
    at = first_id % len(ring)
    head = min(len(rows), len(ring) - at)
    ring[at : at + head] = rows[:head]
    ring[: len(rows) - head] = rows[head:]


def of(spec: specs.EnvSpec, settings: config.OffPolicyConfig) -> Replay:
    """Returns an empty replay, as an algorithm's settings want it."""
    return Replay(
        spec,
        settings.replay_capacity,
        settings.n_step,
        settings.gamma,
        prioritized=settings.prioritized,
        priority_exponent=settings.priority_exponent,
        importance_exponent=settings.importance_exponent,
    )
