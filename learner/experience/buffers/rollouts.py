"""Experience that is learned from once: the steps of one phase after another, with what the acting policy said of them.

Steps wait in the order in which they come. A phase takes the oldest so many that the newest policy, or one of few
versions before it, chose; what is older by then is passed over and counted. Whatever a phase took, or passed over, is
kept for a while only to find int8 ranges by, and to compare policies on.

Messages cut episodes anywhere. A segment that goes on in the next message of its boot is joined to that again: its last
observation is the first one there, so both have one value, and only `is_last` says where a sequence ends. So the
advantage of a step does not depend on where a message was cut. What does not follow on (a message is missing, the
environment broke, or the phase was full) ends a sequence, which bootstraps from its own last observation.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker.contract import frames, messages, specs
from learner import config

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """N steps in sequences, laid end to end, of P pieces of messages.

    Step i starts from observation `at[i]` and comes to `at[i] + 1`.
    """

    observation: NDArray[Any]  # [N + P, *shape]
    at: IntArray  # [N]
    action: NDArray[Any]  # [N] int32, or [N, *shape] float32
    reward: FloatArray  # [N]
    log_prob: FloatArray  # [N], by the policy that acted, as its actor worked it out
    discount: FloatArray  # [N], of the value behind the step; 0 where the episode terminated
    is_last: NDArray[np.bool_]  # [N], the step after belongs to another sequence, or there is none
    ids: IntArray  # [N]
    minibatches: IntArray  # [K, B], the steps of each

    @property
    def numbers(self) -> tuple[NDArray[Any], ...]:
        """See `memory.Batch`."""
        return self.observation[self.at], self.observation[self.at + 1], self.reward, self.log_prob


class _Piece(NamedTuple):
    """Steps `start` to `end` - 1 of a message, which lie in its segment `segment`; they begin with the oldest left."""

    held: _Held
    segment: int
    start: int
    end: int

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What pieces are sorted by, so that one is followed by the one that goes on with it."""
        message = self.held.message
        return message.boot, int(message.env_index[self.segment]), message.seq, self.segment

    @property
    def is_whole(self) -> bool:
        """Returns whether it reaches the end of its segment."""
        return self.end == int(self.held.ends[self.segment])

    @property
    def observations(self) -> NDArray[Any]:
        """The observations of its steps, and the one behind them."""
        return self.held.observations(self.segment, self.start, self.end)

    def goes_on_in(self, other: _Piece) -> bool:
        """Returns whether the step after this piece's last one is the first of the other."""
        mine, theirs = self.held.message, other.held.message
        return (
            self.is_whole
            and not (mine.terminated[self.segment] or mine.truncated[self.segment])
            and self.place[:2] == other.place[:2]
            and mine.seq + 1 == theirs.seq
            and mine.episode_length[self.segment] == theirs.episode_length[other.segment] - theirs.length[other.segment]
            and np.array_equal(
                self.held.observations(self.segment, self.end, self.end),
                other.held.observations(other.segment, other.start, other.start),
            )
        )


class _Held:
    """A message that is kept.

    Attributes:
        first: The id of its first step.
        ends: Per segment, the number of steps up to its end.
        next: Its first step that still waits; what is no use waits no longer.
        is_dropped: Whether nothing of it may be given out.
    """

    __slots__ = ("ends", "first", "is_dropped", "message", "next", "stack")

    def __init__(self, message: messages.Experience, first: int, stack: int) -> None:
        self.message, self.first, self.stack = message, first, stack
        self.ends = np.cumsum(message.length)
        self.next, self.is_dropped = 0, False

    @property
    def steps(self) -> int:
        return len(self.message.reward)

    @property
    def waiting(self) -> int:
        return self.steps - self.next

    def observations(self, segment: int, start: int, end: int) -> NDArray[Any]:
        """Returns the observations of its steps `start` to `end` - 1, which lie in a segment, and the one behind."""
        first, last = start + segment * self.stack, end + (segment + 1) * self.stack
        return frames.stacked(self.message.observation[first:last], self.stack)

    def seen_at(self, steps: IntArray) -> NDArray[Any]:
        """Returns the observations [N, *shape] that its steps [N] start from."""
        newest = steps + (np.searchsorted(self.ends, steps, side="right") + 1) * self.stack - 1
        seen = self.message.observation
        return np.concatenate([seen[newest - age] for age in reversed(range(self.stack))], axis=-1)

    def pieces(self, steps: int) -> Iterator[_Piece]:
        """Yields the pieces of the next `steps` steps, which then wait no longer."""
        end = self.next + steps
        while self.next < end:
            segment = int(np.searchsorted(self.ends, self.next, side="right"))
            start, self.next = self.next, min(end, int(self.ends[segment]))
            yield _Piece(self, segment, start, self.next)


