"""Records what happens, in arrays made once, and cuts it into segments.

Row t holds the observation before step t of all N environments, and what step t did. Environments reset on the *next*
step (Gymnasium's NEXT_STEP; rollout.py makes a single environment do the same): after an end, row t + 1 holds the last
observation, and step t + 1 is a dummy that only resets. So both the observation after a truncation and the first one of
the next episode have a row, dummies separate the episodes, and a segment is simply a run of rows that are kept.

    row         0    1    2    3    4    5          step 2 ended an episode; 3 is its dummy, kept are 0-2 and 4-
    observation o0   o1   o2   o3   o0'  o1'        segments (o0..o3 | a0 a1 a2), (o0' o1' ... | a0' ...)

What is observed are frames. Where the policy sees a stack of them (specs.ObservationSpec), rows before row 0 hold those
that a segment which goes on begins with; in front of an episode's first frame that one is repeated.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, messages, specs
from edge_actor.environment import answers

_MESSAGE_BYTES = 2_000_000
"""The most bytes of a message, unless one row takes more; with large frames it holds fewer steps than was asked for.
Small, as a slow Wi-Fi carries it whole before the learner sees any of it, and memory is held for as much."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The content of one message; the fields of `messages.Experience` of the same names.

    `finished` has the returns of all episodes that ended, recorded or not.
    """

    length: NDArray[np.int32]
    env_index: NDArray[np.int32]
    row: NDArray[np.int32]
    terminated: NDArray[np.uint8]
    truncated: NDArray[np.uint8]
    episode_return: messages.FloatArray
    episode_length: NDArray[np.int32]
    observation: NDArray[Any]
    action: NDArray[Any]
    reward: messages.FloatArray
    log_prob: messages.FloatArray
    draw: int
    finished: messages.FloatArray

    @property
    def steps(self) -> int:
        """Recorded steps."""
        return len(self.reward)


class Trajectory:
    """Rows of steps since the last flush.

    Attributes:
        rows: Views [N, *frame_shape], one per row and one behind: record, and without a stack network input in one.
        cells: With one environment, the same as views [*frame_shape].
        views: The same as memoryviews, where frames have one dimension: to those nothing is assigned but what has
            the same shape and type, and in less time than to an array.
        action, reward, terminated, truncated: [T, N, ...], filled by rollout.py. Discrete actions are intp here. Each
            has a list of its rows beside it, as slicing an array makes a view each time.
        log_prob: [T, N]; given out if `sampled`, which a stochastic head sets.
        draw: Number of the random row (broker/contract/acting/draws.py) that belongs to row 0; the next ones belong to
            those that follow, as a break among them begins a message.
        used: Rows filled. ended: Environments whose next step only resets [N].
        steps: Real steps in the rows, without dummies. recorded: Those that a flush will give out.
        recording: Whether steps are recorded; change it only after a flush.
        dtype: Of the observations as the environment gives them, by the first one.
        clips: Whether rollout.py is to clip observations, since one was beyond specs.MAX_MAGNITUDE.

    Raises:
        SpecError: One row of so many environments does not fit into a message.
    """

    def __init__(self, spec: specs.EnvSpec, n_envs: int, message_steps: int) -> None:
        self.spec = spec
        self.n_envs = n_envs
        self.recording = True
        self.clips = False
        self.dtype = np.dtype(spec.observation.dtype)
        self.shape = spec.observation.frame_shape if n_envs == 1 else (n_envs, *spec.observation.frame_shape)
        self._before = spec.observation.stack - 1  # rows in front of row 0
        self._record_fraction = 1.0
        self.ended = np.zeros(n_envs, bool)
        self._return = np.zeros(n_envs)  # of the episode in progress, up to the last flush
        self._length = np.zeros(n_envs, np.int64)
        self._episode = np.zeros(n_envs, np.int64)  # its number, from 0
        self.used = self.steps = self.recorded = self.draw = 0
        self.sampled = False
        self._message_steps = 0
        self._allocate(message_steps)

    def configure(self, message_steps: int, record_fraction: float) -> None:
        """Follows an assignment. Only when empty.

        Args:
            message_steps: Steps after which it is full.
            record_fraction: Share of the episodes that is recorded, whole and evenly spread.
        """
        self._record_fraction = record_fraction
        if message_steps != self._message_steps:
            last = self._frames[: self._before + 1].copy()
            self._allocate(message_steps)
            self._frames[: self._before + 1] = last

    @property
    def free(self) -> int:
        """Rows that are left."""
        return self.capacity - self.used

    def start(self, observation: Any) -> None:
        """Begins new episodes everywhere, from frames [N, *frame_shape] ([*frame_shape] for one). Only when empty.

        Raises:
            EnvironmentFailure: They are not what the spec says, or not finite.
        """
        first = answers.observation(observation, self.shape, self.spec.observation.dtype)
        with np.errstate(over="ignore"):
            self._observation[0] = first
        if self._odd_observations(self._observation[:1]) is not None:
            raise errors.EnvironmentFailure(f"an observation of reset is not finite: {answers.shown(first)}")
        self.dtype = first.dtype
        self._episode += self._length > 0
        self.ended[:] = False
        self._return[:] = 0.0
        self._length[:] = 0

    def advance(self, rows: int, rewards: Sequence[Any] = ()) -> None:
        """Accepts `rows` rows that were just filled: checks them, marks dummies, and what is recorded.

        Args:
            rows: How many.
            rewards: As the environment gave them, for the error.

        Raises:
            EnvironmentFailure: An observation or a reward is not finite, or a reward too large. The rows before it are
                accepted, the others are not.
        """
        first = self.used
        reward, observation = self.reward[first : first + rows], self._observation[first + 1 : first + 1 + rows]
        odd_reward: NDArray[np.bool_] = np.zeros(rows, bool)
        if not np.vdot(reward, reward) <= specs.MAX_MAGNITUDE**2:  # one pass, which NaN and infinity do not pass
            odd_reward = ~np.all(np.abs(reward) <= specs.MAX_MAGNITUDE, axis=1)
        odd_observation = self._odd_observations(observation)
        if odd_observation is None and not odd_reward.any():
            self._accept(rows)
            return
        odd = odd_reward if odd_observation is None else odd_reward | odd_observation
        at = int(odd.argmax())
        if odd_reward[at]:
            given = answers.shown(rewards[at] if rewards else reward[at])
            what = f"a reward is {given}, not a number within ±{specs.MAX_MAGNITUDE:g}"
        else:
            what = f"an observation is not finite: {answers.shown(observation[at])}"
        self._accept(at)
        raise errors.EnvironmentFailure(what)

    def _odd_observations(self, rows: NDArray[Any]) -> NDArray[np.bool_] | None:
        """Returns which of these rows are not finite [T]; None if all are.

        Finite observations that are too large are clipped, and `clips` asks for that in all steps to come: the policy
        has seen those of this burst as they were.
        """
        if self.spec.observation.dtype != "float32":
            return None
        flat = rows.reshape(-1)
        if np.vdot(flat, flat) <= specs.MAX_MAGNITUDE**2:
            return None
        finite = np.isfinite(rows)
        if (np.abs(rows, where=finite, out=np.zeros_like(rows)) > specs.MAX_MAGNITUDE).any():
            self.clips = True
            np.clip(rows, -specs.MAX_MAGNITUDE, specs.MAX_MAGNITUDE, out=rows, where=finite)
        return None if finite.all() else ~finite.reshape(len(rows), -1).all(1)

    def _accept(self, rows: int) -> None:
        first, self.used = self.used, self.used + rows
        window = slice(first, self.used)
        ends = self.terminated[window] | self.truncated[window]
        dummy = self._dummy[window]
        dummy[:1] = self.ended
        dummy[1:] = ends[:-1]
        if rows:
            self.ended[:] = ends[-1]
        real = rows * self.n_envs - int(np.count_nonzero(dummy))
        self.steps += real
        if not self.recording:
            return
        if self._record_fraction >= 1.0:
            self.recorded += real
            return
        # Episode k is recorded if k * fraction passes a whole number in it: evenly spread, and the same in every run
        episode = self._episode + np.cumsum(dummy, axis=0)
        f = self._record_fraction
        keep = (np.floor((episode + 1) * f) > np.floor(episode * f)) & ~dummy
        self._episode = episode[-1]
        self._keep[window] = keep
        self.recorded += int(np.count_nonzero(keep))

    def cut(self) -> None:
        """Truncates what is in progress at its last observation: the environment broke."""
        if self.used:
            last = self.used - 1
            self.truncated[last] |= ~(self._dummy[last] | self.terminated[last])

    def flush(self) -> Segments:
        """Returns everything since the last flush, env-major, and starts anew at the last observations."""
        used, n = self.used, self.n_envs
        real = ~self._dummy[:used].T  # [N, T] from here on: env-major, as segments are
        edges = np.zeros((n, used + 2), np.int8)
        edges[:, 1:-1] = real
        change = np.diff(edges).ravel()  # flat, as nonzero() is ten times slower in two dimensions
        env, begin = np.divmod(np.flatnonzero(change == 1), used + 1)
        end = np.flatnonzero(change == -1) % (used + 1)  # one behind the last step
        length = end - begin
        reward = self.reward[:used].T[real]
        starts = np.cumsum(length) - length
        returns = np.add.reduceat(reward, starts, dtype=np.float64) if len(starts) else np.zeros(0)
        lengths = length.copy()
        goes_on = begin == 0  # in row 0 a segment continues the episode of the flush before
        first = begin  # rows of the earliest frames that are here of each one's episode
        if self._before:
            first = np.where(goes_on, -np.minimum(self._length[env], self._before), begin)
        returns[goes_on] += self._return[env[goes_on]]
        lengths[goes_on] += self._length[env[goes_on]]
        terminated = self.terminated[end - 1, env]
        truncated = self.truncated[end - 1, env]
        over = terminated | truncated
        if used:  # what the next flush must know: only a segment that is not over reaches the last row
            self._return[:], self._length[:] = 0.0, 0
            self._return[env[~over]], self._length[env[~over]] = returns[~over], lengths[~over]

        recorded = self._recorded_segments(env, begin)
        kept = real
        if not recorded.all():
            kept = real.copy()
            kept[real] = np.repeat(recorded, length)
        action = self.action[:used].swapaxes(0, 1)[kept]
        segments = Segments(
            length=length[recorded].astype(np.int32),
            env_index=env[recorded].astype(np.int32),
            row=begin[recorded].astype(np.int32),
            terminated=terminated[recorded].astype(np.uint8),
            truncated=(truncated & ~terminated)[recorded].astype(np.uint8),
            episode_return=returns[recorded].astype(np.float32),
            episode_length=lengths[recorded].astype(np.int32),
            observation=self._observed(env[recorded], begin[recorded], length[recorded], first[recorded]),
            action=action.astype(self.spec.action.dtype, copy=False),
            reward=self.reward[:used].T[kept],
            log_prob=self.log_prob[:used].T[kept] if self.sampled else np.zeros(0, np.float32),
            draw=self.draw,
            finished=returns[over].astype(np.float32),
        )
        self._frames[: self._before + 1] = self._frames[used : used + self._before + 1]
        self.used = self.steps = self.recorded = 0
        self.sampled = False
        return segments

    def _observed(
        self, env: NDArray[np.intp], begin: NDArray[np.intp], length: NDArray[np.intp], first: NDArray[np.intp]
    ) -> NDArray[Any]:
        """Returns the frames of segments, one behind the other: each has those in front of it that the policy saw.

        Args:
            env: Environment of each segment [S].
            begin: Its first row [S].
            length: Its steps [S].
            first: The row before which there is no frame of its episode [S].
        """
        count, n = length + self.spec.observation.stack, self.n_envs
        end = np.cumsum(count)
        at = np.arange(0, n * int(count.sum()), n) + np.repeat((begin - end + count) * n + env, count)
        if self._before:
            at = np.maximum(at, np.repeat((first + self._before) * n + env, count))
        found: NDArray[Any] = self._frames.reshape(-1, *self.spec.observation.frame_shape).take(at, axis=0)
        return found

    def _recorded_segments(self, env: NDArray[np.intp], begin: NDArray[np.intp]) -> NDArray[np.bool_]:
        if self.recording and self._record_fraction < 1.0:
            return self._keep[begin, env]
        return np.full(len(env), self.recording)

    def _allocate(self, message_steps: int) -> None:
        self._message_steps = message_steps
        n, observation, action = self.n_envs, self.spec.observation, self.spec.action
        one_bytes = self.spec.experience_bytes(1, n)
        if one_bytes > specs.MAX_EXPERIENCE_BYTES:
            raise errors.SpecError(
                f"one step of {n} environments makes a message of {one_bytes} bytes, "
                f"of {specs.MAX_EXPERIENCE_BYTES} at most",
                where=self.spec.describe(),
                todo="run fewer at once: --envs",
            )
        wanted = range(-(-message_steps // n) + 1)
        rows = max(1, bisect.bisect(wanted, _MESSAGE_BYTES, key=lambda k: self.spec.experience_bytes(k, n)) - 1)
        self.capacity = rows
        self._frames: NDArray[Any] = np.zeros((self._before + rows + 1, n, *observation.frame_shape), observation.dtype)
        self._observation = self._frames[self._before :]
        self.rows = list(self._observation)
        self.cells = [row[0] for row in self.rows]
        flat = n == 1 and len(observation.frame_shape) == 1
        self.views = [memoryview(cell) for cell in self.cells] if flat else []
        kind = np.float32 if action.kind == "continuous" else np.intp
        self.action: NDArray[Any] = np.zeros((rows, n, *action.shape), kind)
        self.reward = np.zeros((rows, n), np.float32)
        self.terminated, self.truncated = np.zeros((rows, n), bool), np.zeros((rows, n), bool)
        self.log_prob = np.zeros((rows, n), np.float32)
        self.action_rows, self.reward_rows = list(self.action), list(self.reward)
        self.terminated_rows, self.truncated_rows = list(self.terminated), list(self.truncated)
        self._dummy, self._keep = np.zeros((rows, n), bool), np.zeros((rows, n), bool)
