"""A receiver that starts with nothing; and a process of its own for tests of a runtime that this one cannot run.

The tests of the learner, collected in the same session, load TensorFlow, whose symbols tflite-runtime 2.14 then picks
up: it answers a sound model with `vector::reserve`. No actor ever has both. And tflite-runtime wants numpy 1, so its
tests run in an environment of their own (tests/runtimes.py).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_actor.board import clock
from tests import runtimes
from tests.edge_actor.policies import offers


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test marked `isolated` in a child, if this process is not clean or has not its runtime."""
    marker = pyfuncitem.get_closest_marker("isolated")
    if marker is None:
        return None
    wanted = str(marker.args[0] if marker.args else pyfuncitem.callspec.params["runtime"])
    python = runtimes.python(wanted)
    if python == sys.executable and "tensorflow" not in sys.modules:
        return None
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(command, capture_output=True, text=True, cwd=pyfuncitem.config.rootpath, check=False)
    if "1 skipped" in done.stdout and done.returncode == 0:
        pytest.skip(done.stdout.strip().splitlines()[-2])
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@pytest.fixture
def synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board whose clock is right, whatever this machine's is."""
    monkeypatch.setattr(clock, "now_s", time.time)


@pytest.fixture
def received(tmp_path: Path, synchronised: None) -> Iterator[offers.Receiver]:
    """A receiver of policies that has started with nothing on its disk."""
    made = offers.Receiver(tmp_path)
    made.start(offers.VERIFIER, offers.NAMES)
    yield made
    made.close()
