"""DDPG and D4PG: one step by hand, targets, resuming bit for bit, and a task that they must solve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from broker.contract import errors, specs
from learner import config
from learner.algorithms import Algorithm, d4pg, ddpg
from learner.experience.buffers import replay
from learner.networks import actor_critic, networks, optimizer, stored
from learner.quantize import compare, ptq
from learner.quantize.tflite import interpreter, quantizer
from tests.learner import reference

LOW, HIGH = (-3.0, 2.0), (1.0, 2.5)
"""Bounds whose middle is not 0, and whose ranges differ."""
SPEC = specs.EnvSpec(specs.ObservationSpec((1,)), specs.ActionSpec("continuous", shape=(2,), low=LOW, high=HIGH))
SMALL: dict[str, Any] = {"hidden": (16,), "critic_hidden": (32,), "learning_rate": 2e-3, "critic_learning_rate": 5e-3}


def make(name: str, seed: int = 0, **changes: Any) -> Algorithm:
    if name == "ddpg":
        return ddpg.Ddpg(SPEC, config.DdpgConfig(**(SMALL | {"target_rate": 0.1} | changes)), seed)
    support = {"value_min": -3.0, "value_max": 1.0, "atoms": 21, "target_period": 20}
    return d4pg.D4pg(SPEC, config.D4pgConfig(**(SMALL | support | changes)), seed)


def batches(k: int, b: int, seed: int = 0) -> replay.Batch:
    """The best action lies at a quarter of the range, or three quarters, as the observation says; one step, no more."""
    rng = np.random.default_rng(seed)
    low, high = np.array(LOW, np.float32), np.array(HIGH, np.float32)
    observation = rng.choice([-1.0, 1.0], (k, b, 1)).astype(np.float32)
    action = rng.uniform(low, high, (k, b, 2)).astype(np.float32)
    share = (action - low) / (high - low)
    reward = -np.abs(share - (0.5 + 0.25 * observation)).sum(-1)
    ones = np.ones((k, b), np.float32)
    return replay.Batch(
        observation, action, reward.astype(np.float32), 0 * ones, observation, ones, np.zeros((k, b), np.int64)
    )


@pytest.mark.parametrize("name", ["ddpg", "d4pg"])
def test_finds_the_best_action_within_any_bounds_and_goes_on_bit_for_bit(name: str) -> None:
    agent = make(name)
    for i in range(40):
        agent.update(batches(16, 32, seed=i))
    saved = agent.state()
    agent.update(batches(16, 32, seed=99))
    resumed = make(name, seed=5)
    resumed.restore(saved)
    assert resumed.updates == 640
    resumed.update(batches(16, 32, seed=99))
    assert all((resumed.state()[key] == value).all() for key, value in agent.state().items())

    action = reference.outputs(agent.policy_layers(), np.array([[-1.0], [1.0]], np.float32))
    assert action[0] == pytest.approx([-2.0, 2.125], abs=0.35)
    assert action[1] == pytest.approx([0.0, 2.375], abs=0.35)
    far = reference.outputs(agent.policy_layers(), np.array([[-1e6], [1e6]], np.float32))
    assert (np.abs(far - np.array([-1.0, 2.25], np.float32)) <= np.array([2.0, 0.25], np.float32)).all()


@pytest.mark.parametrize("cost", [0.0, 0.7])
def test_one_step_of_ddpg_by_hand(cost: float) -> None:
    """Linear networks: policy tanh(w x), value v x + u a; the bounds of the only action are -2 and 2."""
    spec = specs.EnvSpec(specs.ObservationSpec((1,)), specs.ActionSpec("continuous", shape=(1,), low=(-2,), high=(2,)))
    settings = config.DdpgConfig(
        hidden=(),
        critic_hidden=(),
        learning_rate=0.01,
        critic_learning_rate=0.02,
        target_rate=0.25,
        max_grad_norm=1e9,
        action_cost=cost,
    )
    agent = ddpg.Ddpg(spec, settings, seed=0)
    state = agent.state()
    w, v, u = 0.5, 3.0, -2.0
    state["weights/actor/0/kernel"] = np.array([[w]], np.float32)
    state["weights/critic/0/kernel"] = np.array([[v, u]], np.float32)
    state["targets/actor/0/kernel"] = np.array([[0.2]], np.float32)
    state["targets/critic/0/kernel"] = np.array([[1.0, 4.0]], np.float32)
    agent.restore(state)
    x, action, reward, discount, after = 0.6, 1.0, 0.25, 0.9, -0.4
    update = agent.update(
        replay.Batch(
            np.array([[[x]]], np.float32),
            np.array([[[action]]], np.float32),
            np.array([[reward]], np.float32),
            np.array([[discount]], np.float32),
            np.array([[[after]]], np.float32),
            np.array([[1.0]], np.float32),
            np.zeros((1, 1), np.int64),
        )
    )
    target = reward + discount * (1.0 * after + 4.0 * np.tanh(0.2 * after))
    error = target - (v * x + u * action / 2)
    assert update.td_error[0, 0] == pytest.approx(error, rel=1e-5)
    assert update.metrics["loss"] == pytest.approx(0.5 * error**2, rel=1e-5)
    assert update.metrics["q_mean"] == pytest.approx(v * x + u * np.tanh(w * x), rel=1e-5)
    assert update.metrics["grad_norm"] == pytest.approx(abs(error) * np.sqrt(x**2 + 0.25 + 1), rel=1e-5)
    slope = 2 * cost * w * x - u * (1 - np.tanh(w * x) ** 2)  # a single weight is never rounded
    assert update.metrics["actor_grad_norm"] == pytest.approx(slope * np.sqrt(x**2 + 1), rel=1e-5)
    new = agent.state()
    # Adam's first step has the size of the learning rate: the policy goes down, where the value is higher
    assert new["weights/actor/0/kernel"][0, 0] == pytest.approx(w - 0.01, abs=1e-5)
    signs = np.sign(error) * np.sign([x, action])
    assert new["weights/critic/0/kernel"][0] == pytest.approx([v, u] + 0.02 * signs, abs=1e-5)
    moved = 0.75 * np.array([1.0, 4.0], np.float32) + 0.25 * new["weights/critic/0/kernel"][0]
    assert new["targets/critic/0/kernel"][0] == pytest.approx(moved, abs=1e-5)


def test_one_step_of_d4pg_by_hand() -> None:
    """Without weights the distribution is that of the biases, so loss and values are sums over three atoms."""
    chosen: dict[str, Any] = {
        "hidden": (),
        "critic_hidden": (),
        "atoms": 3,
        "value_min": 0.0,
        "value_max": 2.0,
        "target_period": 2,
    }
    agent = make("d4pg", **chosen)
    state = agent.state()
    for group in ("weights", "targets"):
        state[f"{group}/critic/0/kernel"][:] = 0.0
    predicted, target = np.array([0.2, 0.5, 0.3], np.float32), np.array([0.5, 0.25, 0.25], np.float32)
    state["weights/critic/0/bias"], state["targets/critic/0/bias"] = np.log(predicted), np.log(target)
    agent.restore(state)
    one = batches(1, 1)
    one.reward[:], one.discount[:] = 0.5, 0.5
    update = agent.update(one)
    projected = np.array([0.25, 0.625, 0.125])  # 0, 1, 2 lie at 0.5, 1, 1.5: halves go to the neighbours
    assert update.metrics["loss"] == pytest.approx(-(projected * np.log(predicted)).sum(), rel=1e-5)
    assert update.metrics["q_mean"] == pytest.approx(0.5 + 0.6, rel=1e-5)
    assert update.td_error[0, 0] == pytest.approx((0.625 + 0.25) - 1.1, rel=1e-5)
    assert update.metrics["support_clipped"] == 0.0
    assert (agent.state()["targets/critic/0/bias"] == state["targets/critic/0/bias"]).all()
    one.reward[:] = 1.75
    assert agent.update(one).metrics["support_clipped"] == pytest.approx(2 / 3)
    new = agent.state()
    assert (new["targets/critic/0/bias"] == new["weights/critic/0/bias"]).all(), "copied at the second update"


ONE = specs.EnvSpec(specs.ObservationSpec((1,)), specs.ActionSpec("continuous", shape=(1,), low=(-1,), high=(1,)))


def test_what_rounding_costs_by_hand() -> None:
    net = actor_critic.ActorCritic.build(ONE, (2,), (), 1, np.random.default_rng(0))
    actor = [tf.constant(a) for a in ([[1.0, 0.51]], [0.0, 0.0], [[1.0, 0.3]], [0.0])]  # as they are stored
    x = tf.constant([[1.0], [0.301]] * 4)  # a quarter of them counts
    action = net.act(actor, x)
    assert action.numpy()[:2, 0] == pytest.approx(np.tanh([1.153, 0.301 * 1.153]))
    # Hidden units reach 1, so a step is 1/255: of 0.51, 0.301 and 0.15351 it makes 130, 77 and 39. The second kernel
    # has steps of 1/127: of 0.3 it makes 38. The first has an output channel for each number, which stays.
    rounded = np.tanh([1 + 130 / 255 * 38 / 127, 77 / 255 + 39 / 255 * 38 / 127])
    assert net.act_rounded(actor, x).numpy()[:2, 0] == pytest.approx(rounded, rel=1e-6)
    value = tf.constant([3.0, 7.0] * 4)  # deviation 2
    percent = 50 * (rounded - np.tanh([1.153, 0.301 * 1.153]))
    cost = net.rounding_cost(0.5, actor, x, action, value)
    assert cost.numpy() == pytest.approx(np.square(percent).mean(), rel=1e-3)


def test_rounding_gets_no_cheaper_by_moving_size_from_one_layer_to_the_next() -> None:
    rng = np.random.default_rng(1)
    net = actor_critic.ActorCritic.build(ONE, (8,), (), 1, rng)
    shapes = [w.shape for w in net.split([*net.initial().values()])[0]]
    actor = [tf.constant(stored.of(rng.normal(size=shape).astype(np.float32))) for shape in shapes]
    x = tf.constant(rng.normal(size=(64, 1)).astype(np.float32))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(actor)
        cost = net.rounding_cost(1.0, actor, x, net.act(actor, x), tf.range(64.0))
    shares = [float(tf.reduce_sum(w * g)) for w, g in zip(actor, tape.gradient(cost, actor), strict=True)]
    assert shares[0] + shares[1] == pytest.approx(shares[2], rel=1e-3)
    assert abs(shares[2]) > 1e-3 * float(cost)


@pytest.mark.parametrize("name", ["ddpg", "d4pg"])
def test_rounding_costs_the_actor_and_not_the_critic(name: str) -> None:
    free, dear = (make(name, rounding_cost=cost) for cost in (0.0, 1e3))
    for agent in (free, dear):
        agent.update(batches(2, 32))  # the first step of Adam has one size, whatever the gradient
    changed = {key for key, value in dear.state().items() if (value != free.state()[key]).any()}
    assert {key for key in changed if key.startswith("weights/")} == {
        f"weights/actor/{layer}/{part}" for layer in (0, 1) for part in ("kernel", "bias")
    }


def test_rounding_cost_makes_policies_that_int8_holds() -> None:
    """A steep policy of random weights learns to act as it did, with and without the cost; real int8 is the judge."""
    spec = specs.EnvSpec(specs.ObservationSpec((3,)), specs.ActionSpec("continuous", shape=(1,), low=(-1,), high=(1,)))
    net = actor_critic.ActorCritic.build(spec, (32, 32), (), 1, np.random.default_rng(0))
    initial = [*net.initial().values()]
    start, critic = net.split([tf.constant(stored.of(w)) for w in initial])
    start[4] *= 200.0
    x = tf.constant(np.random.default_rng(1).uniform(-1, 1, (2048, 3)).astype(np.float32))
    before = net.act(start, x)
    value = tf.range(2048.0) / 512

    def descend(actor: Any, mean: Any, square: Any, updates: Any, price: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(actor)
            action = net.act(actor, x)
            loss = 2500 * tf.reduce_mean(tf.square(action - before))
            loss += net.rounding_cost(price, actor, x, action, value)
        return optimizer.adam(actor, tape.gradient(loss, actor), mean, square, updates, 3e-3)

    step = tf.function(descend, jit_compile=True, autograph=False)

    def trained(price: float) -> compare.Actions:
        state = start, [0 * w for w in start], [0 * w for w in start]
        for i in range(1, 301):
            state = step(*state, tf.constant(i), tf.constant(price))
        assert np.abs(net.act(state[0], x) - before).mean() < 0.08
        kept = zip((*state[0], *critic), initial, strict=True)
        weights = [w.numpy().T if stored.is_turned(array.shape) else w.numpy() for w, array in kept]
        policy = net.policy_layers(weights, networks.Normalizer.identity(spec.observation))
        refined, ranges, exact = ptq.Calibrator(ptq.ACTION_STEPS).prepare(policy, x.numpy(), 1024)
        int8, _, _ = interpreter.run(quantizer.Quantizer().quantize(refined, ranges, x.numpy()), x.numpy())
        return compare.actions(exact, int8, spec.action)

    free, dear = trained(0.0), trained(100.0)
    assert dear.error_mean < 0.75 * free.error_mean
    assert dear.error_p99 < 0.75 * free.error_p99


def test_discrete_actions_are_refused() -> None:
    spec = specs.EnvSpec(specs.ObservationSpec((2,)), specs.ActionSpec("discrete", n=2))
    with pytest.raises(errors.SpecError, match="D4PG learns continuous actions") as caught:
        d4pg.D4pg(spec, config.D4pgConfig(), seed=0)
    assert "dqn" in caught.value.todo
    with pytest.raises(errors.SpecError, match="DDPG"):
        ddpg.Ddpg.check(spec)


def test_frames_have_an_encoder_of_their_own_for_the_critic() -> None:
    frames = specs.EnvSpec(specs.ObservationSpec((36, 36, 1), "uint8"), SPEC.action)
    net = actor_critic.ActorCritic.build(frames, (8,), (8,), 1, np.random.default_rng(0))
    weights = list(net.initial().values())
    actor, critic = net.split(weights)
    x = np.random.default_rng(0).random((3, 36, 36, 1)).astype(np.float32)
    action = net.act(actor, x)
    assert (action.shape, net.critic(critic, x, action).shape) == ((3, 2), (3, 1))
    assert net.act_rounded(actor, x).numpy() == pytest.approx(action.numpy(), abs=0.01)
    assert (net.act_rounded(actor, x).numpy() != action.numpy()).all()
    assert len(actor) + len(critic) == len(weights)
