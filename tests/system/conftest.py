"""Real fleets of processes for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.run import local_fleet
from tests import conftest

STICK = Path(__file__).with_name("stick.py")
QUICK = ("--learning-starts", "200", "--epsilon-decay-steps", "1000", "--hidden", "32", "--no-energy")
"""Flags under which a trivial environment is learned in seconds."""


@pytest.fixture
def run_root() -> Iterator[Path]:
    """Open to the user that Mosquitto runs as, unlike root's tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextlib.contextmanager
def started(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Starts a command, which is killed at the end of the block if it lives then."""
    child = subprocess.Popen(words, text=True, **options)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


@pytest.fixture
def start_fleet(run_root: Path) -> Iterator[Callable[..., local_fleet.LocalFleet]]:
    """Starts a broker and the machinery for actors and learners; ends whatever is left."""
    fleets: list[local_fleet.LocalFleet] = []

    def start(kind: str = "auto", **options: Any) -> local_fleet.LocalFleet:
        if kind != "auto":
            conftest.require(kind)
        fleets.append(local_fleet.LocalFleet.start(run_root / f"fleet-{len(fleets)}", kind, **options))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.stop()


def command(module: str, *arguments: str, home: Path, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Runs one of our commands to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"ACTORQ_HOME": str(home)},
        check=False,
    )
