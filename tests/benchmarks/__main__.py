"""`make bench`: one JSON object per line for each row of each benchmark; `make bench ONLY=actor` runs one of them.

A benchmark is a module beside this file with `run()`, which yields rows with the keys in `KEYS`. Ratios are measured
side by side, alternating, in one run; `spread` is the range of the ratio (or value) over those runs. Each row also has
`machine`: how fast that was.
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

from broker import amx, errors
from tests.benchmarks import _machine

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `actorq-learner train` does; before anything imports numpy
KEYS = ("benchmark", "case", "value", "unit", "reference", "ratio", "runs", "spread", "explain")


@amx.refused()  # as `actorq-learner train` does
def main(argv: Sequence[str]) -> int:
    """Runs the benchmarks named, or all."""
    known = sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if not m.name.startswith("_"))
    wanted = list(argv) or known
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that contexts end what they started
    if unknown := sorted(set(wanted) - set(known)):
        print(
            f"error: unknown benchmark {', '.join(unknown)}\n  to do: choose among {', '.join(known)}", file=sys.stderr
        )
        return errors.EXIT_USAGE
    for name in wanted:
        print(f"benchmark {name} ...", file=sys.stderr, flush=True)
        machine = _machine.watch()
        for row in importlib.import_module(f"tests.benchmarks.{name}").run():
            missing = [key for key in KEYS if key not in row]
            if missing:
                raise ValueError(f"a row of {name} lacks {missing}")
            print(json.dumps({**row, "machine": machine()}), flush=True)
    return errors.EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
