"""Segments by hand, and against a naive recorder: ends of both kinds, dummy steps, flushes, the record rate."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_actor.acting import rollout
from edge_actor.environment import env
from edge_actor.experience import trajectory
from tests.fakes.environments import toys

HERE = toys.__file__


def countdown(n_envs: int, lengths: tuple[int, ...], ends: str) -> env.Environment:
    return env.make(f"{HERE}:Countdown", n_envs, {"lengths": lengths, "ends": ends})


def play(
    environment: env.Environment, bursts: list[list[int]], capacity: int = 64, fraction: float = 1.0
) -> list[trajectory.Segments]:
    """Plays each list of actions (the same for all environments) as a burst, and flushes after each."""
    n = environment.n_envs
    record = trajectory.Trajectory(environment.spec, n, capacity * n)
    record.configure(capacity * n, fraction)
    record.start(environment.reset()[0])
    flushed = []
    for actions in bursts:
        rollout.run(environment, [np.full(n, a) if environment.vectorized else a for a in actions], record)
        flushed.append(record.flush())
    return flushed


def test_terminated_and_truncated_episodes_by_hand() -> None:
    """Rows: 3 steps that terminate, a dummy, 2 that are truncated, a dummy, 1 step that goes on."""
    (s,) = play(countdown(1, (3, 2, 9), "TtT"), [[0, 1, 0, 1, 0, 0, 1, 0]])
    assert s.length.tolist() == [3, 2, 1]
    assert s.terminated.tolist() == [1, 0, 0]
    assert s.truncated.tolist() == [0, 1, 0]
    assert s.reward.tolist() == [1, 102, 3, 1, 2, 1]
    assert s.action.tolist() == [0, 1, 0, 0, 0, 0]
    assert s.episode_return.tolist() == [106, 3, 1]
    assert s.episode_length.tolist() == [3, 2, 1]
    assert s.observation.tolist() == [
        [0, 0], [0, 1], [0, 2], [0, 3],
        [1, 0], [1, 1], [1, 2],
        [2, 0], [2, 1],
    ]  # fmt: skip
    assert s.finished.tolist() == [106, 3]
    assert s.log_prob.tolist() == []


def test_a_segment_goes_on_in_the_next_message() -> None:
    first, second = play(countdown(1, (5,), "T"), [[0, 0], [0, 0, 0, 0, 0]])
    assert (first.terminated.tolist(), first.truncated.tolist()) == ([0], [0])
    assert first.observation[-1].tolist() == second.observation[0].tolist() == [0, 2]
    assert second.length.tolist() == [3, 1]
    assert second.episode_length.tolist() == [5, 1]
    assert second.episode_return.tolist() == [15, 1]
    assert second.terminated.tolist() == [1, 0]


def test_an_end_in_the_last_row_is_followed_by_a_dummy_in_the_next_message() -> None:
    first, second = play(countdown(1, (2,), "t"), [[0, 0], [1, 0, 0]])
    assert (first.length.tolist(), first.truncated.tolist()) == ([2], [1])
    assert second.reward.tolist() == [1, 2]
    assert second.observation.tolist() == [[1, 0], [1, 1], [1, 2]]


@pytest.mark.parametrize("ends", ["T", "t", "Tt"])
def test_one_environment_and_several_record_the_same(ends: str) -> None:
    bursts = [[0, 1, 1], [1] * 7, [0] * 11]
    single = play(countdown(1, (3, 1, 4), ends), bursts)
    several = play(countdown(3, (3, 1, 4), ends), bursts)
    for one, three in zip(single, several, strict=True):
        assert three.env_index.tolist() == np.repeat(range(3), len(one.length)).tolist()
        for name in ("length", "terminated", "truncated", "episode_return", "episode_length", "observation", "reward"):
            expected = np.concatenate([getattr(one, name)] * 3)
            np.testing.assert_array_equal(getattr(three, name), expected, err_msg=name)


def test_the_native_vector_environment_s_dummy_step_is_not_recorded() -> None:
    environment = env.make("CartPole-v1", 4)
    record = trajectory.Trajectory(environment.spec, 4, 4 * 60)
    record.start(environment.reset(seed=0)[0])
    rollout.run(environment, [np.ones(4, int)] * 60, record)
    segments = record.flush()
    assert segments.terminated.sum() > 8
    assert (segments.reward == 1.0).all()  # a dummy's reward is 0
    starts = np.cumsum(segments.length + 1) - segments.length - 1
    fresh = segments.observation[starts[segments.episode_length == segments.length]]
    assert (np.abs(fresh) <= 0.05).all()  # where CartPole begins
    lasts = segments.observation[starts + segments.length][segments.terminated == 1]
    assert ((np.abs(lasts[:, 2]) > 0.2094) | (np.abs(lasts[:, 0]) > 2.4)).all()  # where it ends


def test_record_fraction_takes_whole_episodes_evenly() -> None:
    (s,) = play(countdown(1, (2,), "T"), [[0] * 30], fraction=0.5)
    assert s.length.tolist() == [2] * 5
    assert s.observation[:, 0].tolist() == [1, 1, 1, 3, 3, 3, 5, 5, 5, 7, 7, 7, 9, 9, 9]
    assert len(s.finished) == 10


def test_what_is_not_recorded_still_counts() -> None:
    environment = countdown(1, (2,), "T")
    record = trajectory.Trajectory(environment.spec, 1, 64)
    record.recording = False
    record.start(environment.reset()[0])
    rollout.run(environment, [0] * 6, record)
    assert (record.steps, record.recorded) == (4, 0)
    segments = record.flush()
    assert segments.steps == len(segments.observation) == 0
    assert segments.finished.tolist() == [3, 3]


def test_a_broken_environment_truncates_at_its_last_observation() -> None:
    environment = env.make(f"{HERE}:Flaky", 1, {"period": 1000})
    toys.Flaky.taken = 0
    record = trajectory.Trajectory(environment.spec, 1, 64)
    record.start(environment.reset()[0])
    module_flaky = environment.step.__self__.unwrapped  # type: ignore[attr-defined]
    type(module_flaky).taken = 997
    with pytest.raises(OSError, match="wheel"):
        rollout.run(environment, [0] * 9, record)
    record.cut()
    segments = record.flush()
    assert (segments.length.tolist(), segments.truncated.tolist()) == ([2], [1])
    assert segments.observation.tolist() == [[0, 0], [0, 1], [0, 2]]


def test_message_size_changes_without_losing_the_episode() -> None:
    environment = countdown(1, (9,), "T")
    record = trajectory.Trajectory(environment.spec, 1, 4)
    record.start(environment.reset()[0])
    rollout.run(environment, [0] * 4, record)
    assert record.free == 0
    record.flush()
    record.configure(8, 1.0)
    rollout.run(environment, [0] * 5, record)
    segments = record.flush()
    assert segments.observation[0].tolist() == [0, 4]
    assert (segments.episode_length.tolist(), segments.terminated.tolist()) == ([9], [1])


def naive(lengths: tuple[int, ...], ends: str, bursts: list[list[int]]) -> list[list[dict[str, Any]]]:
    """Records one environment step by step, with a list per segment."""
    game = toys.Countdown(lengths, ends)
    observation: Any = game.reset()[0]
    total, count, over = 0.0, 0, False
    flushed = []
    for actions in bursts:
        segments: list[dict[str, Any]] = []
        goes_on = False
        for action in actions:
            if over:
                observation, total, count, over, goes_on = game.reset()[0], 0.0, 0, False, False
                continue
            if not goes_on:
                segments.append({"observation": [observation.tolist()], "reward": [], "action": []})
                goes_on = True
            observation, reward, terminated, truncated, _ = game.step(action)
            total, count, over = total + reward, count + 1, terminated or truncated
            segments[-1]["observation"].append(observation.tolist())
            segments[-1]["reward"].append(reward)
            segments[-1]["action"].append(action)
            segments[-1]["ends"] = (int(terminated), int(truncated), total, count)
        flushed.append(segments)
    return flushed


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    st.text("Tt", min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_equals_a_naive_recorder(lengths: tuple[int, ...], ends: str, bursts: list[list[int]], n_envs: int) -> None:
    flushed = play(countdown(n_envs, lengths, ends), bursts)
    for s, expected_one in zip(flushed, naive(lengths, ends, bursts), strict=True):
        expected = expected_one * n_envs
        assert s.length.tolist() == [len(e["reward"]) for e in expected]
        assert s.observation.tolist() == [row for e in expected for row in e["observation"]]
        assert s.reward.tolist() == [r for e in expected for r in e["reward"]]
        assert s.action.tolist() == [a for e in expected for a in e["action"]]
        flags = list(zip(s.terminated, s.truncated, s.episode_return, s.episode_length, strict=True))
        assert flags == [e["ends"] for e in expected]


def test_bytes_stay_bytes() -> None:
    environment = env.make(f"{HERE}:Offset")
    record = trajectory.Trajectory(environment.spec, 1, 8)
    record.start(environment.reset()[0])
    rollout.run(environment, [0, 1], record)
    segments = record.flush()
    assert segments.observation.dtype == np.uint8
    assert segments.observation[:, 0, 0].tolist() == [0, 5, 6]  # the offset belongs to the environment,
    assert segments.action.tolist() == [0, 1]  # not to the contract


def test_registered_environments_vectorise_too() -> None:
    assert "Countdown-v0" in gymnasium.registry
    (s,) = play(env.make("Countdown-v0", 2), [[0] * 5])
    assert s.length.tolist() == [3, 1, 3, 1]
