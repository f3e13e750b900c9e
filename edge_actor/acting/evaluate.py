"""Scores a policy as it ships: greedy, seeded, on the runtime that runs it; and times it on what it saw.

Chance is the other end of every scale of returns, so it can be scored too.
"""

from __future__ import annotations

import io
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, messages, specs
from broker.program import storage
from edge_actor.environment import answers, env
from edge_actor.policies import policy

_log = logging.getLogger(__name__)
_TOLD_S = 10.0
"""Seconds between two lines that say how far it is."""
_TIMED_ROWS = 2000
"""Observations kept for timing: enough for a 99th percentile."""
_TIMED_BYTES = 16_000_000
"""Fewer of them where they are large."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of all episodes together, at which to give up: episodes may never end. 0: no limit."""

    max_steps: int = 0
    max_s: float = 0.0


NO_LIMITS = Limits()


class Kept:
    """Keeps observations with the number of their episode: all of them, or every n-th where those are many.

    Args:
        limit_bytes: When they would take more, every other one is dropped, and half as many are kept from there on.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._rows: list[NDArray[Any]] = []
        self._episodes: list[int] = []
        self._every, self._seen = 1, 0

    def add(self, row: NDArray[Any], episode: int) -> None:
        """Takes a row [1, *shape] into account."""
        number, self._seen = self._seen, self._seen + 1
        if number % self._every:
            return
        self._rows.append(row[0].copy())
        self._episodes.append(episode)
        if len(self._rows) * row.nbytes > self._limit_bytes:
            self._rows, self._episodes, self._every = self._rows[::2], self._episodes[::2], 2 * self._every

    def write(self, path: Path) -> None:
        """Writes an .npz file of `observations` [N, *shape] and `episode` [N]."""
        packed = io.BytesIO()
        np.savez(packed, observations=np.array(self._rows), episode=np.array(self._episodes, np.int32))
        storage.write_atomic(path, packed.getvalue(), mode=0o644)


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Returns of all episodes [episodes], and times in microseconds by name (`invoke_us_p50`, ...)."""

    episode_return: messages.FloatArray
    steps: int
    timing: dict[str, float]

    @property
    def values(self) -> dict[str, float]:
        """All that is one number, by name."""
        return {
            "return_mean": float(self.episode_return.mean()),
            "return_std": float(self.episode_return.std()),
            "episodes": float(len(self.episode_return)),
            "steps": float(self.steps),
            **self.timing,
        }


def run(
    acting: policy.Policy,
    environment: env.Environment,
    episodes: int,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
    limits: Limits = NO_LIMITS,
    kept: Kept | None = None,
) -> Score | None:
    """Plays greedily; episode k starts from `reset(seed=seed + k)`.

    Args:
        acting: With batch 1.
        environment: A single one; left at the end of an episode.
        episodes: At least 1.
        seed: Of the first episode.
        stop: Asked before each step.
        limits: When to give up.
        kept: Gets every observation.

    Returns:
        None if `stop` said so.

    Raises:
        EnvironmentFailure: The episodes did not end within the limits.
    """
    played = _play(acting.act, environment, episodes, seed, stop, limits, kept)
    if played is None:
        return None
    returns, steps, seen = played
    return Score(returns, steps, measure(acting, seen))


def run_at_random(environment: env.Environment, episodes: int, seed: int, limits: Limits = NO_LIMITS) -> Score:
    """Plays actions drawn uniformly: from all choices, or from within the bounds. Resets as `run` does.

    Args:
        environment: A single one.
        episodes: At least 1.
        seed: Of the first episode, and of the actions.
        limits: When to give up.

    Raises:
        EnvironmentFailure: The episodes did not end within the limits.
    """
    played = _play(_at_random(environment.spec.action, seed), environment, episodes, seed, lambda: False, limits)
    assert played is not None
    returns, steps, _ = played
    return Score(returns, steps, {})


def _at_random(action: specs.ActionSpec, seed: int) -> policy.Act:
    rng = np.random.default_rng(seed)
    if action.kind == "discrete":
        return lambda row: int(rng.integers(action.n))
    if action.kind == "multi_discrete":
        return lambda row: rng.integers(0, action.choices)
    low, high = (np.array(bound, np.float32).reshape(action.shape) for bound in (action.low, action.high))
    return lambda row: rng.uniform(low, high).astype(np.float32)


def _play(
    act: policy.Act,
    environment: env.Environment,
    episodes: int,
    seed: int,
    stop: Callable[[], bool],
    limits: Limits,
    kept: Kept | None = None,
) -> tuple[messages.FloatArray, int, list[NDArray[Any]]] | None:
    """Returns [episodes], steps, and the first observations [1, *shape] that were acted on; None if `stop` said so."""
    observation_spec = environment.spec.observation
    step, reset = (answers.carried(method, observation_spec) for method in (environment.step, environment.reset))
    to_env, clock = environment.to_env, time.monotonic
    seen_now, row = environment.seen, np.zeros((1, *observation_spec.shape), observation_spec.dtype)
    most_seen = min(_TIMED_ROWS, max(1, _TIMED_BYTES // row.nbytes))
    seen: list[NDArray[Any]] = []
    returns: list[float] = []
    steps = 0
    max_steps, max_s = limits.max_steps or math.inf, limits.max_s or math.inf
    began = told = clock()
    for episode in range(episodes):
        frame = reset(seed=seed + episode)[0]
        row[...] = frame if seen_now is None else seen_now
        total, over = 0.0, False
        while not over:
            if stop():
                return None
            if steps >= max_steps or clock() - began >= max_s:
                raise errors.EnvironmentFailure(
                    f"gave up after {steps} steps and {clock() - began:.1f} s in episode {episode + 1} of {episodes}",
                    where=environment.name,
                    todo="let its episodes end (Gymnasium's TimeLimit truncates them), or raise the limits",
                )
            if len(seen) < most_seen:
                seen.append(row.copy())
            if kept is not None:
                kept.add(row, episode)
            frame, reward, terminated, truncated, _ = step(to_env(act(row)))
            row[...] = frame if seen_now is None else seen_now
            total += answers.reward(reward)
            over = answers.over(terminated) | answers.over(truncated)
            steps += 1
        returns.append(total)
        if clock() - told >= _TOLD_S:
            told = clock()
            _log.info("played %d of %d episodes: return %.5g on average", episode + 1, episodes, np.mean(returns))
    return np.array(returns, np.float32), steps, seen


def measure(acting: policy.Policy, rows: list[NDArray[Any]]) -> dict[str, float]:
    """Returns what `times` says of a policy."""
    return times(acting.act, acting.interpreter.invoke, rows)


def times(act: Callable[[Any], object], invoke: Callable[[], object], rows: Sequence[NDArray[Any]]) -> dict[str, float]:
    """Measures one inference over `rows`, in microseconds, clock included (0.06 us).

    `invoke` is the network alone; `observation_to_action` all from a row to the action.
    """
    clock = time.perf_counter_ns
    taken: dict[str, list[int]] = {"invoke": [], "observation_to_action": []}
    for row in rows:
        begin = clock()
        act(row)
        middle = clock()
        invoke()
        end = clock()
        taken["observation_to_action"].append(middle - begin)
        taken["invoke"].append(end - middle)
    return {
        f"{name}_us_p{percent}": round(float(np.percentile(values, percent)) / 1000.0, 3)
        for name, values in taken.items()
        for percent in (50, 99)
    }
