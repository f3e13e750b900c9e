"""Networks: shapes, what is exported, and that the exported numbers say the same as the trained ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner.networks import convolutions, forward, layers, networks, stored


def spec_of(shape: tuple[int, ...], dtype: str = "float32", actions: int = 3) -> specs.EnvSpec:
    return specs.EnvSpec(specs.ObservationSpec(shape, dtype), specs.ActionSpec("discrete", n=actions))


def sample(spec: specs.EnvSpec, n: int) -> NDArray[Any]:
    rng = np.random.default_rng(1)
    shape = (n, *spec.observation.shape)
    if spec.observation.dtype == "uint8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    return (rng.normal(size=shape) * 3 + 5).astype(np.float32)


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4,), "float32"), ((3, 2), "float32"), ((8,), "uint8"), ((36, 40, 2), "uint8"), ((20, 20, 1), "uint8")],
)
def test_exported_policy_is_the_network_up_to_the_mean_over_actions(
    shape: tuple[int, ...], dtype: str, dueling: bool
) -> None:
    spec = spec_of(shape, dtype)
    network = networks.QNetwork.build(spec, (16, 8), dueling, np.random.default_rng(0))
    weights = [a + (0.5 if a.ndim == 1 else 0) for a in network.initial().values()]  # biases keep units alive
    x = sample(spec, 5)
    normalizer = networks.Normalizer.fitted(spec.observation, sample(spec, 50), floor=0.1)
    flat = x if networks.is_image(spec.observation) else x.reshape(5, -1)
    inputs = tf.constant(flat.astype(np.float32) * normalizer.gain + normalizer.offset)
    q = network.q_values([stored.of(a) for a in weights], inputs).numpy()
    assert q.shape == (5, 3)
    policy = network.q_layers(weights, normalizer)
    merged = forward.run(policy, list(layers.arrays(policy).values()), x.astype(np.float32)).numpy()
    assert merged == pytest.approx(q, abs=1e-4 * float(np.abs(q).max()) + 1e-6)
    policy = network.policy_layers(weights, normalizer)
    advantages = forward.run(policy, list(layers.arrays(policy).values()), x.astype(np.float32)).numpy()
    assert advantages == pytest.approx(q - q.mean(1, keepdims=True), abs=1e-4 * float(np.abs(q).max()) + 1e-6)
    assert np.ptp(advantages) > 1e-3


def test_dueling_adds_value_and_centred_advantage() -> None:
    one = layers.Dense(np.array([[1.0], [2.0], [6.0]], np.float32), np.zeros(3, np.float32), "none")
    value = layers.Dense(np.array([[10.0]], np.float32), np.array([5.0], np.float32), "none")
    network = networks.QNetwork(torso=(), advantage=(one,), value=(value,))
    q = network.q_values([stored.of(a) for a in network.initial().values()], tf.constant([[2.0]]))
    assert q.numpy().tolist() == [[25 + 2 - 6, 25 + 4 - 6, 25 + 12 - 6]]


def test_forward_by_hand() -> None:
    hidden = layers.Dense(np.array([[1.0, 2.0], [-1.0, 0.0]], np.float32), np.array([0.0, 1.0], np.float32), "relu")
    last = layers.Dense(np.array([[0.5, 3.0]], np.float32), np.array([-0.25], np.float32), "tanh")
    stack = (layers.Flatten(), hidden, last)
    out = forward.run(stack, list(layers.arrays(stack).values()), tf.constant([[[1.0], [1.0]], [[-3.0], [1.0]]]))
    # relu(1 + 2, -1 + 1) = (3, 0);   relu(-3 + 2, 3 + 1) = (0, 4)
    assert out.numpy()[:, 0] == pytest.approx(np.tanh([1.25, 11.75]))


def test_convolutions_by_name() -> None:
    def shapes(network: str, *shape: int, dtype: str = "uint8") -> list[tuple[int, ...]]:
        observation = specs.ObservationSpec(shape, dtype)
        stack, width = networks.torso(observation, (7,), np.random.default_rng(0), network)
        assert width == 7
        return [layer.kernel.shape for layer in layers.weighted(stack)]

    nature = [(32, 8, 8, 4), (64, 4, 4, 32), (64, 3, 3, 64), (7, 3136)]
    assert shapes("auto", 84, 84, 4) == shapes("nature", 84, 84, 4) == nature
    assert shapes("impala-small", 84, 84, 4) == [(16, 8, 8, 4), (32, 4, 4, 16), (7, 9 * 9 * 32)]
    assert shapes("mlp", 84, 84, 4) == [(7, 84 * 84 * 4)]
    assert shapes("auto", 10, 10, 4) == [(16, 3, 3, 4), (7, 1024)]  # as in Young and Tian 2019
    assert shapes("auto", 36, 36, 1)[0] == (32, 8, 8, 1)
    assert shapes("auto", 35, 36, 1)[0] == (16, 3, 3, 1)
    assert shapes("auto", 2, 36, 1) == shapes("nature", 72) == [(7, 72)]
    assert shapes("auto", 84, 84, 4, dtype="float32") == [(7, 84 * 84 * 4)]
    with pytest.raises(errors.ConfigError, match=r"impala-small leave nothing of observations \(10, 10, 4\)"):
        shapes("impala-small", 10, 10, 4)


@pytest.mark.parametrize(("size", "stride"), [(8, 4), (4, 2), (3, 1), (3, 2), (2, 2), (5, 3), (1, 1)])
@pytest.mark.parametrize("outputs", [2, 5])  # fewer than channels, and more, where the stride makes none
@pytest.mark.parametrize("sides", [(13, 11), (8, 9)])
def test_products_are_the_convolution(size: int, stride: int, outputs: int, sides: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=(2, *sides, 3)).astype(np.float32))
    kernel = tf.constant(rng.normal(size=(outputs, size, size, 3)).astype(np.float32))

    def of(convolve: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = convolve(x, kernel, stride)
            weight = tf.reshape(tf.range(tf.size(y), dtype=tf.float32), y.shape) / 100
            loss = tf.reduce_sum(weight * y)
        return [y, *tape.gradient(loss, [x, kernel])]

    for ours, theirs in zip(of(convolutions.by_products), of(convolutions.native), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_convolutions_come_in_front_of_the_dense_layers() -> None:
    network = networks.QNetwork.build(spec_of((84, 84, 4), "uint8"), (512,), False, np.random.default_rng(0))
    shapes = {name: a.shape for name, a in network.initial().items()}
    assert shapes["torso/0/kernel"] == (32, 8, 8, 4)
    assert shapes["torso/2/kernel"] == (64, 3, 3, 64)
    assert shapes["torso/4/kernel"] == (512, 3136)  # as in Mnih et al. 2015


def test_dueling_streams_have_a_hidden_layer_each() -> None:
    network = networks.QNetwork.build(spec_of((4,)), (32, 16), True, np.random.default_rng(0))
    assert {name: a.shape for name, a in network.initial().items() if "kernel" in name} == {
        "torso/0/kernel": (32, 4),
        "advantage/0/kernel": (16, 32),
        "advantage/1/kernel": (3, 16),
        "value/0/kernel": (16, 32),
        "value/1/kernel": (1, 16),
    }


def test_normalizer_gives_mean_0_and_deviation_1_but_for_features_below_the_floor() -> None:
    observation = specs.ObservationSpec((3,))
    x = np.random.default_rng(0).normal((1, -50, 7), (2, 0.01, 0), (10_000, 3)).astype(np.float32)
    normalizer = networks.Normalizer.fitted(observation, x, floor=0.1)
    y = x * normalizer.gain + normalizer.offset
    assert y.mean(0) == pytest.approx([0, 0, 0], abs=1e-3)
    assert y.std(0) == pytest.approx([1, 0.1, 0], abs=1e-2)


def test_bytes_are_brought_to_0_to_1_and_floats_left_alone_before_learning() -> None:
    bytes_ = networks.Normalizer.fitted(specs.ObservationSpec((36, 36, 1), "uint8"), np.zeros((2, 36, 36, 1)), 0.1)
    assert bytes_.gain.tolist() == pytest.approx([1 / 255])
    floats = networks.Normalizer.identity(specs.ObservationSpec((2,)))
    assert (floats.gain.tolist(), floats.offset.tolist()) == ([1, 1], [0, 0])


def test_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    one, same, other = (
        networks.QNetwork.build(spec_of((4,)), (8,), True, np.random.default_rng(seed)).initial() for seed in (1, 1, 2)
    )
    assert all((one[name] == same[name]).all() for name in one)
    assert (one["value/0/kernel"] != other["value/0/kernel"]).any()
