"""`make bench`: one JSON object per line for each row of each benchmark; `make bench ONLY=actor` runs one of them.

A benchmark is a module of one of `GROUPS` with `run()`, which yields rows with the keys in `KEYS`. Ratios are measured
side by side, alternating, in one run; `spread` is the range of the ratio (or value) over those runs. Each row also has
`machine`: how fast that was; and `broker`, where that matters: `embedded` where Mosquitto is not installed. A benchmark
that cannot do without is a row with `left_out`, and the exit code is then 18. With BENCH_KEPT=FILE those that take many
minutes go on where they were ended (`_kept.py`).
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from broker.contract import errors
from broker.program import amx
from tests.benchmarks import _machine

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `actorq-learner train` does; before anything imports numpy
GROUPS = ("speed", "fleet", "learning")
KEYS = ("benchmark", "case", "value", "unit", "reference", "ratio", "runs", "spread", "explain")


@amx.refused()  # as `actorq-learner train` does
def main(argv: Sequence[str]) -> int:
    """Runs the benchmarks named, or all."""
    known = _known()
    wanted = list(argv) or list(known)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that contexts end what they started
    if unknown := sorted(set(wanted) - set(known)):
        print(
            f"error: unknown benchmark {', '.join(unknown)}\n  to do: choose among {', '.join(known)}",
            file=sys.stderr,
        )
        return errors.EXIT_USAGE
    left_out: dict[str, errors.RuntimeMissing] = {}
    for name in wanted:
        print(f"benchmark {name} ...", file=sys.stderr, flush=True)
        try:
            _run(known[name])
        except errors.RuntimeMissing as error:
            left_out[name] = error
            print(json.dumps({"benchmark": name, "left_out": error.what, "todo": error.todo}), flush=True)
    for name, why in left_out.items():
        print(f"left out: {name}: {why.what}\n  to do: {why.todo}", file=sys.stderr)
    return errors.RuntimeMissing.exit_code if left_out else errors.EXIT_OK


def _known() -> dict[str, str]:
    """Returns the modules of all benchmarks by name, group after group."""
    return {
        found.name: f"tests.benchmarks.{group}.{found.name}"
        for group in GROUPS
        for found in pkgutil.iter_modules([str(Path(__file__).parent / group)])
        if not found.name.startswith(("_", "test_"))
    }


def _run(module: str) -> None:
    machine = _machine.watch()
    for row in importlib.import_module(module).run():
        missing = [key for key in KEYS if key not in row]
        if missing:
            raise ValueError(f"a row of {module} lacks {missing}")
        print(json.dumps({**row, "machine": machine()}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
