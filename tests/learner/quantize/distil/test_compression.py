"""Fewer bits and pruned weights: their arithmetic by hand, and that the file has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import errors
from learner.networks import layers
from learner.quantize import fp32, input_scaling
from learner.quantize.distil import compression, goals, students
from learner.quantize.tflite import template

FloatArray = NDArray[np.float32]


def policy(seed: int = 0, *, last: layers.Activation = "none") -> layers.PolicyLayers:
    """Two hidden layers of 24 units over features of very different size."""
    rng = np.random.default_rng(seed)
    sizes, found = [4, 24, 24, 3], []
    for width, following in itertools.pairwise(sizes):
        kernel = rng.normal(size=(following, width)) * np.sqrt(2 / width)
        kernel = kernel / np.logspace(-1, 1, 4) if width == 4 else kernel
        activation: layers.Activation = "relu" if following == 24 else last
        bias = rng.normal(0, 0.3, following)
        found.append(layers.Dense(kernel.astype(np.float32), bias.astype(np.float32), activation))
    return tuple(found)


def rows(seed: int = 1, count: int = 1024) -> FloatArray:
    scale = np.logspace(-1, 1, 4, dtype=np.float32)
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32) * scale


def written(model: bytes, count: int) -> list[NDArray[np.int8]]:
    """The weights of each layer as the file has them."""
    return [place.weights for place in template.locate(model, count, per_channel=True).layers]


def test_the_smallest_weights_of_each_output_go_and_one_always_stays() -> None:
    kernel = np.array([[3.0, -1.0, 2.0, -4.0], [0.1, 0.4, -0.3, 0.2]], np.float32)
    assert compression.mask(kernel, 0.5).tolist() == [[True, False, False, True], [False, True, True, False]]
    assert compression.mask(kernel, 0.99).sum(1).tolist() == [1, 1]
    assert compression.mask(kernel, 0.0).all()


@pytest.mark.parametrize("weight_bits", [2, 3, 4, 7])
def test_a_file_has_no_more_levels_than_so_many_bits_have(weight_bits: int) -> None:
    goal = goals.Goal(compressed=compression.Compression(weight_bits))
    made = students.plain(goals.Teacher.of(policy(), (4,), "values"), rows(), goal)
    for at, weights in enumerate(written(made.model, 3)):
        features = weights[:, :4] if at == 0 else weights  # the rest are these, divided by 16, for what rounding left
        assert max(len(np.unique(np.abs(row))) for row in features) <= 2 ** (weight_bits - 1)
        if weight_bits < 5:  # a hundred weights meet all of these
            assert len(np.unique(np.abs(features))) == 2 ** (weight_bits - 1)


@pytest.mark.parametrize("weight_bits", [3, 8])
def test_a_file_has_as_many_zeros_as_were_asked_for(weight_bits: int) -> None:
    goal = goals.Goal(compressed=compression.Compression(weight_bits, prune=0.75))
    made = students.plain(goals.Teacher.of(policy(), (4,), "values"), rows(), goal)
    for weights in written(made.model, 3)[1:]:
        assert ((weights == 0).sum(1) >= 18).all()
    assert compression.nonzero(made.layers) <= 0.25


def test_biases_make_up_for_what_is_taken_away_at_the_mean_input() -> None:
    x, original = rows() + 3, policy()
    affine = input_scaling.from_ranges(x, hi_lo=True)
    means: list[FloatArray] = [affine.apply(x).mean(0)]
    fp32.outputs(original, x, lambda layer, inputs, linear, outputs: means.append(outputs.mean(0)))
    exact = fp32.outputs(original, x)
    off = []
    for known in (None, means[:3]):
        changed = compression.compress(original, compression.Compression(4), affine, known)
        off.append(np.abs((fp32.outputs(changed, x) - exact).mean(0)).max())
    assert off[1] < 0.4 * off[0]


def test_compressing_again_changes_nothing() -> None:
    affine = input_scaling.from_ranges(rows())
    once = compression.compress(policy(), compression.Compression(3, 0.5), affine)
    again = compression.compress(once, compression.Compression(3, 0.5), affine)
    for one, other in zip(layers.arrays(once).values(), layers.arrays(again).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("compressed", "message"),
    [
        (compression.Compression(1), "1 bits"),
        (compression.Compression(9), "9 bits"),
        (compression.Compression(prune=1.0), "a share of 1"),
        (compression.Compression(prune=float("nan")), "a share of nan"),
    ],
)
def test_what_is_not_offered(compressed: compression.Compression, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        compressed.check()
