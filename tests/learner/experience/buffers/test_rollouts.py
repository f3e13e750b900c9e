"""Steps are learned from once; no advantage depends on where a message was cut; what is too old is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from broker.contract import messages
from learner.experience import rate_limiter
from learner.experience.buffers import rollouts
from learner.networks.losses import policy_gradient
from tests.fakes import fleet_examples

NEWEST = messages.Order(1, 5)
EPISODE = 9  # steps, then terminated


def message(
    first: int, steps: int, seq: int, *, boot: int = 1, env: int = 0, over: bool = False, **changes: Any
) -> Any:
    """Steps `first` to `first + steps` - 1 of an episode: observation t is t, reward t + 1, log-probability -t."""
    t = np.arange(first, first + steps)
    observed = np.arange(first, first + steps + 1, dtype=np.float32) + 100 * boot + 1000 * env
    values: dict[str, Any] = {
        "boot": boot,
        "seq": seq,
        "version": 5,
        "env_index": np.array([env], np.int32),
        "terminated": np.array([over], np.uint8),
        "episode_length": np.array([first + steps], np.int32),
        "observation": np.repeat(observed[:, None], 4, axis=1),
        "reward": (t + 1).astype(np.float32),
        "log_prob": -t.astype(np.float32),
    }
    return fleet_examples.experience((steps,), **(values | changes))


def cut(*borders: int) -> list[messages.Experience]:
    """One episode, in messages that end at these steps and at its end."""
    ends = [*borders, EPISODE]
    starts = [0, *borders]
    return [
        message(a, b - a, seq, over=b == EPISODE) for seq, (a, b) in enumerate(zip(starts, ends, strict=True), start=1)
    ]


def store(*arrived: messages.Experience, capacity: int = 1000, max_lag: int = 1, stack: int = 1) -> rollouts.Rollouts:
    made = rollouts.Rollouts(stack, capacity, 0.9, max_lag)
    made.insert(*arrived)
    return made


def taken(memory: rollouts.Rollouts, steps: int) -> rollouts.Phase:
    return memory.draw(steps, 1, steps, NEWEST, np.random.default_rng(0))


def advantages(phase: rollouts.Phase) -> list[float]:
    """Returns advantages in the order of rewards, which name steps, with the observation as a step's value."""
    values = phase.observation[:, 0]
    found = policy_gradient.generalized_advantages(
        phase.reward, phase.discount, values[phase.at], values[phase.at + 1], phase.is_last, 0.8
    )
    ordered: list[float] = found.advantage.numpy()[np.argsort(phase.reward)].tolist()
    return ordered


@pytest.mark.parametrize("borders", [(4,), (1, 2, 8), (3, 6)])
@pytest.mark.parametrize("backwards", [False, True])
def test_an_advantage_does_not_depend_on_where_a_message_was_cut(borders: tuple[int, ...], backwards: bool) -> None:
    arrived = cut(*borders)
    phase = taken(store(*(arrived[::-1] if backwards else arrived)), EPISODE)
    # In closed form: A_t = sum over k of (0.9 * 0.8)^k delta_(t+k)
    t = np.arange(EPISODE)
    delta = (t + 1) + np.where(t < EPISODE - 1, 0.9, 0.0) * (101.0 + t) - (100.0 + t)
    exact = [sum(0.72**k * delta[s + k] for k in range(EPISODE - s)) for s in range(EPISODE)]
    assert advantages(phase) == pytest.approx(exact, rel=1e-6)
    assert advantages(phase) == advantages(taken(store(*cut()), EPISODE)), "to the bit"
    assert phase.log_prob.tolist() == (-t).tolist()


def test_without_joining_it_would() -> None:
    arrived = cut(4)
    broken = [arrived[0], message(4, 5, seq=3, over=True)]  # a message between them is missing
    phase = taken(store(*broken), EPISODE)
    assert phase.is_last.tolist() == [t in (3, 8) for t in range(EPISODE)]
    assert phase.discount.tolist() == pytest.approx([0.9] * 8 + [0.0]), "bootstrapped from its last observation"
    assert phase.observation[phase.at[3] + 1, 0] == 104.0
    assert advantages(phase)[4:] == advantages(taken(store(*cut()), EPISODE))[4:]
    assert advantages(phase)[3] != pytest.approx(advantages(taken(store(*cut()), EPISODE))[3])


@pytest.mark.parametrize(
    "other",
    [
        {"boot": 2},
        {"env": 1},
        {"seq": 3},
        {"episode_length": np.array([5], np.int32)},  # of another episode
        {"observation": np.zeros((6, 4), np.float32)},
    ],
)
def test_what_does_not_follow_on_is_not_joined(other: dict[str, Any]) -> None:
    values: dict[str, Any] = {"seq": 2, "over": True}
    phase = taken(store(message(0, 4, 1), message(4, 5, **(values | other))), EPISODE)
    assert np.count_nonzero(phase.is_last) == 2


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_an_end_is_one(end: str) -> None:
    flags: dict[str, Any] = {end: np.array([1], np.uint8)}
    first = message(0, 4, 1, **flags)
    phase = taken(store(first, message(4, 5, 2, over=True)), EPISODE)
    assert np.flatnonzero(phase.is_last).tolist() == [3, 8]
    assert phase.discount[3] == pytest.approx(0.0 if end == "terminated" else 0.9)


