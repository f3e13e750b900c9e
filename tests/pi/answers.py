"""Prints what policies answer here: a digest of the outputs' bytes per model, to be compared between machines.

`make DIRECTORY` adds int8 models (needs TensorFlow), `give [DIRECTORY]` prints answers to the same 500 observations,
`compare HERE.json THERE.json` wants int8 alike in every bit, on the same kernels, and what exploration draws. `give
--reference` asks tflite-runtime's reference kernels: those of 32-bit ARM answer like them in every bit, where the
optimised ones of x86 differ in 1 % of outputs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from broker.contract import specs
from broker.contract.acting import draws
from edge_actor.policies import interpreter
from tests.edge_actor.policies.models import files

_WIDTHS = (64, 256, 1024)
_OBSERVATIONS = 500
_SPREAD = (1.0, 1.0, 0.1, 1.0)  # of CartPole's position, speed, angle, its speed
_DRAWS = "random rows"
_KINDS = 10  # fewer different outputs would mean a policy that ignores what it sees


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("make", "give", "compare"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--reference", action="store_true")
    args = parser.parse_intermixed_args()
    if args.verb == "make":
        _make(args.paths[0])
    elif args.verb == "give":
        print(json.dumps(_give(args.paths, args.reference), indent=1))
    else:
        return _compare(*(json.loads(path.read_text()) for path in args.paths))
    return 0


def _make(directory: Path) -> None:
    from tests.edge_actor.policies.models import make  # here: it needs TensorFlow, which an actor's machine has not

    for width in _WIDTHS:
        (directory / f"balancing-{width}-int8.tflite").write_bytes(make.balancing(width, "int8"))


def _give(directories: list[Path], reference: bool) -> dict[str, dict[str, str]]:
    observations = np.random.default_rng(0).normal(size=(_OBSERVATIONS, 4)).astype(np.float32)
    observations *= np.array(_SPREAD, np.float32)
    answers = {}
    for path in (files.INT8, files.FLOAT32, *(p for d in directories for p in sorted(d.glob("*.tflite")))):
        with contextlib.ExitStack() as stack:
            if reference:
                stack.enter_context(_reference_kernels())
            built = interpreter.Interpreter(path.read_bytes(), 1, runtime="tflite-runtime" if reference else "auto")
        outputs = np.empty((_OBSERVATIONS, built.output.shape[1]), np.float32)
        for row, observation in enumerate(observations):
            built.input[0] = observation
            built.invoke()
            outputs[row] = built.output[0]
        assert len(np.unique(outputs)) >= _KINDS, path
        answers[path.stem] = {
            "runtime": str(built.runtime),
            "kernels": built.delegate,
            "sha256": hashlib.sha256(outputs.tobytes()).hexdigest(),
        }
    return answers | {_DRAWS: {"sha256": _draws()}}


def _draws() -> str:
    """The digest of what an actor draws, but for what goes through the machine's own logarithm, or BLAS."""
    found = hashlib.sha256()
    choices = specs.ActionSpec("discrete", n=6)
    arm = specs.ActionSpec("continuous", shape=(3,), low=(-1.0, 0.0, -2.5), high=(1.0, 5.0, 0.1))
    for block, action in itertools.product(range(20), (choices, arm)):
        for array in draws.exploring(7, 3, block, action, 4):
            found.update(array.astype("<f8").tobytes())
        if action is arm:
            found.update(draws.perturbations(7, 3, block, arm, 4, 0.2, 0.0).tobytes())
            found.update(draws.sampling(7, 3, block, arm, 4, "gaussian").tobytes())
    return found.hexdigest()


def _reference_kernels() -> AbstractContextManager[object]:
    """Has tflite-runtime build interpreters on its reference kernels."""
    module = interpreter.find("tflite-runtime").module
    build, kernels = module.Interpreter, module.OpResolverType.BUILTIN_REF

    def on_reference(**options: Any) -> Any:
        return build(**options | {"experimental_op_resolver_type": kernels})

    return mock.patch.object(module, "Interpreter", on_reference)


def _compare(here: dict[str, Any], there: dict[str, Any]) -> int:
    different = [name for name in here if ("int8" in name or name == _DRAWS) and here[name] != there.get(name)]
    for name in different:
        print(f"{name}: here {here[name]}, there {there.get(name)}", file=sys.stderr)
    if not different:
        same = [name for name in here if "int8" in name]
        kernels = sorted({f"{there[name]['runtime']} {there[name]['kernels']}" for name in same})
        count = f"{len(same)} int8 models x {_OBSERVATIONS} observations, and random rows"
        print(f"{count}, alike in every bit: {', '.join(kernels)}")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