class Rollouts:
    """Keeps messages; gives out phases.

    Args:
        stack: Frames in an observation, of which messages hold each once.
        capacity: Steps that are kept.
        gamma: Discount per step.
        max_lag: The most versions by which the policy of a step may be older than the newest, when it is given out.

    Attributes:
        inserted: Steps ever inserted.
        steps_stale: Steps that were too old when their phase came, or had no room.
        steps_unsampled: Steps of uniformly random actions, and of no known log-probability, which nothing learns from.
    """

    def __init__(self, stack: int, capacity: int, gamma: float, max_lag: int) -> None:
        self._stack, self.capacity = stack, capacity
        self.inserted = 0
        self.steps_stale = self.steps_unsampled = 0
        self._gamma, self._max_lag = gamma, max_lag
        self._held: collections.deque[_Held] = collections.deque()
        # Those that may have steps left to learn from: far fewer than are kept, and gone through in every pass
        self._fresh: collections.deque[_Held] = collections.deque()
        self._kept = self._waiting = 0

    def __len__(self) -> int:
        """Returns the number of steps that wait for their phase."""
        return self._waiting

    @property
    def oldest(self) -> int:
        """The id of the oldest step that is kept."""
        return self._held[0].first if self._held else self.inserted

    def fits(self, steps: int, segments: int) -> bool:
        """Returns whether a message of so many steps can be inserted; however many segments they are in."""
        return steps <= self.capacity and segments <= steps

    def insert(self, *arrived: messages.Experience) -> int:
        """Adds messages; returns the number of their steps. The oldest ones leave where there is no room."""
        before = self.inserted
        for message in arrived:
            held = _Held(message, self.inserted, self._stack)
            self._held.append(held)
            self._fresh.append(held)
            self.inserted += held.steps
            self._kept += held.steps
            self._waiting += held.steps
        while self._kept > self.capacity and len(self._held) > 1:
            left = self._held.popleft()
            self._kept -= left.steps
            self.steps_stale += self._pass_over(left)
            if self._fresh and self._fresh[0] is left:
                self._fresh.popleft()
        return self.inserted - before

    def drop(self, first: int, end: int) -> None:
        """Never gives out steps `first` to `end` - 1 again, which one message brought, nor its observations."""
        for held in self._held:
            if first <= held.first < end:
                held.is_dropped = True
                self._pass_over(held)

    @property
    def has_observations(self) -> bool:
        """Returns whether `observations` has any to give; also between two phases, when no step waits."""
        return any(not held.is_dropped for held in self._held)

    def observations(self, n: int, rng: np.random.Generator) -> NDArray[Any]:
        """Returns up to n different observations [n, *shape] that steps kept start from, uniformly, as they are stored.

        Raises:
            IndexError: None are kept.
        """
        kept = [held for held in self._held if not held.is_dropped]
        ends = np.cumsum([held.steps for held in kept])
        total = int(ends[-1])
        chosen = np.sort(rng.choice(total, min(n, total), replace=False, shuffle=False))
        spans = itertools.pairwise(np.searchsorted(chosen, [0, *ends]))
        return np.concatenate(
            [held.seen_at(chosen[a:b] - end + held.steps) for held, end, (a, b) in zip(kept, ends, spans, strict=True)]
        )

    def usable(self, newest: messages.Order, enough: float = math.inf) -> int:
        """Returns how many of the steps that wait may be learned from by now; passes over what may not.

        Args:
            newest: The newest policy.
            enough: It looks no further than until it has found so many.
        """
        usable = 0
        while self._fresh and not self._fresh[0].waiting:
            self._fresh.popleft()
        for held in self._fresh:
            if usable >= enough:
                break
            if not held.waiting:
                continue
            message = held.message
            if not message.version or not len(message.log_prob):
                self.steps_unsampled += self._pass_over(held)
            elif message.epoch != newest.epoch or message.version < newest.version - self._max_lag:
                self.steps_stale += self._pass_over(held)
            else:
                usable += held.waiting
        return usable

    def draw(self, steps: int, epochs: int, batch_size: int, newest: messages.Order, rng: np.random.Generator) -> Phase:
        """Gives out the oldest steps that may be learned from, in minibatches; each step once in its life.

        Args:
            steps: A multiple of `batch_size`.
            epochs: Times that each is in a minibatch.
            batch_size: Steps of a minibatch.
            newest: The newest policy.
            rng: Shuffles.

        Raises:
            IndexError: Fewer may be learned from.
        """
        if self.usable(newest, steps) < steps:
            raise IndexError(f"fewer than {steps} steps wait")
        left, pieces = steps, list[_Piece]()
        for held in self._fresh:
            if not left:
                break
            some = min(left, held.waiting)
            pieces += held.pieces(some)
            left -= some
        self._waiting -= steps
        pieces.sort(key=lambda piece: piece.place)
        if epochs * steps == batch_size:
            return self._phase(pieces, None)
        order = np.stack([rng.permutation(steps) for _ in range(epochs)])
        return self._phase(pieces, order.reshape(-1, batch_size))

    def _phase(self, pieces: list[_Piece], minibatches: IntArray | None) -> Phase:
        """Joins pieces. Without minibatches all steps are one, in their order: another took a quarter of a draw."""
        length = [piece.end - piece.start for piece in pieces]
        steps, last = np.arange(sum(length)), np.array([*itertools.accumulate(length)]) - 1
        goes_on = [one.goes_on_in(other) for one, other in itertools.pairwise(pieces)]
        discount, is_last = np.full(len(steps), self._gamma, np.float32), np.zeros(len(steps), bool)
        over = [bool(piece.is_whole and piece.held.message.terminated[piece.segment]) for piece in pieces]
        discount[last[over]] = 0.0
        is_last[last] = ~np.array([*goes_on, False])
        taken = [(piece.held.message, slice(piece.start, piece.end)) for piece in pieces]
        return Phase(
            observation=np.concatenate([piece.observations for piece in pieces]),
            at=steps + np.repeat(np.arange(len(pieces)), length),
            action=np.concatenate([message.action[some] for message, some in taken]),
            reward=np.concatenate([message.reward[some] for message, some in taken]),
            log_prob=np.concatenate([message.log_prob[some] for message, some in taken]),
            discount=discount,
            is_last=is_last,
            ids=np.concatenate([piece.held.first + np.arange(piece.start, piece.end) for piece in pieces]),
            minibatches=steps[np.newaxis] if minibatches is None else minibatches,
        )

    def _pass_over(self, held: _Held) -> int:
        """Lets nothing of a message wait any longer; returns how many of its steps did."""
        waited = held.waiting
        held.next = held.steps
        self._waiting -= waited
        return waited

    def metrics(self) -> dict[str, float]:
        """Returns the counts of steps that nothing was learned from, for a row of metrics."""
        return {"steps_stale": self.steps_stale, "steps_unsampled": self.steps_unsampled}


def of(spec: specs.EnvSpec, settings: config.OnPolicyConfig) -> Rollouts:
    """Returns an empty store, as an algorithm's settings want it."""
    return Rollouts(spec.observation.stack, settings.capacity, settings.gamma, settings.max_rollout_lag)
