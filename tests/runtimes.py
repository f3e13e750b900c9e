"""Which Python runs a TFLite runtime: this one, or for tflite-runtime the environment that `make test` makes for it.

tflite-runtime 2.14 was built against numpy 1 and ended with Python 3.11; everything else here has numpy 2.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from broker.contract import errors
from edge_actor.policies import interpreter

TFLITE_RUNTIME = "tflite-runtime"


def has_wheel() -> bool:
    """Returns whether tflite-runtime can be installed on this machine, for this Python."""
    return sys.version_info < (3, 12) and (sys.platform, platform.machine()) in (
        ("linux", "x86_64"),
        ("linux", "aarch64"),
        ("linux", "armv7l"),
    )


def python(runtime: str) -> str:
    """Returns the interpreter of an environment that has the runtime; skips the test where there is none."""
    try:
        interpreter.find(runtime)
    except errors.RuntimeMissing as missing:
        apart = Path(sys.prefix, runtime, "bin", "python")
        if apart.exists():
            return str(apart)
        if runtime == TFLITE_RUNTIME and has_wheel() and os.environ.get("ACTORQ_CI"):
            pytest.fail(f"{missing}; make .venv/.tflite-runtime")
        pytest.skip(f"{runtime} is not here: {missing.where}")
    return sys.executable