def test_each_step_is_in_one_phase_and_as_often_as_there_are_epochs() -> None:
    memory = store(message(0, 6, 1), message(6, 6, 2), message(0, 4, 1, boot=2))
    rng = np.random.default_rng(0)
    first = memory.draw(8, 3, 4, NEWEST, rng)
    assert first.minibatches.shape == (6, 4)
    for epoch in first.minibatches.reshape(3, 8):
        assert sorted(epoch.tolist()) == list(range(8))
    assert first.is_last.tolist() == [False] * 7 + [True], "joined, and bootstrapped where the phase was full"
    second = memory.draw(8, 3, 4, NEWEST, rng)
    assert sorted([*first.ids.tolist(), *second.ids.tolist()]) == list(range(16))
    assert len(memory) == 0
    with pytest.raises(IndexError):
        memory.draw(8, 1, 8, NEWEST, rng)
    assert memory.inserted == 16
    assert len(memory.observations(100, rng)) == 16, "kept to find ranges by"


def test_what_is_too_old_or_random_is_counted_and_not_given_out() -> None:
    memory = store(
        message(0, 3, 1, version=0, log_prob=np.zeros(0, np.float32)),
        message(0, 4, 2, version=3),
        message(0, 5, 3, version=4),
        message(0, 6, 4, epoch=0),
    )
    assert memory.usable(NEWEST) == 5
    assert memory.metrics() == {"steps_stale": 4 + 6, "steps_unsampled": 3}
    assert len(memory) == 5
    assert memory.usable(messages.Order(1, 6)) == 0, "while it waited it grew too old"
    assert memory.metrics()["steps_stale"] == 15


def test_the_oldest_leave_and_what_was_never_learned_from_is_counted() -> None:
    memory = store(message(0, 6, 1), capacity=10)
    memory.insert(message(6, 6, 2))
    assert (memory.oldest, len(memory), memory.inserted) == (6, 6, 12)
    assert memory.metrics()["steps_stale"] == 6
    assert not memory.fits(11, 1)
    assert memory.fits(10, 1)


def test_what_is_dropped_is_given_out_no_more() -> None:
    memory = store(message(0, 6, 1), message(6, 6, 2))
    memory.drop(0, 6)
    assert len(memory) == 6
    assert memory.observations(100, np.random.default_rng(0))[:, 0].min() == 106.0


def test_observations_are_drawn_without_repetition_from_all() -> None:
    memory = store(message(0, 6, 1), message(0, 6, 1, boot=2))
    found = memory.observations(9, np.random.default_rng(0))[:, 0]
    assert len(set(found.tolist())) == 9
    with pytest.raises(IndexError):
        store().observations(9, np.random.default_rng(0))


def test_the_fleet_gathers_one_phase_ahead_and_no_more() -> None:
    memory = store()
    limiter = rate_limiter.PhaseLimiter(10, 100, memory.__len__)
    granted = [limiter.steps_granted()]

    def arrive(steps: int, version: int) -> None:
        memory.insert(message(0, steps, 1, version=version))
        limiter.insert(steps)
        granted.append(limiter.steps_granted())

    arrive(10, 0)  # random: nothing more before a policy acts
    memory.usable(NEWEST)
    granted.append(limiter.steps_granted())
    arrive(100, 5)
    taken(memory, 100)
    granted.append(limiter.steps_granted())
    arrive(60, 4)
    memory.usable(messages.Order(1, 6))  # too old by now: they are made up for
    granted.append(limiter.steps_granted())
    assert granted == [10, 10, 110, 110, 210, 210, 270]


def test_stacks_of_frames_are_what_the_policy_saw() -> None:
    """Frame t is t; a message has the two before its first one, too, and an episode's first one is repeated."""

    def frames(first: int, steps: int) -> Any:
        return np.maximum(np.arange(first - 2, first + steps + 1), 0).astype(np.float32)[:, None]

    first = message(0, 4, 1, observation=frames(0, 4))
    second = message(4, 5, 2, over=True, observation=frames(4, 5))
    memory = store(first, second, stack=3)
    drawn = memory.observations(100, np.random.default_rng(0))
    phase = taken(memory, EPISODE)
    seen = [[max(t - 2, 0), max(t - 1, 0), t] for t in range(EPISODE + 1)]
    assert phase.observation[phase.at].tolist() == seen[:-1]
    assert phase.observation[phase.at + 1].tolist() == seen[1:]
    assert drawn.tolist() == seen[:-1]
    assert phase.is_last.tolist() == [False] * 8 + [True], "the second message goes on with the first"


def test_what_left_the_store_before_anybody_asked_is_neither_held_nor_given_out() -> None:
    """Messages that wait are listed apart; one that has no room any more must leave that list too."""
    arrived = [message(0, EPISODE, seq, over=True) for seq in range(1, 8)]
    memory = store(*arrived, capacity=3 * EPISODE)
    assert len(memory) == memory.usable(NEWEST) == 3 * EPISODE
    assert memory.steps_stale == 4 * EPISODE
    assert [held.message.seq for held in memory._fresh] == [5, 6, 7]
    assert taken(memory, EPISODE + 2).ids.tolist() == list(range(4 * EPISODE, 5 * EPISODE + 2))
    memory.drop(6 * EPISODE, 7 * EPISODE)
    assert memory.usable(NEWEST) == EPISODE - 2
    memory.insert(message(0, EPISODE, 8, over=True))
    assert taken(memory, 2 * EPISODE - 2).ids.tolist() == [
        *range(5 * EPISODE + 2, 6 * EPISODE),
        *range(7 * EPISODE, 8 * EPISODE),
    ]
    assert memory.usable(NEWEST) == len(memory) == len(memory._fresh) == 0
    assert memory.has_observations, "they are kept to find ranges by"
