"""Updates on two devices of the CPU (`--learner-devices`), beside one, and beside none that is named.

`value` counts the gradient steps of all replicas, with sampling from replay and taking the mean; behind the weights
there is an n-th of those. Each side is a process of its own with TensorFlow's threads as `train` sets them; they take
turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from learner import config
from learner.experience.buffers import replay
from learner.run import train
from tests.benchmarks.speed import update

ALTERNATIONS = 9
_SIDES = {"none": (), "one": ("CPU:0",), "two": ("CPU:0", "CPU:1")}
_CASES = {
    "DQN, MLP 256x2, batch 64": (config.DqnConfig(hidden=(256, 256), batch_size=64), 8),
    "DQN, MLP 1024x2, batch 256": (config.DqnConfig(hidden=(1024, 1024), batch_size=256, updates_per_call=4), 2),
}
"""Settings, and calls in one timing."""


def run() -> Iterator[dict[str, Any]]:
    """Yields two rows per case; none on one core."""
    if (os.cpu_count() or 1) < 2:
        return
    with contextlib.ExitStack() as ending:
        sides = {side: _Side(ending, side) for side in _SIDES}
        for case in _CASES:
            for one in sides.values():
                one.turn(case)  # compiles
            yield from _rows(case, [{side: one.turn(case) for side, one in sides.items()} for _ in range(ALTERNATIONS)])


def _rows(case: str, seen: list[dict[str, dict[str, float]]]) -> Iterator[dict[str, Any]]:
    mean_ms = [turn["two"]["mean_ms"] for turn in seen]
    rates = {side: [turn[side]["steps"] / turn[side]["wall_s"] for turn in seen] for side in _SIDES}
    cpu = {side: [turn[side]["steps"] / turn[side]["cpu_s"] for turn in seen] for side in _SIDES}
    for what, side, reference in (("two devices beside one", "two", "one"), ("one, named", "one", "none")):
        ratios = [a / b for a, b in zip(rates[side], rates[reference], strict=True)]
        of_cpu = [a / b for a, b in zip(cpu[side], cpu[reference], strict=True)]
        yield {
            "benchmark": "devices",
            "case": f"{case}: {what}",
            "value": round(statistics.median(rates[side]), 1),
            "unit": "updates/s",
            "runs": ALTERNATIONS,
            "reference": round(statistics.median(rates[reference]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "spread": round(max(ratios) - min(ratios), 3),
            "explain": f"{_CASES[case][1]} calls a turn; ratios {min(ratios):.2f} to {max(ratios):.2f}; by second of "
            f"CPU {statistics.median(of_cpu):.2f} ({min(of_cpu):.2f} to {max(of_cpu):.2f}); of two devices the mean "
            f"takes {statistics.median(mean_ms):.1f} ms ({min(mean_ms):.1f} to {max(mean_ms):.1f})",
        }


class _Side:
    """A process that makes updates when asked."""

    def __init__(self, ending: contextlib.ExitStack, side: str) -> None:
        command = [sys.executable, "-m", __name__, side]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._child = ending.enter_context(subprocess.Popen(command, **pipes))  # its end closes the pipe, and ends it

    def turn(self, case: str) -> dict[str, float]:
        assert self._child.stdin is not None and self._child.stdout is not None
        print(case, file=self._child.stdin, flush=True)
        told: dict[str, float] = json.loads(self._child.stdout.readline())
        return told


def _serve(side: str) -> None:
    chosen = config.TrainConfig(algorithm="dqn", learner_devices=_SIDES[side])
    train._look_for_devices(chosen)
    train._set_up_threads(chosen)
    turns: dict[str, Callable[[], dict[str, float]]] = {}
    for line in sys.stdin:
        case = line.rstrip()
        if case not in turns:
            turns[case] = _learner(chosen, *_CASES[case])
        print(json.dumps(turns[case]()), flush=True)


def _learner(chosen: config.TrainConfig, settings: config.DqnConfig, calls: int) -> Callable[[], dict[str, float]]:
    """Returns what makes so many calls of updates, and says what they took."""
    from learner.run import devices

    rng, memory = np.random.default_rng(0), replay.of(update.DISCRETE, settings)
    memory.insert(update._Segments(update.DISCRETE, rng, update.TRANSITIONS))
    agent = devices.make(config.Settings(chosen, settings, config.GateConfig()), update.DISCRETE)
    steps = chosen.replicas * settings.updates_per_call

    def turn() -> dict[str, float]:
        began = time.perf_counter(), time.process_time()
        for _ in range(calls):
            agent.update(memory.sample(steps, settings.batch_size, rng))
        spent = {"wall_s": time.perf_counter() - began[0], "cpu_s": time.process_time() - began[1], "mean_ms": 0.0}
        if isinstance(agent, devices.Replicas) and chosen.replicas > 1:
            started = time.perf_counter()
            agent._average()
            spent["mean_ms"] = 1e3 * (time.perf_counter() - started)
        return {"steps": calls * steps, **spent}

    return turn


if __name__ == "__main__":
    _serve(*sys.argv[1:])
