"""Observation to action on this project's int8 beside its float32 and every peer, at four widths, batch 1, one thread.

Each runtime has a process of its own, and they are asked in turn. Before it is timed, each must give the policy's own
answers: float32 to 1e-4 deviations, int8 to 0.05.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_actor.bench import models
from tests.benchmarks import peers

ROUNDS = 7
SECONDS = 0.3
SHAPES = (models.Shape(64, 2), models.Shape(256, 2), models.Shape(1024, 2), models.Shape(2048, 3))
OURS = "actorq int8"
_ACTION = "observation_to_action_us_p50"


def run() -> Iterator[dict[str, Any]]:
    """Yields one row per width and runtime.

    Raises:
        RuntimeMissing: The peers are not installed.
    """
    python = peers.python()
    sides = {OURS: (sys.executable, "auto", "int8"), "actorq float32": (sys.executable, "auto", "float32")}
    sides |= {name: (python, runtime, "float32") for name, runtime in peers.RUNTIMES.items()}
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as directory, contextlib.ExitStack() as stack:
        asked = {
            name: (stack.enter_context(server("tests.benchmarks.peers.child", runtime, python=where)), precision)
            for name, (where, runtime, precision) in sides.items()
        }
        for shape in SHAPES:
            files = {p: Path(directory) / f"{shape.name}-{p}.tflite" for p in ("int8", "float32")}
            for precision, file in files.items():
                file.write_bytes(models.tflite(models.make(shape), precision))
            seen: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
            for _ in range(ROUNDS):
                for name, (process, precision) in asked.items():
                    request = {"shape": [shape.width, shape.layers], "model": str(files[precision])}
                    seen[name].append(ask(process, {**request, "seconds": SECONDS}))
            for name, found in seen.items():
                yield _row(shape, name, found, seen[OURS])


@contextlib.contextmanager
def server(module: str, *arguments: str, python: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    """A process that answers each line of JSON with one; ended at the end."""
    process = subprocess.Popen(
        [python, "-m", module, *arguments],
        cwd=peers.REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def ask(process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer of a server; ChildProcessError if it has ended instead (it said why on stderr)."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(request), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise ChildProcessError(f"{' '.join(map(str, process.args[2:]))} ended with {process.wait()}")  # type: ignore[index]
    found: dict[str, Any] = json.loads(answer)
    return found


def _row(shape: models.Shape, name: str, found: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [one[_ACTION] / other[_ACTION] for one, other in zip(found, ours, strict=True)]
    medians = {key: statistics.median(one[key] for one in found) for key in (_ACTION, "invoke_us_p50")}
    return {
        "benchmark": "peers",
        "case": f"observation to action, MLP {shape.name}, {name}",
        "value": round(medians[_ACTION], 2),
        "unit": "us",
        "reference": round(statistics.median(one[_ACTION] for one in ours), 2),
        "ratio": round(statistics.median(ratios), 2),
        "runs": len(ratios),
        "spread": round(max(ratios) - min(ratios), 2),
        "explain": f"{found[0]['runtime']}, {found[0]['delegate']}, one thread, batch 1; invoke alone "
        f"{medians['invoke_us_p50']:.2f} us; off by {found[0]['error']:.1g} deviations; reference is {OURS}, "
        f"{ours[0]['runtime']}, {ours[0]['delegate']}",
    }
