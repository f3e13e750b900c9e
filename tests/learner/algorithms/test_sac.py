"""SAC: one step by hand, the same bits again, resuming bit for bit, and tasks whose best policy is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from broker.contract import specs
from learner import config
from learner.algorithms import sac
from learner.experience.buffers import replay
from learner.networks import soft_actor_critic
from tests.learner import reference

LOW, HIGH = (-3.0, 2.0), (1.0, 2.5)
SPEC = specs.EnvSpec(specs.ObservationSpec((1,)), specs.ActionSpec("continuous", shape=(2,), low=LOW, high=HIGH))
ONE = specs.EnvSpec(specs.ObservationSpec((1,)), specs.ActionSpec("continuous", shape=(1,), low=(-2,), high=(2,)))


def make(seed: int = 0, **changes: Any) -> sac.Sac:
    small: dict[str, Any] = {"hidden": (16,), "critic_hidden": (32,), "learning_rate": 2e-3, "target_rate": 0.1}
    small |= {"critic_learning_rate": 5e-3, "temperature_learning_rate": 1e-2}
    return sac.Sac(SPEC, config.SacConfig(**(small | changes)), seed)


def batches(k: int, b: int, seed: int = 0) -> replay.Batch:
    """The best action lies at a quarter of the range, or three quarters, as the observation says; one step, no more."""
    rng = np.random.default_rng(seed)
    low, high = np.array(LOW, np.float32), np.array(HIGH, np.float32)
    observation = rng.choice([-1.0, 1.0], (k, b, 1)).astype(np.float32)
    action = rng.uniform(low, high, (k, b, 2)).astype(np.float32)
    reward = -4 * np.abs((action - low) / (high - low) - (0.5 + 0.25 * observation)).sum(-1)
    ones = np.ones((k, b), np.float32)
    return replay.Batch(
        observation, action, reward.astype(np.float32), 0 * ones, observation, ones, np.zeros((k, b), np.int64)
    )


def test_finds_the_best_action_and_the_entropy_it_is_to_keep_and_goes_on_bit_for_bit() -> None:
    agent = make()
    for i in range(60):
        agent.update(batches(16, 32, seed=i))
    saved = agent.state()
    found = agent.update(batches(16, 32, seed=99))
    resumed = make()
    resumed.restore(saved)
    assert resumed.updates == 960
    again = resumed.update(batches(16, 32, seed=99))
    assert found.metrics == again.metrics
    assert (found.td_error == again.td_error).all()
    assert all((resumed.state()[key] == value).all() for key, value in agent.state().items())
    assert {"weights/log_temperature", "adam_m/log_temperature", "adam_v/log_temperature"} < saved.keys()
    assert saved["adam_v/log_temperature"] > 0

    mean = reference.outputs(agent.policy_layers(), np.array([[-1.0], [1.0]], np.float32))[:, :2]
    assert np.tanh(mean) == pytest.approx(np.array([[-0.5, -0.5], [0.5, 0.5]]), abs=0.2)
    assert found.metrics["entropy"] == pytest.approx(-2.0, abs=0.7), "-1 for each element"
    assert 0.0 < found.metrics["temperature"] < 1.0


def test_noise_depends_on_seed_and_update_alone() -> None:
    drawn = [np.array(sac.draw(seed, tf.constant(at), (64, 2))) for seed, at in ((7, 1), (7, 2), (8, 1))]
    assert len(np.unique(np.concatenate([noise.ravel() for noise in drawn]))) == 3 * 2 * 64 * 2, "no number twice"
    assert (drawn[0] == np.array(sac.draw(7, tf.constant(1), (64, 2)))).all()


@pytest.mark.parametrize("cost", [0.0, 0.7])
def test_one_step_by_hand(cost: float) -> None:
    """Linear networks: mean w x, values v x + u a of either critic; the bounds of the only action are -2 and 2."""
    settings = config.SacConfig(
        hidden=(),
        critic_hidden=(),
        learning_rate=0.01,
        critic_learning_rate=0.02,
        temperature_learning_rate=0.03,
        temperature=0.4,
        target_entropy=-1.5,
        target_rate=0.25,
        max_grad_norm=1e9,
        action_cost=cost,
    )
    agent = sac.Sac(ONE, settings, seed=3)
    state = agent.state()
    w, c = 0.5, -0.8
    critics, targets = [(3.0, -2.0), (2.9, -1.9)], [(1.0, 4.0), (1.1, 3.0)]
    state["weights/actor/0/kernel"], state["weights/actor/0/bias"] = np.array([[w], [0]], "f"), np.array([0, c], "f")
    for at in range(2):
        state[f"weights/{at}/critic/0/kernel"] = np.array([critics[at]], np.float32)
        state[f"targets/{at}/critic/0/kernel"] = np.array([targets[at]], np.float32)
    agent.restore(state)
    x, taken, reward, discount, after = 0.6, 1.0, 0.25, 0.9, -0.4
    rows = ([[[x]]], [[[taken]]], [[reward]], [[discount]], [[[after]]], [[1.0]])
    observation, action, rewards, discounts, bootstrap, weight = (np.array(row, np.float32) for row in rows)
    ids = np.zeros((1, 1), np.int64)
    update = agent.update(replay.Batch(observation, action, rewards, discounts, bootstrap, weight, ids))

    drawn = tf.function(lambda: sac.draw(3, tf.constant(1), (1, 1)), jit_compile=True)()
    z, z_after = (float(noise[0, 0]) for noise in drawn)
    log_std = -1.5 + 3.5 * math.tanh(c)
    std = math.exp(log_std)

    def log_prob(u: float, z: float) -> float:
        return -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi) - math.log(1 - math.tanh(u) ** 2)

    u_after, u = w * after + std * z_after, w * x + std * z
    value_after = min(v * after + k * math.tanh(u_after) for v, k in targets)
    target = reward + discount * (value_after - 0.4 * log_prob(u_after, z_after))
    errors = [target - (v * x + k * taken / 2) for v, k in critics]
    assert update.td_error[0, 0] == pytest.approx(sum(errors) / 2, rel=1e-5)
    assert update.metrics["loss"] == pytest.approx(0.5 * sum(error**2 for error in errors), rel=1e-5)
    norm = math.sqrt(sum(error**2 for error in errors) * (x**2 + 0.25 + 1))
    assert update.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)

    values = [v * x + k * math.tanh(u) for v, k in critics]
    assert update.metrics["q_mean"] == pytest.approx(min(values), rel=1e-5)
    assert update.metrics["entropy"] == pytest.approx(-log_prob(u, z), rel=1e-5)
    assert update.metrics["temperature"] == pytest.approx(0.4, rel=1e-6)
    k = critics[int(np.argmin(values))][1]
    # Of temperature * log p - value by u, and from there by mean and log deviation. A single weight is never rounded
    slope = 0.4 * 2 * math.tanh(u) - k * (1 - math.tanh(u) ** 2)
    by_mean = slope + 2 * cost * w * x
    by_output = (slope * std * z - 0.4) * 3.5 * (1 - math.tanh(c) ** 2)
    norm = math.sqrt((by_mean**2 + by_output**2) * (x**2 + 1))
    assert update.metrics["actor_grad_norm"] == pytest.approx(norm, rel=1e-4)

    new = agent.state()  # Adam's first step has the size of the learning rate
    assert new["weights/actor/0/kernel"][0, 0] == pytest.approx(w - 0.01 * np.sign(by_mean), abs=1e-5)
    assert new["weights/actor/0/bias"][1] == pytest.approx(c - 0.01 * np.sign(by_output), abs=1e-5)
    falls = np.sign(-log_prob(u, z) + 1.5)  # more entropy than is to be kept
    assert new["weights/log_temperature"] == pytest.approx(math.log(0.4) - 0.03 * falls, abs=1e-5)
    for at in range(2):
        signs = np.sign(errors[at]) * np.sign([x, taken])
        kernel = new[f"weights/{at}/critic/0/kernel"][0]
        assert kernel == pytest.approx(critics[at] + 0.02 * signs, abs=1e-5)
        moved = 0.75 * np.array(targets[at], np.float32) + 0.25 * kernel
        assert new[f"targets/{at}/critic/0/kernel"][0] == pytest.approx(moved, abs=1e-5)


@pytest.mark.parametrize("which", [0, 1])
def test_one_step_with_distributions_by_hand(which: int) -> None:
    """Without kernels the distributions are those of the biases, so loss and values are sums over three atoms."""
    chosen: dict[str, Any] = {"hidden": (), "critic_hidden": (), "atoms": 3, "value_min": 0.0, "value_max": 2.0}
    agent = sac.Sac(ONE, config.SacConfig(**chosen, temperature=0.05), seed=3)
    state = agent.state()
    lower, upper = [0.5, 0.25, 0.25], [0.3, 0.3, 0.4]  # means of 0.75 and 1.1
    predicted, targets = np.array([[0.2, 0.5, 0.3], [0.3, 0.4, 0.3]]), np.array([[lower, upper], [upper, lower]][which])
    for name in state:
        if name.endswith("kernel"):
            state[name] = np.zeros_like(state[name])
    state["weights/actor/0/bias"] = np.array([0.3, -0.8], np.float32)
    for at in range(2):
        state[f"weights/{at}/critic/0/bias"] = np.log(predicted[at]).astype(np.float32)
        state[f"targets/{at}/critic/0/bias"] = np.log(targets[at]).astype(np.float32)
    agent.restore(state)
    one = np.full((1, 1), 0.5, np.float32)
    batch = replay.Batch(one[..., None], one[..., None], one, one, one[..., None], 2 * one, np.zeros((1, 1), np.int64))
    update = agent.update(batch)

    _, drawn = tf.function(lambda: sac.draw(3, tf.constant(1), (1, 1)), jit_compile=True)()
    z, log_std = float(drawn[0, 0]), -1.5 + 3.5 * math.tanh(-0.8)
    u = 0.3 + math.exp(log_std) * z
    log_prob = -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi) - math.log(1 - math.tanh(u) ** 2)
    returns = 0.5 + 0.5 * (np.arange(3) - 0.05 * log_prob)
    assert (abs(returns - [0.5, 1, 1.5]) < 0.25).all(), "each lies between two atoms"
    projected = sum(p * np.maximum(0, 1 - abs(r - np.arange(3))) for p, r in zip(lower, returns, strict=True))
    assert update.metrics["loss"] == pytest.approx(-(projected * np.log(predicted)).sum(), rel=1e-5)
    values = predicted @ np.arange(3)
    assert update.metrics["q_mean"] == pytest.approx(values.min(), rel=1e-5)
    assert update.td_error[0, 0] == pytest.approx(projected @ np.arange(3) - values.mean(), rel=1e-4)
    assert update.metrics["support_clipped"] == 0.0
    batch.reward[:] = 1.75
    assert agent.update(batch).metrics["support_clipped"] == pytest.approx(2 / 3)


def test_twins_begin_apart_and_targets_begin_as_they_are() -> None:
    state = make().state()
    assert (state["weights/0/critic/0/kernel"] != state["weights/1/critic/0/kernel"]).all()
    copied = {name for name in state if name.startswith("targets/")}
    assert len(copied) == 8
    assert all((state[name] == state[name.replace("targets", "weights")]).all() for name in copied)


def test_rounding_moves_the_mode_as_int8_would() -> None:
    """A kernel channel has 127 steps: of 0.3 beside 1 it makes 38 of them. The deviation counts for nothing."""
    net = soft_actor_critic.SoftActorCritic.build(ONE, (2,), (), 1, np.random.default_rng(0))
    for deviation in (0.0, 50.0):
        arrays = ([[1.0, 1.0]], [0.0, 0.0], [[1.0, deviation], [0.3, 0.7]], [0.0, 0.0])  # as they are stored
        rounded = net.mode_rounded([tf.constant(array) for array in arrays], tf.constant([[1.0]]))
        assert rounded.numpy() == pytest.approx(np.tanh([[1 + 38 / 127]]), rel=1e-6)


def test_of_frames_each_critic_has_an_encoder() -> None:
    frames = specs.EnvSpec(specs.ObservationSpec((40, 40, 1), "uint8"), ONE.action)
    net = soft_actor_critic.SoftActorCritic.build(frames, (8,), (8,), 3, np.random.default_rng(0))
    critics = net.initial_critics()
    assert sum("/encoder/" in name for name in critics) == 2 * 3 * 2
    weights = [tf.constant(array) for array in critics.values()]
    seen = tf.random.stateless_uniform((4, 40, 40, 1), (0, 0))
    one, other = (outputs.numpy() for outputs in net.critics(weights, seen, tf.ones((4, 1))))
    assert one.shape == other.shape == (4, 3)
    assert (one != other).all(), "two networks"
    first = net.twins[0].run(weights[: len(weights) // 2], seen, tf.ones((4, 1)))
    assert (first == one).numpy().all()
