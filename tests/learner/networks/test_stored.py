"""Tests for how training stores kernels, against the layers that they come from."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from learner.networks import fake_quant, forward, layers, networks, stored

SHAPES = [(5, 3), (4, 4), (2, 7), (1, 6), (3, 2, 2, 1), (6,)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_read_as_it_was_written_and_lies_with_its_longer_side_last(shape: tuple[int, ...]) -> None:
    first, second = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    weight = stored.Weight("group/name", first)
    assert np.array_equal(weight.numpy(), first)
    weight.assign(second)
    assert np.array_equal(weight.numpy(), second)
    assert weight.numpy().flags.c_contiguous and weight.shape == shape
    if len(shape) == 2:
        assert tuple(weight.variable.shape) == tuple(sorted(shape))
        assert stored.is_turned(shape) == (shape[0] >= shape[1])
    else:
        assert tuple(weight.variable.shape) == shape


def test_a_large_kernel_is_not_turned_for_each_policy() -> None:
    assert stored.is_turned((512, 512))
    assert not stored.is_turned((1024, 512))


def test_stored_weights_run_as_those_of_layers_do() -> None:
    rng = np.random.default_rng(1)
    stack = (*(networks.dense(n, m, "relu", rng) for n, m in ((3, 8), (8, 8))), networks.dense(8, 2, "none", rng))
    arrays, x = layers.arrays(stack), rng.normal(size=(5, 3)).astype(np.float32)
    kept = [stored.Weight(name, array).variable for name, array in arrays.items()]
    expected = forward.run(stack, list(arrays.values()), x).numpy()
    assert forward.run_stored(stack, kept, x).numpy() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4), (4, 2, 2, 3)])
def test_an_output_has_the_same_rounding_and_gradient_either_way(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    kernel, upstream = rng.normal(size=(2, *shape)).astype(np.float32)
    weight = stored.Weight("kernel", kernel)
    turn = np.transpose if stored.is_turned(shape) else np.asarray
    with tf.GradientTape() as tape:
        tape.watch(weight.variable)
        rounded = fake_quant.by_largest(weight.variable, 127, stored.output_axes(shape))
        loss = tf.reduce_sum(rounded * turn(upstream))
    gradient = turn(tape.gradient(loss, weight.variable).numpy())

    rows, up = kernel.reshape(len(kernel), -1), upstream.reshape(len(kernel), -1)
    step = np.abs(rows).max(1, keepdims=True) / 127
    error = np.round(rows / step) - rows / step
    is_largest = np.abs(rows) == np.abs(rows).max(1, keepdims=True)
    by_hand = up + is_largest * np.sign(rows) * (up * error).sum(1, keepdims=True) / 127
    assert turn(rounded.numpy()) == pytest.approx((rows + step * error).reshape(shape), rel=1e-6)
    assert gradient == pytest.approx(by_hand.reshape(shape), rel=1e-5, abs=1e-6)
