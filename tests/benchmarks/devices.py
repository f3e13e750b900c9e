"""Updates on two devices of the CPU (`--learner-devices`), beside one, and beside none that is named.

`value` counts the gradient steps of all replicas, with sampling from replay and taking the mean; behind the weights
there is an n-th of those. The sides alternate within one process, which is one of its own: the CPU is divided before
TensorFlow's first operation.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from learner import config
from learner.experience import replay
from tests.benchmarks import update

ALTERNATIONS = 9
SIDES: dict[str, tuple[str, ...]] = {"none": (), "one": ("CPU:0",), "two": ("CPU:0", "CPU:1")}
_CASES = {
    "DQN, MLP 256x2, batch 64": (config.DqnConfig(hidden=(256, 256), batch_size=64), 8),
    "DQN, MLP 1024x2, batch 256": (config.DqnConfig(hidden=(1024, 1024), batch_size=256, updates_per_call=4), 1),
}
"""Settings, and calls in one timing."""


def run() -> Iterator[dict[str, Any]]:
    """Yields two rows per case; none on one core."""
    if (os.cpu_count() or 1) < 2:
        return
    command = [sys.executable, "-c", "from tests.benchmarks import devices; devices.measure()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise RuntimeError(f"measuring ended with {child.returncode}")


def measure() -> None:
    """Prints the rows."""
    import tensorflow as tf

    from learner.run import devices

    devices.prepare(SIDES["two"])
    tf.config.threading.set_intra_op_parallelism_threads(1)  # as learner.config's default
    for case, (settings, calls) in _CASES.items():
        for row in _rows(case, settings, calls):
            print(json.dumps(row), flush=True)


def _rows(case: str, settings: config.DqnConfig, calls: int) -> Iterator[dict[str, Any]]:
    from learner.run import devices

    rng, memory = np.random.default_rng(0), replay.of(update.DISCRETE, settings)
    memory.insert(update._Segments(update.DISCRETE, rng, update.TRANSITIONS))
    agents, steps = {}, {}
    for side, named in SIDES.items():
        train = config.TrainConfig(algorithm="dqn", learner_devices=named)
        agents[side] = devices.make(config.Settings(train, settings, config.GateConfig()), update.DISCRETE)
        steps[side] = train.replicas * settings.updates_per_call
        agents[side].update(memory.sample(steps[side], settings.batch_size, rng))  # compiles
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    mean_ms = []
    two = agents["two"]
    assert isinstance(two, devices.Replicas)
    two._average()
    for _ in range(ALTERNATIONS):
        for side, seen in rates.items():
            started = time.perf_counter()
            for _ in range(calls):
                agents[side].update(memory.sample(steps[side], settings.batch_size, rng))
            seen.append(calls * steps[side] / (time.perf_counter() - started))
        started = time.perf_counter()
        two._average()
        mean_ms.append(1e3 * (time.perf_counter() - started))
    explain = (
        f"{settings.updates_per_call} steps a call; of two devices the mean takes {statistics.median(mean_ms):.1f} ms"
    )
    for what, side, reference in (("two devices beside one", "two", "one"), ("one, named", "one", "none")):
        ratios = [a / b for a, b in zip(rates[side], rates[reference], strict=True)]
        yield {
            "benchmark": "devices",
            "case": f"{case}: {what}",
            "value": round(statistics.median(rates[side]), 1),
            "unit": "updates/s",
            "runs": ALTERNATIONS,
            "reference": round(statistics.median(rates[reference]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "spread": round(max(ratios) - min(ratios), 3),
            "explain": explain,
        }
