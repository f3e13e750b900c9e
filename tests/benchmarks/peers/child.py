"""Times one runtime, in a process of its own: python -m tests.benchmarks.peers.child RUNTIME.

Reads requests {"shape": [width, layers], "model": path, "seconds": x} line by line, and answers each with the medians
of `evaluate.times`, what ran it, and how far it is off. Without a RUNTIME it checks all peers once, and ends with 1 if
one is wrong.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import specs
from edge_actor.acting import evaluate
from edge_actor.bench import models
from edge_actor.policies import policy
from tests.benchmarks import peers

SPEC = specs.EnvSpec(
    specs.ObservationSpec((models.FEATURES,)), specs.ActionSpec("discrete", n=models.ACTIONS)
)  # of the models
FLOAT32_ERROR_MAX, INT8_ERROR_MAX = 1e-4, 0.05
"""Mean error of an answer, in deviations of the right answers, beyond which a runtime computes something else."""
_ROWS = 256


@functools.cache
def _policy(runtime: str, path: str) -> policy.Policy:
    return policy.Policy(Path(path).read_bytes(), "q_values", SPEC, 1, runtime=runtime)


@functools.cache
def _error(runtime: str, shape: models.Shape, path: str) -> float:
    """Returns the mean error of its answers, in deviations of those that the policy gives in numpy."""
    acting, rows = _policy(runtime, path), models.observations(shape, _ROWS)
    expected = models.make(shape)(rows)
    answers = np.empty_like(expected)
    for k, row in enumerate(rows):
        acting.act(row[None])
        answers[k] = acting.interpreter.output[0]
    return float(np.abs(answers - expected).mean() / expected.std())


def measured(runtime: str, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the times of one request.

    Raises:
        ValueError: The runtime answers something else than the policy.
    """
    shape, path = models.Shape(*request["shape"]), request["model"]
    acting, error = _policy(runtime, path), _error(runtime, shape, path)
    limit = INT8_ERROR_MAX if "int8" in acting.delegate or "int8" in Path(path).name else FLOAT32_ERROR_MAX
    if not error <= limit:
        raise ValueError(f"{runtime} is off by {error:.2g} deviations at {shape.name}, more than {limit:g}")
    rows = list(models.observations(shape, _ROWS)[:, None])
    before = time.perf_counter()
    evaluate.times(acting.act, acting.interpreter.invoke, rows[:32])
    pair_s = (time.perf_counter() - before) / 32
    count = max(32, int(request["seconds"] / pair_s))
    times = evaluate.times(acting.act, acting.interpreter.invoke, list(itertools.islice(itertools.cycle(rows), count)))
    return {**times, "runtime": str(acting.interpreter.runtime), "delegate": acting.delegate, "error": error}


def check() -> int:
    """Measures each peer once, briefly; returns an exit code."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="actorq-peers-") as directory:
        shape = models.Shape(64, 2)
        file = Path(directory) / "float32.tflite"
        file.write_bytes(models.tflite(models.make(shape), "float32"))
        for name, runtime in peers.RUNTIMES.items():
            try:
                found = measured(runtime, {"shape": [shape.width, shape.layers], "model": str(file), "seconds": 0.05})
                told = f"{found['runtime']}, {found['delegate']}: off by {found['error']:.1g} deviations"
            except Exception as error:  # whatever a peer raises: the others are checked all the same
                wrong, told = 1, f"{type(error).__name__}: {error}"
            print(f"{name:14} {told}", file=sys.stderr, flush=True)
    return wrong


def main() -> None:
    """Answers requests until there are no more."""
    if len(sys.argv) < 2:
        sys.exit(check())
    for line in sys.stdin:
        print(json.dumps(measured(sys.argv[1], json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
