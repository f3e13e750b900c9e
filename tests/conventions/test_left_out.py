"""`make test` says in one line which programs are not there that some tests need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BARE = "from broker.serve.mosquitto import process\nprocess.find = lambda: None\n"
SOME = [
    "tests/pi/test_flash.py",
    "tests/broker/serve/mosquitto/test_mosquitto.py",
    "-k",
    "flash or port or end or readable",
]


def run_bare(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Tests of a machine with neither Mosquitto nor mtools."""
    (tmp_path / "bare.py").write_text(BARE)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "bare", *SOME],
        env={k: v for k, v in os.environ.items() if k != "ACTORQ_CI"}
        | {"PATH": "/nonexistent", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
        | env,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.fault(31)
def test_one_line_says_what_to_install(tmp_path: Path) -> None:
    done = run_bare(tmp_path)
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "install" in line]
    assert "tests were left out; to run all: sudo apt install mosquitto mtools" in line
    assert int(line.split()[0]) > 10
    assert "SKIPPED" not in done.stdout and "passed" in done.stdout.splitlines()[-1]


def test_they_fail_where_all_must_be_installed(tmp_path: Path) -> None:
    done = run_bare(tmp_path, ACTORQ_CI="1")
    assert done.returncode == 1
    assert "left out" not in done.stdout and "Mosquitto is not installed" in done.stdout
