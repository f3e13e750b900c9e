"""The hot loops: environment, policy, exploration and record, burst by burst.

Nothing here allocates arrays, takes a lock or touches the network, and few rows read a clock (step_times.py): a loop
goes through its rows in pieces, and in a few it calls environment and policy by functions that time them.
Both loops act by Gymnasium's NEXT_STEP rule: the step after an end resets and does nothing else (trajectory.py says
why).
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from broker.contract import errors
from edge_actor.acting import exploration, step_times
from edge_actor.environment import answers, env
from edge_actor.experience import trajectory
from edge_actor.policies import policy

clock = time.perf_counter


def burst(
    environment: env.Environment,
    acting: policy.Policy | None,
    explorer: exploration.Explorer,
    record: trajectory.Trajectory,
    rows: int,
    *,
    until_end: bool = False,
    times: step_times.StepTimes | None = None,
) -> None:
    """Takes `rows` steps, or fewer where the record or the block of random rows ends.

    Args:
        environment: One environment or several.
        acting: Chooses the actions that are not explored; None acts uniformly at random.
        explorer: Random rows.
        record: Where the steps go. If the environment raises or answers nonsense, all steps before are in it.
        rows: At least 1.
        until_end: Stop at the end of an episode, where there is only one environment.
        times: Told what it takes.
    """
    began, times = clock(), times or step_times.StepTimes()
    rows = min(rows, record.free, explorer.left)
    if acting is not None and acting.stochastic:
        rows = min(rows, explorer.noise_left)
    if not record.used:
        record.draw = explorer.row
    goal = record.used + rows
    try:
        if acting is None:
            _loop(environment)(environment, _unasked, explorer.draw_random(rows), record, _pass, times)
        elif acting.stochastic:
            _sampled(environment, acting, explorer, record, rows, times, until_end)
        elif acting.head == "deterministic" and explorer.perturbs:
            drawn, noise = explorer.draw_perturbed(rows)
            unused = iter(noise)
            act = acting.perturbed(unused)
            _loop(environment)(environment, act, drawn, record, functools.partial(next, unused), times, until_end)
        else:
            _loop(environment)(environment, acting.act, explorer.draw(rows), record, _pass, times, until_end)
        explorer.give_back(goal - record.used)
    finally:
        times.note_burst(clock() - began)


def run(
    environment: env.Environment,
    actions: Sequence[Any],
    record: trajectory.Trajectory,
    *,
    times: step_times.StepTimes | None = None,
) -> None:
    """Takes a step with each of `actions`, for which the record must have rows; `times` is told what that takes."""
    began, times = clock(), times or step_times.StepTimes()
    try:
        _loop(environment)(environment, _unasked, actions, record, _pass, times)
    finally:
        times.note_burst(clock() - began)


def _sampled(
    environment: env.Environment,
    acting: policy.Policy,
    explorer: exploration.Explorer,
    record: trajectory.Trajectory,
    rows: int,
    times: step_times.StepTimes,
    until_end: bool,
) -> None:
    first, samples = record.used, acting.sampler(explorer.draw_noise(rows, acting.head))
    try:
        _loop(environment)(environment, samples.act, [None] * rows, record, samples.skip, times, until_end)
    finally:
        done = slice(first, record.used)
        record.log_prob[done] = samples.log_probs(record.action[done])
        record.sampled = True


def _one(
    environment: env.Environment,
    act: policy.Act,
    draws: Sequence[Any],
    record: trajectory.Trajectory,
    skip: Callable[[], Any],
    times: step_times.StepTimes,
    until_end: bool = False,
) -> None:
    step, reset, to_env = environment.step, environment.reset, environment.to_env
    if record.clips:
        step, reset = answers.clipped(step), answers.clipped(reset)
    fitted, over = functools.partial(answers.fitted, spec=record.spec.observation), answers.over
    cells: Sequence[Any] = record.views
    whole: Any = slice(None)
    if not cells or record.dtype != record.spec.observation.dtype:
        step, cells, whole = answers.fitting(step, record.spec.observation), record.cells, ...
    first, nothing = record.used, environment.no_action
    ended = bool(record.ended[0])
    ends: list[tuple[int, bool, bool]] = []
    actions: list[Any] = []
    rewards: list[Any] = []
    took, gained = actions.append, rewards.append
    last = first + len(draws)
    rows: Iterator[Any] = iter(record.rows[first:last])
    if environment.seen is not None:
        rows = itertools.repeat(environment.seen)
    next_cells = iter(cells[first + 1 : last + 1])
    plan, at = times.plan(len(draws)), 0
    untimed = act, step
    timed = times.watched(act, step) if len(plan) > 1 or plan[0][0] else untimed
    resets: list[float] = []
    began = clock()
    try:
        for is_timed, some in plan:
            act, step = timed if is_timed else untimed
            piece, at = draws[at : at + some], at + some
            resets_before, piece_began = len(resets), clock()
            for drawn, row, cell in zip(piece, rows, next_cells, strict=False):  # ends with the piece, which is first
                if ended:
                    reset_began = clock()
                    seen = reset()[0]
                    resets.append(clock() - reset_began)
                    cell[whole] = fitted(seen)
                    if drawn is None:
                        skip()
                    took(nothing)
                    gained(0.0)
                    ended = False
                    continue
                action = act(row) if drawn is None else drawn
                seen, reward, terminated, truncated, _ = step(to_env(action))
                try:
                    cell[whole] = seen
                except (TypeError, ValueError):  # of a memoryview: it is not exactly what it should be
                    cell[whole] = fitted(seen)
                if terminated is False and truncated is False:
                    took(action)
                    gained(reward)
                    continue
                terminated, truncated = over(terminated), over(truncated)
                took(action)
                gained(reward)
                if terminated or truncated:
                    ends.append((len(rewards) - 1, terminated, truncated))
                    ended = True
                    if until_end:
                        break
            if is_timed:
                times.note_piece(clock() - piece_began - sum(resets[resets_before:]))
            if ends and until_end:
                break
    finally:
        times.note_loop(len(rewards), clock() - began, resets)
        window = slice(first, first + len(rewards))
        if rewards:
            record.action[window, 0] = actions
            with np.errstate(over="ignore"):  # what becomes infinite is found there too
                record.reward[window, 0] = answers.rewards(rewards)
        record.terminated[window] = record.truncated[window] = False
        for row_index, terminated, truncated in ends:
            record.terminated[first + row_index] = terminated
            record.truncated[first + row_index] = truncated
        record.advance(len(rewards), rewards)


def _several(
    environment: env.Environment,
    act: policy.Act,
    draws: Sequence[Any],
    record: trajectory.Trajectory,
    skip: Callable[[], Any],
    times: step_times.StepTimes,
    until_end: bool = False,
) -> None:
    step, to_env = environment.step, environment.to_env
    if record.clips:
        step = answers.clipped(step)
    array, shape, dtype, each = np.ndarray, record.shape, record.dtype, (record.n_envs,)
    first = record.used
    done = 0
    window = slice(first, first + len(draws))
    rows = zip(
        record.rows[window] if environment.seen is None else itertools.repeat(environment.seen, len(draws)),
        record.rows[first + 1 : first + 1 + len(draws)],
        record.action_rows[window],
        record.reward_rows[window],
        record.terminated_rows[window],
        record.truncated_rows[window],
        draws,
        strict=True,
    )
    plan, untimed = times.plan(len(draws)), (act, step)
    timed = times.watched(act, step) if len(plan) > 1 or plan[0][0] else untimed
    began = clock()
    try:
        for is_timed, some in plan:
            act, step = timed if is_timed else untimed
            piece_began = clock()
            for row, cell, action, reward, terminated, truncated, drawn in itertools.islice(rows, some):
                chosen = act(row) if drawn is None else drawn
                seen, gained, over, cut, _ = step(to_env(chosen))
                if type(seen) is not array or seen.shape != shape or seen.dtype is not dtype:
                    seen = answers.observation(seen, shape, record.spec.observation.dtype)
                if not gained.shape == over.shape == cut.shape == each:
                    raise errors.EnvironmentFailure(f"rewards and ends must have the shape {each}")
                cell[...], reward[...], terminated[...], truncated[...] = seen, gained, over, cut
                action[...] = chosen
                done += 1
            if is_timed:
                times.note_piece(clock() - piece_began)
    finally:
        times.note_loop(done, clock() - began)
        record.advance(done)


def _loop(environment: env.Environment) -> Callable[..., None]:
    return _several if environment.vectorized else _one


def _unasked(row: policy.Row) -> Any:
    raise AssertionError("every action was given")


def _pass() -> None:
    """Without noise there is none to skip."""
