"""OpenBLAS has as many threads as `--threads` says: others spin between two calls."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import numpy, threadpoolctl
from learner import config
from learner.run import train
train._set_up_threads(config.TrainConfig(threads={threads}))
print(*{{pool["num_threads"] for pool in threadpoolctl.threadpool_info() if "numpy" in pool["filepath"]}})
"""


@pytest.mark.parametrize(
    ("threads", "environment", "expected"),
    [(1, {}, "1"), (3, {}, "3"), (1, {"OPENBLAS_NUM_THREADS": "2"}, "2")],
    ids=["default", "more than cores", "as the user's environment says"],
)
def test_openblas_has_the_threads_of_the_settings(threads: int, environment: dict[str, str], expected: str) -> None:
    """The environment alone would be too late: numpy is loaded before settings are known, and has read it."""
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    script = _SCRIPT.format(threads=threads)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean | environment)
    assert done.stdout.split() == [expected]
