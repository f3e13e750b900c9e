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
import time
from dataclasses import replace
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
    rows = models.observations(shape, _ROWS)
    return _off(_policy(runtime, path), models.make(shape)(rows), rows)


def measured(runtime: str, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the times of one request.

    Raises:
        ValueError: The runtime answers something else than the policy.
    """
    shape, path = models.Shape(*request["shape"]), request["model"]
    acting, error = _policy(runtime, path), _error(runtime, shape, path)
    if not error <= (limit := _limit(acting.delegate + Path(path).name)):
        raise ValueError(f"{runtime} is off by {error:.2g} deviations at {shape.name}, more than {limit:g}")
    rows = list(models.observations(shape, _ROWS)[:, None])
    before = time.perf_counter()
    evaluate.times(acting.act, acting.interpreter.invoke, rows[:32])
    pair_s = (time.perf_counter() - before) / 32
    count = max(32, int(request["seconds"] / pair_s))
    times = evaluate.times(acting.act, acting.interpreter.invoke, list(itertools.islice(itertools.cycle(rows), count)))
    return {**times, "runtime": str(acting.interpreter.runtime), "delegate": acting.delegate, "error": error}


def check() -> int:
    """Asks each peer what two policies of one architecture answer, by turns and in batches; returns an exit code."""
    wrong, shape = 0, models.Shape(64, 2)
    one, rows = models.make(shape), models.observations(shape, _ROWS)
    other = replace(one, layers=tuple(replace(x, kernel=x.kernel[::-1], bias=-x.bias) for x in one.layers))
    for name, runtime in peers.RUNTIMES.items():
        try:
            built = [(p, _built(p, runtime, batch)) for p, batch in ((one, 1), (other, 1), (other, 16))]
            off = max(_off(made, policy(rows), rows) for policy, made in (*built, built[0]))
            wrong |= not off <= _limit(built[0][1].delegate)
            told = f"{built[0][1].interpreter.runtime}, {built[0][1].delegate}: off by {off:.1g} deviations"
        except Exception as error:  # whatever a peer raises: the others are checked all the same
            wrong, told = 1, f"{type(error).__name__}: {error}"
        print(f"{name:14} {told}", file=sys.stderr, flush=True)
    return wrong


def _built(made: models.Policy, runtime: str, batch: int) -> policy.Policy:
    return policy.Policy(models.tflite(made, "float32"), "q_values", SPEC, batch, runtime=runtime)


def _off(acting: policy.Policy, expected: models.FloatArray, rows: models.FloatArray) -> float:
    """Returns the mean error of its answers, in deviations of those expected."""
    answers = []
    for batch in rows.reshape(-1, acting.batch, models.FEATURES):
        acting.act(batch)
        answers.append(acting.interpreter.output.copy())
    return float(np.abs(np.concatenate(answers) - expected).mean() / expected.std())


def _limit(kernels: str) -> float:
    return INT8_ERROR_MAX if "int8" in kernels else FLOAT32_ERROR_MAX


def main() -> None:
    """Answers requests until there are no more."""
    if len(sys.argv) < 2:
        sys.exit(check())
    for line in sys.stdin:
        print(json.dumps(measured(sys.argv[1], json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
