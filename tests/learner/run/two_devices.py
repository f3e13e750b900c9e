"""Updates on two devices of the CPU: where they are, what they come to, and what a checkpoint is.

`test_devices` runs these in a process of their own, in which the CPU can still be divided.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import errors, specs
from learner import algorithms, config
from learner.algorithms import compiled, sac
from learner.experience.buffers import replay
from learner.files import checkpoint
from learner.networks import layers
from learner.run import devices

BOTH = ("CPU:0", "CPU:1")
SPEC = specs.EnvSpec(specs.ObservationSpec((2,)), specs.ActionSpec("discrete", n=2))
REACH = specs.EnvSpec(specs.ObservationSpec((2,)), specs.ActionSpec("continuous", shape=(1,), low=(-1.0,), high=(1.0,)))
SMALL: dict[str, Any] = {
    "hidden": (8,), "dueling": False, "learning_rate": 0.01, "target_period": 3, "huber_delta": 1.0
}  # fmt: skip

devices.prepare(BOTH)


def settings(*named: str, algorithm: config.AlgorithmConfig | None = None, **changes: Any) -> config.Settings:
    chosen = algorithm or config.DqnConfig(**{**SMALL, **changes})
    return config.Settings(config.TrainConfig(learner_devices=named, seed=7), chosen, config.GateConfig())


def replicas(chosen: config.Settings, spec: specs.EnvSpec = SPEC) -> tuple[devices.Replicas, list[compiled.Compiled]]:
    """What the settings make, and what it is made of."""
    made = devices.make(chosen, spec)
    assert isinstance(made, devices.Replicas)
    inner: list[compiled.Compiled] = [one for one in made._replicas if isinstance(one, compiled.Compiled)]
    assert len(inner) == len(chosen.train.learner_devices)
    return made, inner


@pytest.fixture(scope="module")
def compiled_once() -> tuple[devices.Replicas, list[compiled.Compiled], algorithms.State]:
    made, inner = replicas(settings(*BOTH))
    return made, inner, made.state()


@pytest.fixture
def both(
    compiled_once: tuple[devices.Replicas, list[compiled.Compiled], algorithms.State],
) -> tuple[devices.Replicas, list[compiled.Compiled]]:
    """Two replicas as they begin: what they compiled, for 2 x 4 minibatches of 16, is for all tests."""
    made, inner, beginning = compiled_once
    made.restore(beginning)
    return made, inner


@pytest.fixture(scope="module")
def plain() -> algorithms.Algorithm:
    """The same algorithm where no device is named."""
    return devices.make(settings(), SPEC)


def batches(k: int, b: int = 16, seed: int = 0) -> replay.Batch:
    rng = np.random.default_rng(seed)
    return replay.Batch(
        observation=rng.normal(size=(k, b, 2)).astype(np.float32),
        action=rng.integers(0, 2, (k, b)).astype(np.int32),
        reward=rng.normal(size=(k, b)).astype(np.float32),
        discount=np.full((k, b), 0.9, np.float32),
        bootstrap=rng.normal(size=(k, b, 2)).astype(np.float32),
        weight=rng.uniform(0.5, 1.0, (k, b)).astype(np.float32),
        ids=np.zeros((k, b), np.int64),
    )


def half(batch: replay.Batch, which: int) -> replay.Batch:
    k = len(batch.reward) // 2
    return replay.Batch(*(getattr(batch, field.name)[which * k :][:k] for field in dataclasses.fields(batch)))


def same(one: algorithms.State, other: algorithms.State) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def _variables(one: compiled.Compiled) -> list[Any]:
    return [*one.trained, one._gain, one._offset, one._updates]


def test_all_of_a_replica_is_on_its_device_and_is_computed_there(
    both: tuple[devices.Replicas, list[compiled.Compiled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, inner = both
    computed: list[str] = []
    told = compiled.Compiled._told

    def where(self: compiled.Compiled, metrics: Any, td_error: Any) -> algorithms.Update:
        computed.extend((metrics.backing_device, td_error.backing_device))
        return told(self, metrics, td_error)

    monkeypatch.setattr(compiled.Compiled, "_told", where)
    made.update(batches(8))
    for name, one in zip(BOTH, inner, strict=True):
        assert {variable.device.rpartition("device:")[2] for variable in _variables(one)} == {name}
    assert sorted(place.rpartition("device:")[2] for place in computed) == sorted((*BOTH, *BOTH))


def test_one_device_is_where_it_is_named_and_computes_what_it_does_where_none_is(plain: algorithms.Algorithm) -> None:
    made, (inner,) = replicas(settings("CPU:1"))
    assert {variable.device.rpartition("device:")[2] for variable in _variables(inner)} == {"CPU:1"}
    plain.restore(made.state())
    for seed in range(2):
        found, expected = (one.update(batches(4, seed=seed)) for one in (made, plain))
        assert found.metrics == expected.metrics
        assert (found.td_error == expected.td_error).all()
    assert same(made.state(), plain.state())


def test_the_mean_of_two_steps_by_hand() -> None:
    made, _ = replicas(settings(*BOTH, hidden=(), max_grad_norm=1e9))
    state = made.state()
    kernel = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)  # q = (x0, 2 x1)
    state["weights/advantage/0/kernel"] = kernel
    made.restore(state)
    batch = replay.Batch(
        observation=np.array([[[1.0, 3.0]], [[2.0, 0.5]]], np.float32),
        action=np.array([[0], [1]], np.int32),
        reward=np.array([[5.0], [-5.0]], np.float32),
        discount=np.zeros((2, 1), np.float32),
        bootstrap=np.zeros((2, 1, 2), np.float32),
        weight=np.ones((2, 1), np.float32),
        ids=np.zeros((2, 1), np.int64),
    )
    update = made.update(batch)
    assert update.td_error.tolist() == [[5.0 - 1.0], [-5.0 - 1.0]]
    assert update.metrics["loss"] == (3.5 + 5.5) / 2  # Huber, delta 1
    assert update.metrics["q_mean"] == ((1.0 + 6.0) / 2 + (2.0 + 1.0) / 2) / 2
    # The gradient is -1 times the input in the row of action 0 on one device, 1 times it in that of 1 on the other
    gradients = np.array([[[-1.0, -3.0], [0.0, 0.0]], [[0.0, 0.0], [2.0, 0.5]]])
    after = made.state()
    assert after["adam_m/advantage/0/kernel"] == pytest.approx(0.1 * gradients.mean(0))
    assert after["adam_v/advantage/0/kernel"] == pytest.approx(0.001 * (gradients**2).mean(0), rel=1e-4)
    # Adam's first step has the size of the learning rate on either device
    assert after["weights/advantage/0/kernel"] == pytest.approx(kernel - 0.01 * np.sign(gradients).mean(0), abs=1e-6)
    assert made.updates == after["updates"] == 1


def test_after_a_call_all_replicas_are_the_mean_of_what_each_came_to(
    both: tuple[devices.Replicas, list[compiled.Compiled]], plain: algorithms.Algorithm
) -> None:
    """Targets are copied within a call (`target_period` 3 of 4 steps): they are a mean as well."""
    made, inner = both
    made.normalize(np.random.default_rng(0).normal(3, 2, (100, 2)))
    for call in range(2):
        before, batch = made.state(), batches(8, seed=call)
        update = made.update(batch)
        came_to, each = [], []
        for at in range(2):  # as the replicas do, one after the other
            plain.restore(before)
            each.append(plain.update(half(batch, at)))
            came_to.append(plain.state())
        first, second = came_to
        assert not same(first, second)
        mean = {name: ((first[name] + second[name]) / 2).astype(first[name].dtype) for name in first}
        assert same(made.state(), mean)
        assert all(same(one.state(), mean) for one in inner)
        assert np.array_equal(update.td_error, np.concatenate([one.td_error for one in each])), "in the batch's order"
        for name, value in update.metrics.items():
            assert value == np.mean([one.metrics[name] for one in each])
    assert made.updates == 8


def test_replicas_draw_apart_and_begin_alike() -> None:
    _, inner = replicas(settings(*BOTH, algorithm=config.SacConfig(hidden=(8,), critic_hidden=(8,))), REACH)
    assert [one._seed for one in inner if isinstance(one, sac.Sac)] == [7, 8]
    assert same(inner[0].state(), inner[1].state())


def test_a_checkpoint_goes_on_bit_for_bit_and_on_any_number_of_devices(
    both: tuple[devices.Replicas, list[compiled.Compiled]], plain: algorithms.Algorithm, tmp_path: Path
) -> None:
    made, _ = both
    made.normalize(np.random.default_rng(0).normal(3, 2, (100, 2)))
    made.update(batches(8))
    checkpoint.save(tmp_path, made.updates, {}, {"algorithm": made.state()})
    made.update(batches(8, seed=1))

    saved = checkpoint.load_newest(tmp_path)
    assert saved is not None
    again, _ = replicas(settings(*BOTH))
    again.restore(saved.parts["algorithm"])
    again.update(batches(8, seed=1))
    assert same(again.state(), made.state())
    plain.restore(saved.parts["algorithm"])
    assert plain.updates == 4
    assert same(plain.state(), dict(saved.parts["algorithm"]))
    with pytest.raises(errors.RunError, match="another network"):
        replicas(settings(*BOTH, hidden=(9,)))[0].restore(saved.parts["algorithm"])


def test_numbers_that_are_not_finite_show_whichever_device_computed_them(
    both: tuple[devices.Replicas, list[compiled.Compiled]],
) -> None:
    made, inner = both
    good, batch = made.state(), batches(8)
    batch.reward[5] = np.inf  # of the second device
    assert not np.isfinite(made.update(batch).metrics["loss"])
    made.restore(good)
    assert all(same(one.state(), good) for one in inner)
    assert np.isfinite(made.update(batches(8)).metrics["loss"])


def test_learns_which_action_pays_through_prioritized_replay(
    both: tuple[devices.Replicas, list[compiled.Compiled]],
) -> None:
    (made, _), rng = both, np.random.default_rng(0)
    memory = replay.of(SPEC, config.DqnConfig(n_step=1, prioritized=True))
    memory.insert(_Lit(rng))
    made.normalize(memory.observations(500, rng))
    for _ in range(100):
        batch = memory.sample(8, 16, rng)
        memory.update_priorities(batch.ids, made.update(batch).td_error)
    outputs = np.array([[-1.0, 0.0], [1.0, 0.0]], np.float32)
    for layer in made.policy_layers():
        assert isinstance(layer, layers.Dense)
        outputs = outputs @ layer.kernel.T + layer.bias
        outputs = np.maximum(outputs, 0) if layer.activation == "relu" else outputs
    assert outputs.argmax(1).tolist() == [0, 1]
    assert np.abs(np.diff(outputs)).ravel().tolist() == pytest.approx([1.0, 1.0], abs=0.1), "what the right one pays"


class _Lit:
    """500 steps, each an episode: the first feature says which action pays 1."""

    def __init__(self, rng: np.random.Generator) -> None:
        lit = rng.integers(0, 2, 500)
        self.length, self.terminated = np.ones(500, np.int32), np.ones(500, np.uint8)
        observation = np.stack([2.0 * lit - 1.0, rng.normal(size=500)], 1).astype(np.float32)
        self.observation = np.repeat(observation, 2, axis=0)  # each has one that it ends in
        self.action = rng.integers(0, 2, 500).astype(np.int32)
        self.reward = (self.action == lit).astype(np.float32)
