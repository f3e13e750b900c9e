"""One policy in a process of its own: `python -m edge_actor.bench.cell`, requests and answers as lines of JSON.

The first line says which policy. A line {"batches": [...], "seconds": x} is answered with its times, a line
{"hold_s": x, "rate_hz": y} by acting for so long, flat out or at a rate. Its own process, because memory is told by its
growth, because numpy's threads are set by its environment, and because no measurement may inherit another's caches.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from broker.contract import specs
from broker.program import children
from edge_actor.acting import evaluate, pace
from edge_actor.bench import models
from edge_actor.policies import interpreter, policy

_ROWS_BYTES = 1_000_000
_TIMES = (30, 20_000)
"""Inferences per figure, at least and at most."""
_LIMIT_BYTES = 1 << 31
_ACTS_PER_LOOK = 64
"""Inferences between two looks at the clock, when acting flat out."""


class Cell:
    """A policy that acts once it is loaded.

    Args:
        request: width, layers, cnn, model (a path; empty: numpy), runtime, delegated, threads.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._shape = models.Shape(request["width"], request["layers"], request["cnn"])
        self._model = b""

    def load(self) -> dict[str, Any]:
        """Loads the policy; returns what that took (load and first invoke, memory), delegate and runtime."""
        request = self._request
        facts: dict[str, Any] = {}
        if request["model"]:
            # Loads all of the runtime's code first, so that what follows is the model's share
            tiny = models.tflite(models.make(models.Shape(8, 1)), "int8")
            interpreter.Interpreter(tiny, 1, runtime=request["runtime"], delegated=request["delegated"]).invoke()
        process = psutil.Process()
        before = process.memory_info().rss
        began = time.perf_counter()
        if request["model"]:
            self._model = Path(request["model"]).read_bytes()
            began = time.perf_counter()
            built = self._built(1)
            loaded = time.perf_counter()
            built.invoke()
            facts |= {"delegate": built.delegate, "runtime": str(built.runtime)}
        else:
            network = self._numpy
            loaded = time.perf_counter()
            network(models.observations(self._shape, 1))
            facts |= {"delegate": "", "runtime": f"numpy {np.__version__}"}
        return facts | {
            "load_ms": (loaded - began) * 1e3,
            "first_invoke_us": (time.perf_counter() - loaded) * 1e6,
            "memory_bytes": process.memory_info().rss - before,
        }

    def times(self, batch: int, seconds: float) -> dict[str, float]:
        """Returns percentiles of invoke only and of observation to action; see `evaluate.times`."""
        act, invoke, rows = self._ready(batch)
        act(rows[0])
        began = time.perf_counter()
        for row in rows[:3]:
            act(row)
        one_s = (time.perf_counter() - began) / min(3, len(rows))
        count = min(max(int(seconds / (2 * one_s)), _TIMES[0]), _TIMES[1])
        evaluate.times(act, invoke, rows[:8])  # warm
        return evaluate.times(act, invoke, list(itertools.islice(itertools.cycle(rows), count)))

    def hold(self, hold_s: float, rate_hz: float) -> dict[str, Any]:
        """Acts for `hold_s`; returns how often, and at a rate how late its steps began."""
        act, rows = self._acting
        source = itertools.cycle(rows)
        return _at_rate(act, source, hold_s, rate_hz) if rate_hz else _flat_out(act, source, hold_s)

    @functools.cached_property
    def _acting(self) -> tuple[Callable[[Any], object], list[Any]]:
        act, _, rows = self._ready(1)
        return act, rows

    @functools.cached_property
    def _numpy(self) -> Callable[[Any], Any]:
        return models.make(self._shape)

    def _built(self, batch: int) -> interpreter.Interpreter:
        request = self._request
        return interpreter.Interpreter(
            self._model,
            batch,
            runtime=request["runtime"],
            threads=request["threads"],
            delegated=request["delegated"],
            limit_bytes=_LIMIT_BYTES,
        )

    def _ready(self, batch: int) -> tuple[Callable[[Any], object], Callable[[], object], list[Any]]:
        """Returns what acts, what only runs the network, and observations [batch, ...]."""
        row_bytes = 4 * batch * int(np.prod(self._shape.observation))
        rows = models.observations(self._shape, batch * min(max(_ROWS_BYTES // row_bytes, 4), 256))
        observations = list(rows.reshape(-1, batch, *self._shape.observation))
        if not self._request["model"]:
            network, x = self._numpy, observations[0]
            if batch > 1:
                return (lambda row: network(row).argmax(1)), (lambda: network(x)), observations
            return (lambda row: int(network(row).argmax())), (lambda: network(x)), observations
        request = self._request
        acting = policy.Policy(
            self._model,
            "q_values",
            specs.EnvSpec(
                specs.ObservationSpec(self._shape.observation), specs.ActionSpec("discrete", n=models.ACTIONS)
            ),
            batch,
            runtime=request["runtime"],
            threads=request["threads"],
            delegated=request["delegated"],
            limit_bytes=_LIMIT_BYTES,
        )
        return acting.act, acting.interpreter.invoke, observations


def _flat_out(act: Callable[[Any], object], rows: Any, hold_s: float) -> dict[str, Any]:
    done, until = 0, time.monotonic() + hold_s
    while time.monotonic() < until:
        for row in itertools.islice(rows, _ACTS_PER_LOOK):
            act(row)
        done += _ACTS_PER_LOOK
    return {"inferences": done}


def _at_rate(act: Callable[[Any], object], rows: Any, hold_s: float, rate_hz: float) -> dict[str, Any]:
    metronome, never = pace.Metronome(rate_hz), threading.Event()
    late_s: list[float] = []
    taken_s: list[float] = []
    until = time.monotonic() + hold_s
    while time.monotonic() < until:
        missed = metronome.missed
        metronome.wait(never)
        late_s.append((1 + metronome.missed - missed) / rate_hz - metronome.slack_s)
        began = time.perf_counter()
        act(next(rows))
        taken_s.append(time.perf_counter() - began)
    figures: dict[str, Any] = {"inferences": len(late_s), "missed": metronome.missed}
    for name, values in (("late_us", late_s), ("observation_to_action_us", taken_s)):
        for percent in (50, 99):
            figures[f"{name}_p{percent}"] = float(np.percentile(values, percent)) * 1e6
        figures[f"{name}_max"] = max(values) * 1e6
    return figures


def main() -> None:
    """Serves requests until stdin ends."""
    children.die_with(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the runtime prints is no answer
    cell = Cell(json.loads(sys.stdin.readline()))
    print(json.dumps(cell.load()), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if "hold_s" in request:
            figures = cell.hold(request["hold_s"], request["rate_hz"])
        else:
            figures = cell.times(request["batch"], request["seconds"])
        print(json.dumps(figures), file=answers)


if __name__ == "__main__":
    main()
