"""Compiled loops over weights: rounding, maxima, products, and what rounding adds."""

from __future__ import annotations

import numpy as np
import pytest

from learner.quantize import kernels


@pytest.mark.parametrize("value", [0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, -0.49999997, 126.5, 63.499996, 3.4999998])
def test_halves_round_away_from_zero(value: float) -> None:
    expected = np.copysign(np.floor(abs(np.float64(np.float32(value))) + 0.5), value)
    assert kernels.half_away(np.array([value], np.float32)) == expected
    written, one = np.zeros((1, 19), np.int8), np.ones(1, np.float32)  # by 16 at once, and the rest one by one
    raised, largest, no_mean = np.ones(1, np.float32), np.ones(1, np.float32), np.zeros(0, np.float32)
    kernels.round_rows(
        np.full((1, 19), value, np.float32), np.ones(19, np.float32), one, no_mean, written, raised, largest
    )
    assert (written == expected).all()
    assert raised == 0
    assert largest == abs(np.float32(value))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_largest_size_of_a_row_tells_what_is_not_finite(bad: float) -> None:
    weights = np.array([[1.0, -3.0, 2.0] * 7, [1.0, bad, 5.0] * 7], np.float32)
    largest = np.zeros(2, np.float32)
    kernels.row_maxima(weights, np.full(21, 0.5, np.float32), largest)
    assert largest[0] == 1.5
    assert not np.isfinite(largest[1])
    written, raised, too = np.zeros((2, 21), np.int8), np.zeros(2, np.float32), np.zeros(2, np.float32)
    kernels.round_rows(weights, np.full(21, 0.5, np.float32), raised + 1, np.zeros(0, np.float32), written, raised, too)
    assert np.array_equal(too, largest, equal_nan=True)
    weights.flags.writeable = False  # as TensorFlow's may be
    kernels.row_maxima(weights, np.full(21, 0.5, np.float32), largest)


@pytest.mark.parametrize("shape", [(4, 2, 32), (7, 5, 33), (32, 9, 100), (3, 8, 64), (8, 1, 64), (8, 8, 31)])
def test_a_product_is_that_of_numpy_whatever_the_sizes(shape: tuple[int, int, int]) -> None:
    count, outputs, inputs = shape
    rng = np.random.default_rng(count)
    x, weights = (rng.standard_normal((n, inputs)).astype(np.float32) for n in (count, outputs))
    np.testing.assert_allclose(kernels.product(x.T.copy().T, weights), x.astype(np.float64) @ weights.T, atol=1e-4)
    weights[-1, 0] = np.nan
    assert np.isnan(kernels.product(x, weights)[:, -1]).all()


def test_what_rounding_adds_is_told() -> None:
    rng = np.random.default_rng(5)
    weights, columns, mean = (rng.uniform(-1, 1, n).astype(np.float32) for n in ((9, 77), 77, 77))
    written, raised = np.zeros((9, 77), np.int8), np.zeros(9, np.float32)
    kernels.round_rows(weights, columns, np.full(9, 100, np.float32), mean, written, raised, np.zeros(9, np.float32))
    exact = weights.astype(np.float64) * columns * 100
    assert raised == pytest.approx((written - exact) @ mean, abs=1e-3)
    assert np.abs(written - exact).max() <= 0.5001
