"""What is random in acting is pinned: a learner draws again what an actor of another machine drew."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from broker.contract import specs
from broker.contract.acting import draws

CHOICES = specs.ActionSpec("discrete", n=6)
ARM = specs.ActionSpec("continuous", shape=(3,), low=(-1.0, 0.0, -2.5), high=(1.0, 5.0, 0.1))
PINNED = "956224459a98c44f57e97ae5"
"""The same on emulated Cortex-A53 and A76 with numpy 1.26; tests/pi/answers.py compares it on each board."""


def test_a_block_is_what_it_was_on_every_machine_and_release() -> None:
    found = hashlib.sha256()
    for block in range(20):
        for action in (CHOICES, ARM):
            for array in draws.exploring(7, 3, block, action, 4):
                found.update(array.astype("<f8").tobytes())
            if action is ARM:
                found.update(draws.perturbations(7, 3, block, ARM, 4, 0.2, 0.0).tobytes())
                found.update(draws.sampling(7, 3, block, ARM, 4, "gaussian").tobytes())
    assert found.hexdigest()[:24] == PINNED, "change it only together with a new SCHEMA_VERSION"


def test_seed_slot_and_block_each_make_others() -> None:
    chances = [draws.exploring(*place, CHOICES, 1)[0] for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len({one.tobytes() for one in chances}) == 4
    again, _ = draws.exploring(0, 0, 0, CHOICES, 16)
    np.testing.assert_array_equal(chances[0], again)


@pytest.mark.parametrize("correlation_steps", [0.0, 3.0, 100.0])
def test_noise_has_its_deviation_from_a_blocks_first_row_on(correlation_steps: float) -> None:
    first = np.concatenate([draws.perturbations(0, 0, b, ARM, 64, 0.5, correlation_steps)[:5] for b in range(40)])
    assert first.std((0, 1)) == pytest.approx([0.5, 1.25, 0.65], rel=0.1)
    assert np.abs(first.mean((0, 1))).max() < 0.15
