"""Environments that give frames, as actors load them, and a Nature CNN for them.

python -m tests.benchmarks.speed._pixels HEIGHT WIDTH CHANNELS ACTIONS FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import FrameStackObservation
from numpy.typing import NDArray

from broker.contract import specs
from tests.benchmarks.speed import _clocked

STACK = 4
HIDDEN = (512,)
SPEC = specs.EnvSpec(specs.ObservationSpec((84, 84, STACK), "uint8", STACK), specs.ActionSpec("discrete", n=6))


def car_racing() -> gymnasium.Env[Any, Any]:
    """Frames of 96x96x3, four at a time."""
    return FrameStackObservation(gymnasium.make("CarRacing-v3", continuous=False), STACK)


class Game(_clocked.Clocked):
    """A ball of 84x84 gray frames; costs little, and clocks its own steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 1), np.uint8)

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self._table = list(frames(512))


def frames(count: int) -> NDArray[np.uint8]:
    """Frames [count, 84, 84, 1] of a ball in front of bricks."""
    found = np.zeros((count, 84, 84, 1), np.uint8)
    found[:, 10:26] = 40 + 30 * (np.arange(84)[:, None] // 7 % 5)
    for at, frame in enumerate(found):
        y, x = (abs(at * step % 158 - 79) for step in (3, 2))
        frame[y : y + 4, x : x + 4] = 236
    return found


def observations(count: int) -> NDArray[np.uint8]:
    """What a policy sees of them [count, 84, 84, STACK]."""
    single = frames(count + STACK)
    return np.concatenate([single[at : at + count] for at in range(STACK)], axis=-1)


def nature(spec: specs.EnvSpec, rng: np.random.Generator) -> Any:
    """The layers of a new Nature CNN."""
    from learner.networks import networks

    network = networks.QNetwork.build(spec, HIDDEN, False, rng, "nature")
    return network.policy_layers(list(network.initial().values()), networks.Normalizer.identity(spec.observation))


def _model(shape: tuple[int, ...], actions: int) -> bytes:
    from learner.quantize import calibrate
    from learner.quantize.tflite import quantizer

    rng = np.random.default_rng(0)
    policy = nature(specs.EnvSpec(specs.ObservationSpec(shape, "uint8"), specs.ActionSpec("discrete", n=actions)), rng)
    sample = rng.integers(0, 256, (64, *shape), np.uint8)
    params, _ = calibrate.measure(policy, sample, len(sample))
    return quantizer.Quantizer().quantize(policy, params, sample)


if __name__ == "__main__":
    Path(sys.argv[5]).write_bytes(_model(tuple(map(int, sys.argv[1:4])), int(sys.argv[4])))
