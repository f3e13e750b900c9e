"""Scales and zero points by hand."""

from __future__ import annotations

import numpy as np
import pytest

from learner.quantize import scales


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point"),
    [
        (0.0, 255.0, 1.0, -128),
        (-255.0, 0.0, 1.0, 127),
        (-128.0, 127.0, 1.0, 0),
        (51.0, 255.0, 1.0, -128),  # widened to include 0
        (-1.0, 1.0, 2 / 255, -1),  # -0.5, away from zero
    ],
)
def test_activation_scale_by_hand(low: float, high: float, scale: float, zero_point: int) -> None:
    assert scales.activation_scale(low, high) == (np.float32(scale), zero_point)
