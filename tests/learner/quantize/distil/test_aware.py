"""Quantization-aware distillation of policies: its arithmetic by hand, what it mends, and that it never harms."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.networks import fake_quant, layers
from learner.quantize import input_scaling
from learner.quantize.distil import aware, distillation
from learner.quantize.tflite import convert, interpreter
from tests.learner import reference

FloatArray = NDArray[np.float32]


def test_fake_quantized_numbers_by_hand() -> None:
    kernel = fake_quant.kernel(np.array([[1.27, 0.0], [0.014, 0.0]], np.float32)).numpy()
    assert kernel == pytest.approx(np.array([[1.27, 0.0], [0.01, 0.0]]), abs=1e-6)  # steps of 0.01; zeros stay zeros
    x = np.array([-3.0, -0.004, 0.006, 1.0, 9.0], np.float32)
    rounded = fake_quant.activation(x, (-0.55, 2.0)).numpy()  # 255 steps of 0.01
    assert rounded == pytest.approx([-0.55, 0.0, 0.01, 1.0, 2.0], abs=1e-6)


def test_the_simulation_is_what_the_int8_model_does() -> None:
    policy, x = random_policy(3), observations()
    exact = reference.outputs(policy, x)
    ranges = aware._Limits(3)
    affine = input_scaling.from_ranges(x)
    scaled, inputs = input_scaling.compensate(policy, affine), affine.apply(x)
    ranges.measure(scaled, inputs)
    simulated = aware._simulate(scaled, list(layers.arrays(scaled).values()), inputs, ranges, 8).numpy()
    real, _, _ = interpreter.run(convert.convert(policy, x, "int8"), x)
    step = float(np.diff(np.unique(real)).min())
    assert np.abs(simulated - real).max() < 2.5 * step  # each layer may round another way, by one
    assert np.mean(np.abs(simulated - real) > 0.5 * step) < 0.05
    assert np.mean(np.abs(exact - real) > 0.5 * step) > 0.2  # fp32 does not say as much


def test_failings_by_hand() -> None:
    exact = np.array([[3.0, 0.0, 1.0], [0.0, 5.0, 1.0]], np.float32)  # gaps 2 and 4, 3 in the mean
    answer = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 0.5]], np.float32)
    assert distillation.failings(answer, exact, "values").tolist() == pytest.approx([1 + 2 / 3, 0])
    # Ranges 3, 5 and 0: the last output counts by any error at all, so leave it out.
    assert distillation.failings(answer[:, :2], exact[:, :2], "actions").tolist() == pytest.approx([1 / 3, 0.4])


def test_loss_sees_of_values_only_what_decides_and_of_actions_everything() -> None:
    exact = np.array([[1.0, 2.0], [4.0, 2.0]], np.float32)
    shifted = exact + np.array([[10.0], [-3.0]], np.float32)
    assert float(distillation.loss(shifted, exact, "values", 1.0)) == pytest.approx(0, abs=1e-6)
    assert float(distillation.loss(shifted, exact, "actions", 1.0)) == pytest.approx((100 + 9) / 2 / exact.var())
    swapped = exact[:, ::-1]
    # Advantages -.5 .5 and 1 -1 swap: squared error (1 + 4) / 2; softmax diverges by gap * tanh(gap / 2).
    divergence = np.mean([1 * np.tanh(1 / 2), 2 * np.tanh(2 / 2)])
    expected = 2.5 / np.array([-0.5, 0.5, 1, -1]).var() + divergence
    assert float(distillation.loss(swapped, exact, "values", 1.0)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bits", [2, 3])
def test_training_mends_what_few_bits_break(bits: int) -> None:
    policy, x = random_policy(2), observations()
    better = aware.distil(policy, x, steps=300, seed=0, weight_bits=bits)
    before, after = agreement(policy, policy, x, bits), agreement(better, policy, x, bits)
    assert 1 - after < 0.75 * (1 - before)
    assert [a.shape for a in layers.arrays(better).values()] == [a.shape for a in layers.arrays(policy).values()]


def test_what_values_have_in_common_is_taken_out_of_them() -> None:
    """Values near 95 do not survive 256 levels; their differences do."""
    policy, x = random_policy(2, value=95), observations()
    better = aware.distil(policy, x, steps=10)
    assert agreement(policy, policy, x) < 0.8
    assert agreement(better, policy, x) > 0.95
    assert np.abs(reference.outputs(better, x)).max() < 0.1 * reference.outputs(policy, x).max()


def test_same_seed_same_weights() -> None:
    policy, x = random_policy(2), observations()
    runs = [aware.distil(policy, x, steps=50, seed=4, weight_bits=3) for _ in range(2)]
    assert runs[0] is not policy
    for one, other in zip(*(layers.arrays(run).values() for run in runs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_policy_that_loses_nothing_is_given_back_as_it_is() -> None:
    policy, x = (layers.Dense(np.eye(2, dtype=np.float32), np.array([0.5, -0.5], np.float32), "none"),), observations()
    apart = x[np.abs(x[:, 0] - x[:, 1] + 1) > 0.5, :2]
    assert aware.distil(policy, apart, steps=10) is policy


def test_weights_are_chosen_by_whoever_ships_them() -> None:
    policy, x = random_policy(2), observations()
    asked: list[layers.PolicyLayers] = []

    def judge(candidate: layers.PolicyLayers, rows: FloatArray, exact: FloatArray) -> FloatArray:
        """Finds everything worse than what was there first."""
        assert len(rows) == len(exact) == len(x) // 4
        np.testing.assert_allclose(exact, reference.outputs(policy, rows), atol=1e-4)
        asked.append(candidate)
        return np.full(len(rows), len(asked), np.float32)

    assert aware.distil(policy, x, steps=10, weight_bits=2, judge=judge) is policy
    assert len(asked) == 2 + 5  # as it was, its values levelled, and five times while it was trained


def test_continuous_actions_behind_tanh() -> None:
    policy, x = random_policy(1, outputs="tanh"), observations()
    better = aware.distil(policy, x, steps=300, outputs="actions", weight_bits=4)
    assert error(better, policy, x) < 0.8 * error(policy, policy, x)


def test_convolutions_are_trained_too() -> None:
    rng = np.random.default_rng(0)
    conv = layers.Conv2D(
        rng.normal(size=(8, 3, 3, 2)).astype(np.float32) / np.float32(1000), np.ones(8, np.float32), 2, "relu"
    )
    dense = layers.Dense(rng.normal(size=(3, 4 * 4 * 8)).astype(np.float32), np.ones(3, np.float32), "none")
    policy, frames = (conv, layers.Flatten(), dense), rng.integers(0, 256, (512, 10, 10, 2)).astype(np.uint8)
    better = aware.distil(policy, frames, steps=200, weight_bits=3)
    exact = reference.outputs(policy, frames).argmax(1)
    same = [
        (interpreter.run(convert.convert(one, frames, "int8", weight_bits=3), frames)[0].argmax(1) == exact).mean()
        for one in (policy, better)
    ]
    assert 1 - same[1] < 0.7 * (1 - same[0])


def observations(seed: int = 9) -> FloatArray:
    return np.random.default_rng(seed).normal(size=(1024, 4)).astype(np.float32)


def random_policy(seed: int, outputs: layers.Activation = "none", value: float = 0.0) -> layers.PolicyLayers:
    """Two hidden layers; with a value, every output is that plus a common function of the observation."""
    rng = np.random.default_rng(seed)

    def dense(n_in: int, n_out: int, activation: layers.Activation) -> layers.Dense:
        kernel = rng.normal(size=(n_out, n_in)) * np.sqrt(2 / n_in)
        return layers.Dense(kernel.astype(np.float32), rng.normal(0, 0.3, n_out).astype(np.float32), activation)

    *hidden, last = dense(4, 32, "relu"), dense(32, 32, "relu"), dense(32, 3, outputs)
    common = (bool(value) * 10 * np.abs(rng.normal(size=32))).astype(np.float32)
    return (*hidden, layers.Dense(last.kernel + common, last.bias + np.float32(value), outputs))


def agreement(policy: layers.PolicyLayers, original: layers.PolicyLayers, x: FloatArray, bits: int = 8) -> float:
    """Returns the agreement of a policy's int8 model with the fp32 original, on fresh observations."""
    fresh = observations(10)
    answer, _, _ = interpreter.run(convert.convert(policy, x, "int8", weight_bits=bits), fresh)
    return float((answer.argmax(1) == reference.outputs(original, fresh).argmax(1)).mean())


def error(policy: layers.PolicyLayers, original: layers.PolicyLayers, x: FloatArray) -> float:
    """Mean difference of a policy's 4-bit model from the fp32 original, on fresh observations."""
    fresh = observations(10)
    answer, _, _ = interpreter.run(convert.convert(policy, x, "int8", weight_bits=4), fresh)
    return float(np.abs(answer - reference.outputs(original, fresh)).mean())
