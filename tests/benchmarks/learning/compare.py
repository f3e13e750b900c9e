"""Measures what a precision gains in a whole fleet: `actorq-learner compare`, actor-bound, int8 over float32.

A small comparison, so that all benchmarks together do not take hours; ACTORQ_BENCH_COMPARE may hold other arguments of
`actorq-learner compare`. Rows are that command's own: `interval` is by bootstrap, `spread` the range of ratios.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SMALL = "--hidden 256,256 --seeds 2 --regimes actor-bound --kinds throughput --run-s 6"


def run() -> Iterator[dict[str, Any]]:
    """Yields one row per ratio."""
    arguments = shlex.split(os.environ.get("ACTORQ_BENCH_COMPARE", _SMALL))
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name:
        os.chmod(name, 0o755)  # Mosquitto runs as a user of its own
        output = [] if {"-o", "--output", "--resume"} & set(arguments) else ["-o", str(Path(name) / "compare")]
        command = [sys.executable, "-m", "learner", "compare", "--json", *output, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    yield from map(json.loads, done.stdout.splitlines())
