"""Replay against closed forms, and against a naive reference that stores everything it was ever given."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner.experience.buffers import replay

SPEC = specs.EnvSpec(specs.ObservationSpec((1,)), specs.ActionSpec("discrete", n=1000))
GAMMA = 0.5


@dataclass
class Segments:
    """Stands for messages.Experience. Observations count up, so each one tells where it came from."""

    length: NDArray[np.int32]
    terminated: NDArray[np.uint8]
    observation: NDArray[Any]
    action: NDArray[Any]
    reward: NDArray[np.float32]


def segments(lengths: list[int], terminated: list[bool], first: int = 0) -> Segments:
    n, s = sum(lengths), len(lengths)
    return Segments(
        length=np.array(lengths, np.int32),
        terminated=np.array(terminated, np.uint8),
        observation=np.arange(first, first + n + s, dtype=np.float32)[:, None],
        action=np.arange(n, dtype=np.int32) % 1000,
        reward=(2.0 ** (np.arange(n) % 5)).astype(np.float32),
    )


@dataclass
class Naive:
    """Transitions one by one, in Python numbers, with nothing shared."""

    capacity: int
    slots: int
    n_step: int
    transitions: list[tuple[float, int, float, float, float]] = field(default_factory=list)
    observed: int = 0

    def insert(self, message: Segments) -> None:
        o = t = 0
        for length, terminated in zip(message.length.tolist(), message.terminated.tolist(), strict=True):
            for i in range(length):
                m = min(self.n_step, length - i)
                reward = sum(GAMMA**j * float(message.reward[t + i + j]) for j in range(m))
                discount = 0.0 if terminated and i + m == length else GAMMA**m
                start, bootstrap = float(message.observation[o + i, 0]), float(message.observation[o + i + m, 0])
                self.transitions.append((start, int(message.action[t + i]), reward, discount, bootstrap))
            o, t = o + length + 1, t + length
        self.observed += o
        # Observations count up from 0, so an observation's value is its place in the ring's history.
        self.transitions = [s for s in self.transitions[-self.capacity :] if s[0] >= self.observed - self.slots]


def contents(memory: replay.Replay) -> list[tuple[float, int, float, float, float]]:
    """All that is kept, oldest first, read through `sample` alone."""
    if not len(memory):
        return []
    batch = memory.sample(1, 40 * len(memory) + 200, np.random.default_rng(0))
    rows = zip(
        batch.ids[0].tolist(), batch.observation[0, :, 0].tolist(), batch.action[0].tolist(),
        batch.reward[0].tolist(), batch.discount[0].tolist(), batch.bootstrap[0, :, 0].tolist(), strict=True,
    )  # fmt: skip
    found = {row[0]: row[1:] for row in rows}
    return [found[i] for i in sorted(found)]


def test_terminated_segment_by_hand() -> None:
    memory = replay.Replay(SPEC, 100, n_step=3, gamma=GAMMA)
    assert memory.insert(segments([4], [True])) == 4  # rewards 1 2 4 8, observations 0..4
    assert contents(memory) == [
        (0.0, 0, 1 + 0.5 * 2 + 0.25 * 4, 0.125, 3.0),
        (1.0, 1, 2 + 0.5 * 4 + 0.25 * 8, 0.0, 4.0),
        (2.0, 2, 4 + 0.5 * 8, 0.0, 4.0),
        (3.0, 3, 8.0, 0.0, 4.0),
    ]


def test_truncated_or_unfinished_segment_bootstraps_from_its_last_observation() -> None:
    memory = replay.Replay(SPEC, 100, n_step=3, gamma=GAMMA)
    memory.insert(segments([4], [False]))
    assert [row[2:] for row in contents(memory)] == [
        (3.0, 0.125, 3.0),
        (6.0, 0.125, 4.0),
        (8.0, 0.25, 4.0),  # two rewards, so gamma ** 2
        (8.0, 0.5, 4.0),
    ]


def test_no_reward_or_observation_crosses_from_one_segment_into_the_next() -> None:
    memory = replay.Replay(SPEC, 100, n_step=5, gamma=GAMMA)
    memory.insert(segments([1, 2], [True, False]))  # rewards 1 | 2 4, observations 0 1 | 2 3 4
    assert contents(memory) == [(0.0, 0, 1.0, 0.0, 1.0), (2.0, 1, 4.0, 0.25, 4.0), (3.0, 2, 4.0, 0.5, 4.0)]


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(20, 60),
    n_step=st.integers(1, 5),
    messages=st.lists(
        st.lists(st.tuples(st.integers(1, 10), st.booleans()), min_size=1, max_size=2), min_size=1, max_size=30
    ),
    stretch=st.sampled_from([1, 2]),  # short segments fill the ring of observations first, long ones the other
    at_once=st.integers(1, 4),
    prioritized=st.booleans(),
)
def test_agrees_with_the_naive_reference_through_wrap_around(
    capacity: int, n_step: int, messages: list[list[tuple[int, bool]]], stretch: int, at_once: int, prioritized: bool
) -> None:
    memory = replay.Replay(SPEC, capacity, n_step, GAMMA, prioritized=prioritized)
    naive = Naive(capacity, capacity + capacity // 8 + 1, n_step)
    waiting = []
    for message in messages:
        lengths, terminated = [stretch * length for length, _ in message], [t for _, t in message]
        if sum(lengths) > capacity or sum(lengths) + len(lengths) > naive.slots:
            continue
        waiting.append(segments(lengths, terminated, first=naive.observed))
        naive.insert(waiting[-1])
        if len(waiting) < at_once:
            continue
        assert memory.insert(*waiting) == sum(len(one.reward) for one in waiting)
        waiting.clear()
        assert len(memory) == len(naive.transitions)
        kept = memory.observations(1000, np.random.default_rng(0))[:, 0]
        assert sorted(kept) == list(range(int(naive.transitions[0][0]), naive.observed))
    memory.insert(*waiting)
    assert contents(memory) == naive.transitions


def test_samples_have_the_shapes_and_dtypes_of_the_spec() -> None:
    action = specs.ActionSpec("continuous", shape=(2,), low=(0.0, 0.0), high=(1.0, 1.0))
    spec = specs.EnvSpec(specs.ObservationSpec((6, 5), "uint8"), action)
    memory = replay.Replay(spec, 50, n_step=2, gamma=GAMMA)
    frames = np.arange(4 * 30, dtype=np.uint8).reshape(4, 6, 5)
    actions, rewards = np.ones((3, 2), np.float32), np.ones(3, np.float32)
    memory.insert(Segments(np.array([3], np.int32), np.array([0], np.uint8), frames, actions, rewards))
    batch = memory.sample(4, 8, np.random.default_rng(0))
    assert (batch.observation.shape, str(batch.observation.dtype)) == ((4, 8, 6, 5), "uint8")
    assert (batch.bootstrap.shape, batch.action.shape) == ((4, 8, 6, 5), (4, 8, 2))
    assert all(a.shape == (4, 8) for a in (batch.reward, batch.discount, batch.weight, batch.ids))
    assert {a.dtype for a in (batch.reward, batch.discount, batch.weight, batch.action)} == {np.dtype(np.float32)}
    at = batch.ids[0, 0]
    assert (batch.observation[0, 0] == frames[at]).all()


def test_uniform_sampling_is_uniform() -> None:
    memory = replay.Replay(SPEC, 10, n_step=1, gamma=GAMMA)
    memory.insert(segments([7], [True]))
    memory.insert(segments([7], [True], first=8))
    ids = memory.sample(1, 20_000, np.random.default_rng(0)).ids
    counts = np.bincount(ids.reshape(-1) - memory.oldest, minlength=len(memory))
    assert counts.min() > 0.9 * 20_000 / len(memory)
    assert counts.max() < 1.1 * 20_000 / len(memory)


def test_prioritized_sampling_follows_td_errors_and_weights_undo_it() -> None:
    memory = replay.Replay(SPEC, 10, 1, GAMMA, prioritized=True, priority_exponent=1.0, importance_exponent=1.0)
    memory.insert(segments([4], [True]))
    memory.update_priorities(np.arange(4), np.array([1.0, -2.0, 3.0, 2.0], np.float32))
    batch = memory.sample(10, 1000, np.random.default_rng(0))
    share = np.bincount(batch.ids.reshape(-1)) / batch.ids.size
    assert share == pytest.approx([1 / 8, 2 / 8, 3 / 8, 2 / 8], abs=0.001)
    weight_of = {int(i): float(w) for i, w in zip(batch.ids.reshape(-1), batch.weight.reshape(-1), strict=True)}
    assert [weight_of[i] for i in range(4)] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 2], rel=1e-4)


def test_priorities_of_transitions_that_have_left_are_ignored() -> None:
    memory = replay.Replay(SPEC, 4, 1, GAMMA, prioritized=True, priority_exponent=1.0)
    memory.insert(segments([4], [True]))
    memory.insert(segments([4], [True], first=5))  # ids 4 to 7, in the slots of 0 to 3
    memory.update_priorities(np.arange(4), np.array([1e6, 1, 1, 1], np.float32))
    share = np.bincount(memory.sample(1, 4000, np.random.default_rng(1)).ids.reshape(-1) - memory.oldest) / 4000
    assert share == pytest.approx([0.25] * 4, abs=0.01)


def test_new_transitions_enter_at_the_highest_priority_seen() -> None:
    memory = replay.Replay(SPEC, 10, 1, GAMMA, prioritized=True, priority_exponent=1.0)
    memory.insert(segments([2], [True]))
    memory.update_priorities(np.array([0, 1]), np.array([9.0, 1.0], np.float32))
    memory.insert(segments([1], [True], first=3))
    share = np.bincount(memory.sample(1, 1900, np.random.default_rng(0)).ids.reshape(-1)) / 1900
    assert share == pytest.approx([9 / 19, 1 / 19, 9 / 19], abs=0.002)


def test_what_does_not_belong_together_or_never_fits_is_refused() -> None:
    memory = replay.Replay(SPEC, 4, 1, GAMMA)
    odd = segments([3], [True])
    odd.observation = odd.observation[:-1]
    with pytest.raises(errors.SpecError, match="came with 3 observations"):
        memory.insert(odd)
    with pytest.raises(errors.SpecError, match="do not fit a replay of 4"):
        memory.insert(segments([5], [True]))
    with pytest.raises(errors.SpecError, match="came with 3 observations"):
        memory.insert(segments([2], [True]), odd)
    assert len(memory) == 0
    assert memory.insert(segments([], [])) == memory.insert() == 0
    with pytest.raises(IndexError, match="empty"):
        memory.sample(1, 1, np.random.default_rng(0))


@pytest.mark.fault(14)
@pytest.mark.parametrize("size", [1 << 16, 900_000])
def test_more_than_memory_holds_is_said_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(
        "learner.experience.buffers.replay.psutil.virtual_memory", lambda: SimpleNamespace(available=8_000_000_000)
    )
    wide = specs.EnvSpec(specs.ObservationSpec((size,)), specs.ActionSpec("discrete", n=2))
    with pytest.raises(errors.ConfigError, match="replay_capacity 100000 .* GB") as caught:
        replay.check_memory(wide, 100_000, 10**9)
    fit = int(caught.value.todo.split()[1])
    replay.check_memory(wide, fit, 10**9)
    replay.check_memory(wide, 100_000, fit)  # a run that ends before
    with pytest.raises(errors.ConfigError):
        replay.check_memory(wide, 2 * fit, 10**9)


@pytest.mark.fault(14)
def test_more_than_there_are_addresses_is_a_named_error() -> None:
    wide = specs.EnvSpec(specs.ObservationSpec((900_000,)), specs.ActionSpec("discrete", n=2))
    with pytest.raises(errors.ConfigError, match="replay_capacity"):
        replay.Replay(wide, 1 << 44, n_step=1, gamma=0.9)
