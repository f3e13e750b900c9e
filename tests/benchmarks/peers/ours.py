"""Updates of this project's DQN per second, in a process of its own: python -m tests.benchmarks.peers.ours.

Answers each line of requests as sb3.py's `updates` does: sampling, the hand-over to TensorFlow and the compiled steps.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

from broker.contract import specs
from broker.program import amx
from learner import config
from learner.algorithms import registry
from learner.experience.buffers import replay

_EPISODE = 200


class _Segments:
    """Random experience in whole episodes."""

    def __init__(self, features: int, actions: int, transitions: int, rng: np.random.Generator) -> None:
        count = transitions // _EPISODE
        self.length = np.full(count, _EPISODE, np.int32)
        self.terminated = np.ones(count, np.uint8)
        self.observation = rng.normal(size=(transitions + count, features)).astype(np.float32)
        self.action = rng.integers(0, actions, transitions).astype(np.int32)
        self.reward = rng.normal(size=transitions).astype(np.float32)


class Rates:
    """A DQN with a full replay, to be updated.

    Args:
        request: hidden, batch_size, features, actions, transitions; dueling and double.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._rng = np.random.default_rng(0)
        settings = config.DqnConfig(
            hidden=tuple(request["hidden"]),
            batch_size=request["batch_size"],
            replay_capacity=request["transitions"],
            n_step=1,
            dueling=request["dueling"],
            double=request["double"],
        )
        spec = specs.EnvSpec(
            specs.ObservationSpec((request["features"],)), specs.ActionSpec("discrete", n=request["actions"])
        )
        self._replay: Any = replay.of(spec, settings)
        self._replay.insert(_Segments(request["features"], request["actions"], request["transitions"], self._rng))
        train = config.TrainConfig(algorithm="dqn")
        self._agent = registry.make(config.Settings(train, settings, config.GateConfig()), spec)
        self._shape = settings.updates_per_call, settings.batch_size
        self._call()

    def measure(self, updates: int) -> float:
        """Returns updates per second, sampling included."""
        calls = max(1, updates // self._shape[0])
        began = time.perf_counter()
        for _ in range(calls):
            self._call()
        return calls * self._shape[0] / (time.perf_counter() - began)

    def _call(self) -> None:
        batch = self._replay.sample(*self._shape, self._rng)
        self._replay.update_priorities(batch.ids, self._agent.update(batch).td_error)


@amx.refused()  # as `actorq-learner train` does
def main() -> None:
    """Answers requests until there are no more."""
    tf.config.threading.set_intra_op_parallelism_threads(1)  # as learner.config's default
    rates: Rates | None = None
    for line in sys.stdin:
        request = json.loads(line)
        rates = rates or Rates(request)
        print(json.dumps({"rate": rates.measure(request["updates"])}), flush=True)


if __name__ == "__main__":
    main()
