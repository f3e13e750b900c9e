"""DQN: one step by hand, its counters and switches, repeatability, and a task it must solve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner import config
from learner.algorithms import dqn
from learner.experience.buffers import replay
from learner.networks import layers

SPEC = specs.EnvSpec(specs.ObservationSpec((2,)), specs.ActionSpec("discrete", n=2))


def settings(**changes: Any) -> config.DqnConfig:
    small = {"hidden": (8,), "learning_rate": 0.01, "target_period": 3, "max_grad_norm": 1e9, "huber_delta": 1.0}
    return config.DqnConfig(**{**small, **changes})


def batches(k: int, b: int, seed: int = 0, weight: float = 1.0) -> replay.Batch:
    rng = np.random.default_rng(seed)
    return replay.Batch(
        observation=rng.normal(size=(k, b, 2)).astype(np.float32),
        action=rng.integers(0, 2, (k, b)).astype(np.int32),
        reward=rng.normal(size=(k, b)).astype(np.float32),
        discount=np.full((k, b), 0.9, np.float32),
        bootstrap=rng.normal(size=(k, b, 2)).astype(np.float32),
        weight=np.full((k, b), weight, np.float32),
        ids=np.zeros((k, b), np.int64),
    )


def test_one_step_by_hand() -> None:
    agent = dqn.Dqn(SPEC, settings(hidden=(), dueling=False, max_grad_norm=0.5), seed=0)
    state = agent.state()
    kernel = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)  # q = (x0, 2 x1)
    state["weights/advantage/0/kernel"] = kernel
    state["targets/advantage/0/kernel"] = np.array([[4.0, 0.0], [0.0, 3.0]], np.float32)
    agent.restore(state)
    batch = replay.Batch(
        observation=np.array([[[1.0, 3.0]]], np.float32),
        action=np.array([[0]], np.int32),
        reward=np.array([[0.25]], np.float32),
        discount=np.array([[0.5]], np.float32),
        bootstrap=np.array([[[2.0, 0.5]]], np.float32),  # online (2, 1) chooses action 0; target values it at 8
        weight=np.ones((1, 1), np.float32),
        ids=np.zeros((1, 1), np.int64),
    )
    update = agent.update(batch)
    td_error = 0.25 + 0.5 * 8.0 - 1.0
    assert update.td_error.tolist() == [[td_error]]
    assert update.metrics["loss"] == pytest.approx(td_error - 0.5)  # Huber, delta 1
    assert update.metrics["q_mean"] == pytest.approx((1.0 + 6.0) / 2)
    assert update.metrics["td_abs_mean"] == pytest.approx(td_error)
    # The gradient is -1 times the input (1, 3) and the bias' 1, in the row of action 0; its norm is sqrt(11).
    assert update.metrics["grad_norm"] == pytest.approx(np.sqrt(11.0))
    after = agent.state()
    clipped = 0.5 / np.sqrt(11.0) * np.array([-1.0, -3.0])
    assert after["adam_m/advantage/0/kernel"] == pytest.approx(0.1 * np.stack([clipped, [0, 0]]))
    assert after["adam_v/advantage/0/kernel"] == pytest.approx(0.001 * np.stack([clipped**2, [0, 0]]), rel=1e-4)
    # Adam's first step has the size of the learning rate, whatever the gradient.
    assert after["weights/advantage/0/kernel"] == pytest.approx(kernel + [[0.01, 0.01], [0, 0]], abs=1e-6)


def test_without_double_the_target_network_also_chooses() -> None:
    agent = dqn.Dqn(SPEC, settings(hidden=(), dueling=False, double=False), seed=0)
    state = agent.state()
    state["weights/advantage/0/kernel"] = np.eye(2, dtype=np.float32)
    state["targets/advantage/0/kernel"] = np.array([[0.0, 0.0], [5.0, 0.0]], np.float32)
    agent.restore(state)
    batch = batches(1, 1)
    batch.observation[:], batch.bootstrap[:], batch.reward[:] = 0.0, (1.0, 0.0), 0.0
    assert agent.update(batch).td_error[0, 0] == pytest.approx(0.9 * 5.0)  # online prefers action 0, worth 0


def test_many_steps_in_one_call_are_the_steps_one_by_one_and_targets_follow_on_time() -> None:
    together, single = (dqn.Dqn(SPEC, settings(), seed=0) for _ in range(2))
    batch = batches(4, 16)
    td_error = together.update(batch).td_error
    for k in range(4):
        one = replay.Batch(*(getattr(batch, name)[k : k + 1] for name in replay.Batch.__slots__))
        assert single.update(one).td_error[0] == pytest.approx(td_error[k], abs=1e-5)
        state = single.state()
        distance = np.abs(state["weights/advantage/0/kernel"] - state["targets/advantage/0/kernel"]).max()
        assert (distance == 0) == (k == 2)  # target_period 3: right after the third update, and at no other time
    assert together.updates == single.updates == 4
    for name, value in together.state().items():
        assert single.state()[name] == pytest.approx(value, abs=1e-5), name


def test_weight_zero_teaches_nothing() -> None:
    agent = dqn.Dqn(SPEC, settings(), seed=0)
    before = agent.state()
    agent.update(batches(1, 16, weight=0.0))
    after = agent.state()
    assert all((after[n] == before[n]).all() for n in before if n.startswith("weights/"))
    agent.update(batches(1, 16, weight=1.0))
    assert any((agent.state()[n] != before[n]).any() for n in before if n.startswith("weights/"))


def test_same_seed_same_bits_and_a_restored_learner_goes_on_bit_for_bit() -> None:
    one, same, other = (dqn.Dqn(SPEC, settings(), seed) for seed in (7, 7, 8))
    for agent in (one, same):
        agent.normalize(np.random.default_rng(0).normal(3, 2, (100, 2)))
        for i in range(3):
            agent.update(batches(4, 16, seed=i))
    saved = one.state()
    assert saved.keys() == same.state().keys()
    assert all((saved[name] == same.state()[name]).all() for name in saved)

    one.update(batches(4, 16, seed=9))  # perturbed
    assert any((saved[name] != one.state()[name]).any() for name in saved)
    for agent in (one, other):
        agent.restore(saved)
        agent.update(batches(4, 16, seed=3))
    same.update(batches(4, 16, seed=3))
    for agent in (one, other):
        assert all((agent.state()[name] == same.state()[name]).all() for name in saved)
        assert agent.updates == 16
    for a, b in zip(
        layers.arrays(one.policy_layers()).values(), layers.arrays(same.policy_layers()).values(), strict=True
    ):
        assert (a == b).all()


def test_checkpoint_of_another_network_is_refused() -> None:
    state = dqn.Dqn(SPEC, settings(hidden=(8,)), seed=0).state()
    for changed in (settings(hidden=(9,)), settings(hidden=(8, 8)), settings(dueling=False)):
        with pytest.raises(errors.RunError, match="another network"):
            dqn.Dqn(SPEC, changed, seed=0).restore(state)


def test_continuous_actions_are_refused() -> None:
    spec = specs.EnvSpec(
        specs.ObservationSpec((2,)), specs.ActionSpec("continuous", shape=(1,), low=(-1.0,), high=(1.0,))
    )
    with pytest.raises(errors.SpecError, match="discrete actions") as caught:
        dqn.Dqn(spec, settings(), seed=0)
    assert caught.value.todo


def test_learns_from_frames() -> None:
    spec = specs.EnvSpec(specs.ObservationSpec((36, 36, 1), "uint8"), specs.ActionSpec("discrete", n=2))
    agent = dqn.Dqn(spec, settings(learning_rate=1e-3), seed=0)
    rng = np.random.default_rng(0)
    bright = rng.integers(0, 2, (1, 32))
    frames = (rng.integers(0, 50, (1, 32, 36, 36, 1)) + 150 * bright[..., None, None, None]).astype(np.uint8)
    actions = rng.integers(0, 2, (1, 32)).astype(np.int32)
    batch = replay.Batch(
        frames, actions, (actions == bright).astype(np.float32), np.zeros((1, 32), np.float32), frames,
        np.ones((1, 32), np.float32), np.zeros((1, 32), np.int64),
    )  # fmt: skip
    first = agent.update(batch).metrics["loss"]
    for _ in range(60):
        last = agent.update(batch).metrics["loss"]
    assert last < 0.2 * first


class Chain:
    """Five states in a row; 1 goes right, 0 back to the start. Only the last state pays, and ends the episode."""

    def __init__(self) -> None:
        self.at = 0

    def observe(self) -> NDArray[np.float32]:
        return np.array([self.at / 4, 1.0], np.float32)

    def step(self, action: int) -> tuple[float, bool]:
        self.at = self.at + 1 if action else 0
        done = self.at == 4
        return float(done), done


@pytest.mark.parametrize("dueling", [False, True])
def test_solves_the_chain_through_replay(dueling: bool) -> None:
    chosen = settings(hidden=(32,), dueling=dueling, learning_rate=3e-3, target_period=20, n_step=1, gamma=0.8)
    agent = dqn.Dqn(SPEC, chosen, seed=0)
    memory = replay.Replay(SPEC, 2000, chosen.n_step, chosen.gamma)
    rng = np.random.default_rng(0)
    env = Chain()
    observations = [env.observe()]
    actions: list[int] = []
    rewards: list[float] = []
    lengths: list[int] = []
    ends: list[bool] = []
    for i in range(1500):
        actions.append(int(rng.integers(2)))
        reward, done = env.step(actions[-1])
        rewards.append(reward)
        observations.append(env.observe())
        if done or i == 1499:
            lengths.append(len(actions) - sum(lengths))
            ends.append(done)
            env = Chain()
            observations.append(env.observe())
    memory.insert(_Segments(lengths, ends, observations[:-1], actions, rewards))
    agent.normalize(memory.observations(1000, rng))
    for _ in range(60):
        agent.update(memory.sample(16, 32, rng))

    policy = agent.policy_layers()
    states = np.array([[s / 4, 1.0] for s in range(4)], np.float32)
    for layer in policy:
        assert isinstance(layer, layers.Dense)
        states = states @ layer.kernel.T + layer.bias
        if layer.activation == "relu":
            states = np.maximum(states, 0)
    assert states.argmax(1).tolist() == [1, 1, 1, 1]
    # One step to the right earns 0.8 ** 3 in state 0, one to the start 0.8 ** 4; half the difference on either side.
    assert np.diff(states[0])[0] == pytest.approx(0.8**3 - 0.8**4, abs=0.05)
    assert np.diff(states[3])[0] == pytest.approx(1 - 0.8**4, abs=0.1)


class _Segments:
    def __init__(self, lengths: Any, ends: Any, observations: Any, actions: Any, rewards: Any) -> None:
        self.length, self.terminated = np.array(lengths, np.int32), np.array(ends, np.uint8)
        self.observation, self.action = np.array(observations, np.float32), np.array(actions, np.int32)
        self.reward = np.array(rewards, np.float32)
