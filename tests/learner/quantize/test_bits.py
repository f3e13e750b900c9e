"""Weights of few bits, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from broker.contract import errors
from learner.networks import layers
from learner.quantize import bits

KERNEL = np.array([[3.0, 1.0, -1.6], [-0.9, 0.2, 0.0]], np.float32)
BIAS = np.array([0.123, -0.456], np.float32)
POLICY = (layers.Flatten(), layers.Dense(KERNEL, BIAS, "relu"))


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (2, [[3, 0, -3], [-0.9, 0, 0]]),  # steps of 3 and 0.9
        (3, [[3, 1, -2], [-0.9, 0.3, 0]]),  # steps of 1 and 0.3
        (4, [[3, 3 / 7 * 2, -3 / 7 * 4], [-0.9, 0.9 / 7 * 2, 0]]),
    ],
)
def test_each_output_channel_has_its_own_steps(width: int, expected: list[list[float]]) -> None:
    flatten, dense = bits.rounded(POLICY, width)
    assert flatten == layers.Flatten()
    assert isinstance(dense, layers.Dense)
    assert dense.kernel == pytest.approx(np.array(expected), abs=1e-6)
    assert dense.kernel.dtype == np.float32
    assert dense.bias is BIAS
    assert dense.activation == "relu"


@pytest.mark.parametrize("width", range(2, 8))
def test_no_more_levels_than_bits_and_no_weight_moves_by_more_than_half_a_step(width: int) -> None:
    kernel = np.random.default_rng(width).normal(size=(4, 3, 3, 2)).astype(np.float32)
    (conv,) = bits.rounded((layers.Conv2D(kernel, np.zeros(4, np.float32), 1, "none"),), width)
    assert isinstance(conv, layers.Conv2D)
    step = np.abs(kernel).max((1, 2, 3), keepdims=True) / (2 ** (width - 1) - 1)
    assert (np.abs(conv.kernel - kernel) <= step / 2 * (1 + 1e-5)).all()
    for channel in range(4):
        assert len(np.unique(conv.kernel[channel])) <= 2**width - 1


def test_a_channel_of_zeros_stays_and_eight_bits_are_left_to_the_conversion() -> None:
    silent = (layers.Dense(np.zeros((2, 2), np.float32), BIAS, "none"),)
    (dense,) = bits.rounded(silent, 2)
    assert isinstance(dense, layers.Dense)
    assert not dense.kernel.any()
    assert bits.rounded(POLICY, 8) is POLICY


@pytest.mark.parametrize("width", [1, 9])
def test_other_widths_are_refused(width: int) -> None:
    with pytest.raises(errors.ConfigError, match=f"weights of {width} bits"):
        bits.rounded(POLICY, width)
