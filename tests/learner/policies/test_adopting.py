"""A policy read back from its int8 file: it acts as before, behind any normaliser, and learning goes on from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import messages, specs, topics
from learner import algorithms, config
from learner.algorithms import registry
from learner.experience.buffers import replay
from learner.files import records
from learner.networks import layers
from learner.policies import adopting, publisher
from learner.quantize import fp32
from tests.learner.policies import test_publisher

CHOICES = specs.EnvSpec(specs.ObservationSpec((6,)), specs.ActionSpec("discrete", n=3))
MOTORS = specs.EnvSpec(
    specs.ObservationSpec((6,)), specs.ActionSpec("continuous", shape=(2,), low=(-1.0, -4.0), high=(1.0, 2.0))
)
SCREEN = specs.EnvSpec(specs.ObservationSpec((10, 10, 4), "uint8"), specs.ActionSpec("discrete", n=3))
ANY_POLICY = config.GateConfig(
    gate_agreement_min=0.0,
    gate_ties_max=1.0,
    gate_saturation_max=1.0,
    gate_action_error_max=9.0,
    gate_action_error_p99_max=9.0,
    gate_kl_max=99.0,
    gate_kl_p99_max=99.0,
)
REPLAYED: dict[str, Any] = {"hidden": (16, 16), "batch_size": 8}


def made(settings: config.AlgorithmConfig, spec: specs.EnvSpec, seed: int) -> algorithms.Algorithm:
    name = next(name for name, kind in config.ALGORITHMS.items() if type(settings) is kind)
    train = config.TrainConfig(algorithm=name, seed=seed)
    return registry.make(config.Settings(train, settings, config.GateConfig()), spec)


def published(policy: layers.PolicyLayers, head: specs.Head, spec: specs.EnvSpec, x: NDArray[Any]) -> messages.Policy:
    """Returns what a fleet has of a policy."""
    going_out = publisher.Publisher(
        test_publisher.Wire(), topics.Topics("f"), spec, head, 3, 0, ANY_POLICY, None, records.Records()
    )
    try:
        verdict = going_out.publish(policy, x[:192], x[192:]).result()
        assert verdict.passed, verdict.reason
        assert going_out.newest is not None
        return messages.Policy(going_out.newest.manifest, np.frombuffer(going_out.newest.model, np.uint8))
    finally:
        going_out.close()


def seen(spec: specs.EnvSpec, count: int = 256) -> NDArray[Any]:
    rng, shape = np.random.default_rng(1), (count, *spec.observation.shape)
    if spec.observation.dtype == "uint8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    return (5.0 + np.array([1, 0.1, 3, 1, 20, 1]) * rng.standard_normal(shape)).astype(np.float32)


def grown(settings: config.AlgorithmConfig, spec: specs.EnvSpec, x: NDArray[Any]) -> algorithms.Algorithm:
    """Returns one whose outputs are far apart, as training makes them."""
    algorithm = made(settings, spec, 1)
    algorithm.normalize(x)
    last = [name for name in layers.arrays(algorithm.policy_layers()) if name.endswith("/kernel")][-1]
    state = algorithm.state()
    found = [name for name in state if name.startswith("weights/") and state[name].shape == _shape(algorithm, last)]
    state[found[0]] = state[found[0]] * 30.0
    algorithm.restore(state)
    return algorithm


def _shape(algorithm: algorithms.Algorithm, name: str) -> tuple[int, ...]:
    return layers.arrays(algorithm.policy_layers())[name].shape


def batch(spec: specs.EnvSpec, x: NDArray[Any]) -> replay.Batch:
    rng, shape = np.random.default_rng(2), (2, 8)
    some = x[:16].reshape(2, 8, *x.shape[1:])
    action = (
        rng.integers(0, spec.action.n, shape).astype(np.int32)
        if spec.action.kind == "discrete"
        else rng.uniform(-1, 1, (*shape, *spec.action.shape)).astype(np.float32)
    )
    ones = np.ones(shape, np.float32)
    return replay.Batch(some, action, ones, 0.9 * ones, some, ones, np.zeros(shape, np.int64))


@pytest.mark.parametrize(
    ("settings", "spec"),
    [
        (config.DqnConfig(**REPLAYED), CHOICES),
        (config.DqnConfig(**REPLAYED, dueling=False), CHOICES),
        (config.DqnConfig(**REPLAYED), SCREEN),
        (config.DdpgConfig(**REPLAYED, critic_hidden=(16,)), MOTORS),
        (config.SacConfig(**REPLAYED, critic_hidden=(16,)), MOTORS),
    ],
    ids=["dqn", "plain dqn", "pixels", "ddpg", "sac"],
)
def test_a_policy_goes_on_as_it_was_published(settings: config.AlgorithmConfig, spec: specs.EnvSpec) -> None:
    x = seen(spec)
    old, new = grown(settings, spec, x), made(settings, spec, 2)
    expected, head = fp32.outputs(old.policy_layers(), x), old.head
    found = published(old.policy_layers(), head, spec, x)
    assert adopting.adopt(new, found, spec, settings) == ""
    outputs = fp32.outputs(new.policy_layers(), x)
    reach = np.abs(expected - expected.mean(0)).mean()
    assert np.abs(outputs - expected).mean() < 0.1 * reach, "but for eight bits"
    new.normalize(seen(spec, 100))
    assert fp32.outputs(new.policy_layers(), x) == pytest.approx(outputs, abs=1e-3 * float(np.abs(outputs).max()))
    if isinstance(settings, config.SacConfig):  # whose targets are of critics alone, and which takes long to compile
        return
    state = new.state()
    targets = [name for name in state if name.startswith("targets/") and name.replace("targets", "weights") in state]
    policy = len(layers.arrays(new.policy_layers()))
    for name in targets[:policy]:
        assert np.array_equal(state[name], state[name.replace("targets", "weights")]), "targets begin there, too"
    update = new.update(batch(spec, x))
    assert np.isfinite(update.td_error).all()
    after = fp32.outputs(new.policy_layers(), x)
    assert 0.0 < np.abs(after - outputs).mean() < 0.5 * reach, "it learns, from there"


def test_what_does_not_fit_is_named_and_leaves_the_algorithm_as_it_was() -> None:
    settings, x = config.DqnConfig(**REPLAYED), seen(CHOICES)
    old = grown(settings, CHOICES, x)
    found = published(old.policy_layers(), old.head, CHOICES, x)
    new = made(settings, CHOICES, 2)
    before = new.state()
    wider = made(config.DqnConfig(hidden=(16, 32)), CHOICES, 2)
    phased = made(config.PpoConfig(hidden=(16, 16)), CHOICES, 2)
    other = dataclasses.replace(found.manifest, fingerprint="x")
    categorical = dataclasses.replace(found.manifest, head="categorical")
    scrambled = np.array(found.model)
    middle = len(scrambled) // 2  # of the weights
    scrambled[middle:] = 0
    refusals = [
        adopting.adopt(new, messages.Policy(other, found.model), CHOICES, settings),
        adopting.adopt(new, messages.Policy(categorical, found.model), CHOICES, settings),
        adopting.adopt(new, messages.Policy(found.manifest, found.model[:100]), CHOICES, settings),
        adopting.adopt(new, messages.Policy(found.manifest, scrambled), CHOICES, settings),
        adopting.adopt(wider, found, CHOICES, config.DqnConfig(hidden=(16, 32))),
        adopting.adopt(phased, messages.Policy(categorical, found.model), CHOICES, config.PpoConfig()),
    ]
    assert "another environment" in refusals[0]
    assert "outputs are categorical" in refusals[1]
    assert "cannot be read back" in refusals[2] and refusals[3]
    assert "weights" in refusals[4] and "each phase" in refusals[5]
    after = new.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_who_has_a_policy_explores_as_at_the_end() -> None:
    assert adopting.explored(config.DqnConfig()).epsilon == config.Epsilon(0.05, 0.05, 10_000)
    assert adopting.explored(config.PpoConfig()) == config.PpoConfig()
