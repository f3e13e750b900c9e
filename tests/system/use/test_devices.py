"""Training on two devices of the CPU, through a real fleet: a learner that is killed, and one that goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.contract import errors
from learner.files import checkpoint
from learner.run import local_fleet
from tests import conftest
from tests.system.conftest import QUICK, STICK

pytestmark = pytest.mark.system


@pytest.mark.slow
def test_a_killed_run_goes_on_on_two_devices_and_learns(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("there is one core")
    fleet, run = start_fleet(), run_root / "run"
    fleet.start_actor("pi", ["--env", f"{STICK}:Stick", "--heartbeat-s", "0.5"])
    learner = fleet.start_learner(
        [*QUICK, "--no-dueling", "--prioritized", "--learner-devices", "CPU:0,CPU:1", "--evaluate-episodes", "0"]
        + ["--checkpoint-period-s", "0.3", "--run-dir", str(run)]
    )

    def saved() -> int:
        found = checkpoint.load_newest(run / "checkpoints") if run.is_dir() else None
        return int(found.parts["algorithm"]["updates"]) if found else 0

    conftest.wait_until(saved, "a checkpoint behind some updates", timeout_s=60.0)
    learner.send_signal(signal.SIGKILL)
    learner.wait()
    before = saved()
    again = fleet.start_learner(
        ["--resume", str(run), "--evaluate-episodes", "5", "--solved-return", "10", "--max-env-steps", "20000"]
        + ["--json"]
    )
    output, _ = again.communicate(timeout=240.0)
    assert again.returncode == errors.EXIT_OK, fleet.log_tail("learner")
    summary = json.loads(output)
    assert summary["updates"] > before > 0
    assert summary["solved"] and summary["int8_return_mean"] == 10.0
    assert 'learner_devices = ["CPU:0", "CPU:1"]' in (run / "config.toml").read_text()
