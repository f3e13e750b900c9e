"""`actorq-learner bench`: two actors over a real broker measure, one page compares them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.contract import errors
from learner.run import local_fleet

pytestmark = [pytest.mark.mosquitto, pytest.mark.system, pytest.mark.slow]
SMALL = ["parts=latency", "widths=64", "cnn=false", "seconds=0.02", "precisions=int8,float32"]


def bench(fleet: local_fleet.LocalFleet, directory: Path, *sets: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "learner", "bench", "--fleet", fleet.name, "--broker", fleet.address, "--quick"]
    command += ["--actors", "2", "-o", str(directory)] + [word for one in sets for word in ("--set", one)]
    environment = os.environ | {"ACTORQ_HOME": str(fleet.directory / "home")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


def test_a_fleet_measures_itself(start_fleet: Callable[..., local_fleet.LocalFleet], tmp_path: Path) -> None:
    fleet = start_fleet("mosquitto")
    fleet.start_actor("fast", ["--env", "CartPole-v1"])
    fleet.start_actor("steady", ["--env", "Pendulum-v1", "--rate-hz", "20"])
    done = bench(fleet, tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(row["actor"], row["precision"], row["kernels"]) for row in found} == {
        (actor, *what)
        for actor in ("fast", "steady")
        for what in (("int8", "XNNPACK"), ("float32", "XNNPACK"), ("int8", "built-in"), ("float32", "built-in"))
        + (("float32", "numpy"),)
    }
    assert {(row["actor"], row["acting_hz"]) for row in found} == {("fast", 0.0), ("steady", 20.0)}
    assert "All boards" in (tmp_path / "page.html").read_text()
    assert "fast (" in done.stdout and "steady (" in done.stdout and "int8 " in done.stdout
    assert not fleet.ended()  # the actors go on

    refused = bench(fleet, tmp_path, "parts=speed")
    assert refused.returncode == errors.EnvironmentFailure.exit_code
    assert "'speed' is none of latency" in refused.stderr
    forbidden = bench(fleet, tmp_path, "meter=/etc/passwd")
    assert forbidden.returncode == errors.EnvironmentFailure.exit_code
    assert "not from the network: meter" in forbidden.stderr
