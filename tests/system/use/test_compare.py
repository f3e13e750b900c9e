"""`actorq-learner compare` on real fleets: two tiny arms from their start to the rows, on after kill -9 and Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from broker.contract import errors
from learner.run import local_fleet
from tests import conftest
from tests.system.conftest import STICK, started

pytestmark = pytest.mark.system
SMALL = [
    *("--precisions", "float32,int8", "--hidden", "16", "--seeds", "1", "--actors", "1"),
    *("--regimes", "actor-bound", "--kinds", "throughput", "--samples-per-insert", "1", "--actor-cpu-share", "0.5"),
    *("--set", "energy=false", "--set", "learning_starts=200", "--set", "algorithm=dqn"),
]


def slow(directory: Path) -> str:
    """An environment that has its own pace, so that a run takes some rows of metrics on a fast machine too."""
    file = directory / "slow.py"
    sleeps = "def _step(self, action):\n    time.sleep(0.0003)\n    return _quick(self, action)"
    lines = STICK.read_text().partition("import annotations")
    file.write_text(
        f"{''.join(lines[:2])}\nimport time{lines[2]}\n\n_quick = Stick.step\n{sleeps}\nStick.step = _step\n"
    )
    return f"{file}:Stick"


def compare(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "learner", "compare", *arguments]


def test_two_arms_survive_kill_and_make_rows(run_root: Path) -> None:
    directory = run_root / "compared"
    words = compare(*SMALL, "--env", slow(run_root), "--steps", "15000", "-o", str(directory))
    child = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    second = directory / "runs" / "actor-bound-16-int8-throughput-seed0"
    try:
        conftest.wait_until((second / "logs" / "actor-0.log").exists, "the second run has begun", timeout_s=120.0)
        fleet = psutil.Process(child.pid).children(recursive=True)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert not psutil.wait_procs(fleet, timeout=30.0)[1], "no process may be left"
    (first,) = conftest.rows_of(directory / "runs.jsonl")
    assert first["run"] == "actor-bound-16-float32-throughput-seed0"

    other = subprocess.run(
        compare("--resume", str(directory), "--seeds", "2"), capture_output=True, text=True, timeout=300, check=False
    )
    assert other.returncode == errors.RunError.exit_code
    assert "begun with other arguments: seeds 1, not 2" in other.stderr

    done = subprocess.run(
        compare("--resume", str(directory), "--json"), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs are to be done" in done.stderr
    rows = {row["measure"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows == {row["measure"]: row for row in conftest.rows_of(directory / "rows.jsonl")}
    kept, again = conftest.rows_of(directory / "runs.jsonl")
    assert kept == first
    assert again["directory"].startswith("runs/actor-bound-16-int8-throughput-seed0")
    speed = rows["env_steps_per_s"]
    assert speed["value"] == pytest.approx(again["figures"]["env_steps_per_s"], rel=1e-3)
    assert speed["reference"] == pytest.approx(first["figures"]["env_steps_per_s"], rel=1e-3)
    assert speed["runs"] == 1
    assert "one seed: no interval" in speed["explain"]
    assert "of a core by cgroup" in speed["explain"] or "unlimited: " in speed["explain"]
    assert {"policy_bytes", "bytes", "learner_cpu_s", "actors_cpu_s"} <= rows.keys()
    assert rows["env_steps_per_s"]["breakdown"]["int8"]["actors"]["observation_to_action"] > 0.0
    run = directory / first["directory"]
    assert (run / "metrics.jsonl").exists()
    assert not (run / "checkpoints").exists()
    for record in (kept, again):
        assert record["summary"]["env_steps"] >= 15_000
    if importlib.util.find_spec("matplotlib"):
        assert f"report: {directory / 'report.html'}" in done.stderr
        assert "int8 over float32" in (directory / "report.html").read_text()
    else:
        assert "no page is drawn: " in done.stderr


def test_an_environment_that_there_is_not_ends_it_in_one_line(run_root: Path) -> None:
    words = compare("--env", "NoSuchEnv-v0", "-o", str(run_root / "none"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == errors.EnvironmentFailure.exit_code
    assert done.stderr.count("error: ") == 1
    assert "NoSuchEnv" in done.stderr
    assert not (run_root / "none").exists()


def test_runs_that_fail_are_kept_and_named(run_root: Path) -> None:
    directory, environment = run_root / "failing", run_root / "here_and_gone.py"
    environment.write_text(STICK.read_text())
    words = compare(*SMALL, "--env", f"{environment}:Stick", "--steps", "2000", "-o", str(directory))
    with started(words, stderr=subprocess.PIPE) as child:
        conftest.wait_until((directory / "plan.json").exists, "the settings were found good", timeout_s=60.0)
        environment.unlink()
        _, stderr = child.communicate(timeout=240.0)
    assert child.returncode == errors.RunError.exit_code
    assert stderr.count("failed, and is left out: ") == 2
    assert (
        "2 of 2 runs failed, and are left out: actor-bound-16-float32-throughput-seed0, actor-bound-16-int8" in stderr
    )
    assert "no two runs can be compared: 2 of 2 failed" in stderr
    records = conftest.rows_of(directory / "runs.jsonl")
    assert [str(environment) in record["failed"] for record in records] == [True, True]
    assert sorted(file.stem for file in (directory / "logs").iterdir()) == sorted(one["run"] for one in records)


def test_actors_that_are_there_go_through_all_runs_and_past_an_interruption(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet, directory = start_fleet(), run_root / "boards"
    for name in ("here", "there"):
        fleet.start_actor(name, ["--env", slow(run_root)])
    environment = os.environ | {"ACTORQ_HOME": str(fleet.directory / "home")}
    words = compare(
        *(
            "--fleet",
            fleet.name,
            "--broker",
            fleet.address,
            "--env",
            slow(run_root),
            "--actors",
            "2",
            "--hidden",
            "16",
        ),
        *(
            "--regimes",
            "learner-bound",
            "--kinds",
            "throughput",
            "--steps",
            "20000",
            "--seeds",
            "1",
            "-o",
            str(directory),
        ),
        *("--set", "energy=false", "--set", "learning_starts=200", "--set", "algorithm=dqn"),
    )
    with started(words, stderr=subprocess.PIPE, env=environment) as child:
        conftest.wait_until(
            lambda: len(conftest.rows_of(directory / "runs.jsonl")) == 1, "one run has ended", timeout_s=120.0
        )
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=240.0)
    assert child.returncode == errors.EXIT_INTERRUPTED, stderr
    assert f"go on with: actorq-learner compare --resume {directory}" in stderr
    assert len(conftest.rows_of(directory / "runs.jsonl")) == 1

    resume = compare("--resume", str(directory))
    done = subprocess.run(resume, capture_output=True, text=True, timeout=180, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert [one["arm"]["precision"] for one in conftest.rows_of(directory / "runs.jsonl")] == ["float32", "int8"]
    rows = {row["measure"]: row for row in conftest.rows_of(directory / "rows.jsonl")}
    assert rows["env_steps_per_s"]["held"] == "quota: the actors' own"
    assert "quota: the actors' own" in done.stdout
    assert not fleet.ended()  # the actors go on
