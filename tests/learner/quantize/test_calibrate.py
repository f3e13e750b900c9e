"""How many observations policies are calibrated and judged with."""

from __future__ import annotations

import numpy as np
import pytest

from learner.networks import layers
from learner.quantize import calibrate


def mlp(width: int) -> layers.PolicyLayers:
    zeros = np.zeros(width, np.float32)
    return (layers.Dense(np.zeros((width, width), np.float32), zeros, "relu"),) * 2


def convolutional(width: int) -> layers.PolicyLayers:
    convolution = layers.Conv2D(np.zeros((16, 3, 3, 6), np.float32), np.zeros(16, np.float32), 1, "relu")
    return (convolution, layers.Flatten(), *mlp(width))


def test_behind_convolutions_ranges_that_nobody_waits_for_see_four_times_as_much() -> None:
    alone, ahead = (calibrate.sample(convolutional(256), ahead=ahead) for ahead in (False, True))
    assert 64 < alone.calibration < 256
    assert ahead.calibration == pytest.approx(4 * alone.calibration, abs=4)
    assert ahead.held_back == alone.held_back  # the gate is waited for
    for width in (16, 256, 1024):
        assert calibrate.sample(mlp(width), ahead=True) == calibrate.sample(mlp(width), ahead=False)


@pytest.mark.parametrize(("width", "expected"), [(16, (1024, 256)), (256, (255, 63)), (2048, (64, 32))])
def test_the_wider_a_network_the_fewer_and_never_too_few(width: int, expected: tuple[int, int]) -> None:
    assert calibrate.sample(mlp(width), ahead=False) == expected


@pytest.mark.parametrize(("drawn", "judging"), [(1075, 63), (400, 32), (100, 32), (40, 20), (3, 1), (2, 1)])
def test_a_sample_is_divided_and_nothing_is_in_both(drawn: int, judging: int) -> None:
    seen = np.arange(drawn)[:, None]
    calibration, held_back = calibrate.Sample(1012, 63).split(seen)
    assert len(held_back) == judging
    assert sorted([*calibration[:, 0], *held_back[:, 0]]) == list(range(drawn))
