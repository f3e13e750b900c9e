"""The README's command: a whole local fleet, on both brokers, until the published int8 policy is good; and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.contract import errors, messages
from learner.study import report
from tests import conftest
from tests.system.conftest import started

pytestmark = pytest.mark.system


def demo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "learner", "demo", *arguments]


@pytest.mark.parametrize("kind", conftest.KINDS)
def test_trains_cartpole_with_int8_actors(kind: str, run_root: Path) -> None:
    conftest.require(kind)
    # so good that it trains for some heartbeats, and that its actors explore in a part of their steps only
    arguments = demo("--solved-return", "400", "--broker-kind", kind, "--run-dir", str(run_root / "run"), "--json")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["solved"] is True
    assert summary["int8_return_mean"] >= 400.0
    assert len(summary["int8_returns"]) == len(summary["fp32_returns"]) == 20
    assert summary["delegate"] == "XNNPACK"
    assert summary["publish_to_acting_count"] >= 2
    assert summary["messages_refused"].keys() <= {"duplicate"}  # sent again where a receipt took long
    assert summary["train_wall_s"] > summary["learner_wall_s"]
    assert 0.0 < summary["invoke_us_p50"] <= summary["observation_to_action_us_p50"]
    energy = summary["energy"]
    assert energy["learner"]["joules"] is None or energy["learner"]["joules"] > 0.0
    assert "learner" in energy["note"] and energy["actors"]["source"]
    policies = sorted((run_root / "run" / "policies").glob("*.int8.tflite"))
    assert policies[-1].name == f"v{summary['policy_version']:06d}.int8.tflite"
    rows = [json.loads(line) for line in (run_root / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["env_steps"] <= summary["env_steps"]
    assert list((run_root / "run" / "tensorboard").iterdir())
    page = report.write([run_root / "run"], run_root / "page.html").read_text()
    assert "What could not be used" not in page
    for told in ("actor-1", "ActorQ, int8 (published)", "versions behind the newest policy", "actors work on"):
        assert told in page
    _check_breakdown(summary, rows)


def test_a_demo_for_people_ends_by_naming_its_page(run_root: Path) -> None:
    arguments = demo("--solved-return", "50", "--no-energy", "--run-dir", str(run_root / "run"))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"report: {run_root / 'run' / 'report.html'}"
    assert "CartPole-v1: 1 run" in (run_root / "run" / "report.html").read_text()


def _check_breakdown(summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Checks where the time of a fleet on one machine went: each stage ran, and no more than there was."""
    learner, actors = summary["breakdown"]["learner"], summary["breakdown"]["actors"]
    wall_s = summary["learner_wall_s"]
    assert set(actors) == set(messages.ACTOR_STAGES)
    assert all(spent["count"] > 0 and spent["total_s"] > 0.0 for spent in (*learner.values(), *actors.values()))
    of_the_loop = ("receive", "decode", "replay_insert", "sample", "wait")
    assert sum(learner[name]["total_s"] for name in of_the_loop) < wall_s
    assert sum(spent["total_s"] for spent in actors.values()) < 2 * wall_s, "two actors, one thread each"
    assert sum(summary["breakdown"]["actorq"].values()) < 2 * wall_s
    assert learner["update"]["count"] == summary["updates"]
    # No lower bound: what was done after the newest heartbeats is not known, which of so short a run is much.
    # One of each a step, and for the environment each reset besides
    assert actors["record"]["count"] <= actors["environment"]["count"] < 1.5 * summary["env_steps"]
    assert 0.0 <= summary["learner_idle_share"] < 1.0
    assert summary["learner_cpu_s"] > 0.0
    assert 0.0 < summary["actors_cpu_s"] < 4 * wall_s
    assert summary["env_steps_per_s"] * wall_s > 0.1 * summary["env_steps"]
    assert sum(row["stage_update_s"] for row in rows) <= learner["update"]["total_s"] + 1e-6
    assert any(row["stage_actor_environment_s"] > 0.0 for row in rows)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stops_in_order_within_five_seconds(signum: int, run_root: Path) -> None:
    run = run_root / "run"
    with started(demo("--run-dir", str(run), "--no-energy", "--solved-return", "inf"), stderr=subprocess.PIPE) as child:
        conftest.wait_until(
            lambda: list(run.glob("policies/*.tflite")) or child.poll() is not None,
            "a policy is published",
            timeout_s=60.0,
        )
        children = psutil.Process(child.pid).children(recursive=True)
        assert len(children) >= 4, "broker, learner and two actors"
        asked = time.monotonic()
        child.send_signal(signum)
        _, stderr = child.communicate(timeout=10.0)
        assert time.monotonic() - asked < 5.0
        assert child.returncode == 130, stderr
        assert not psutil.wait_procs(children, timeout=0.5)[1], "no process may be left"
        assert list(run.glob("checkpoints/*.npz"))
        assert "--resume" in stderr and f"with ACTORQ_HOME={run}/home, by `actorq-broker up" in stderr


def test_says_that_its_learner_was_killed(run_root: Path) -> None:
    run = run_root / "run"
    with started(demo("--run-dir", str(run), "--no-energy"), stderr=subprocess.PIPE) as child:
        conftest.wait_until((run / "logs" / "actor-1.log").exists, "the fleet is up", timeout_s=60.0)
        (learner,) = (one for one in psutil.Process(child.pid).children() if "train" in one.cmdline())
        learner.kill()
        _, stderr = child.communicate(timeout=30.0)
    assert child.returncode == errors.RunError.exit_code
    assert "error: the learner was killed by signal 9 (Killed)\n" in stderr


def test_a_learner_that_is_too_busy_to_stop_is_killed_and_the_demo_ends_as_interrupted(run_root: Path) -> None:
    run = run_root / "run"
    words = demo("--run-dir", str(run), "--no-energy", "--solved-return", "inf")
    with started(words, stderr=subprocess.PIPE) as child:
        conftest.wait_until((run / "logs" / "actor-1.log").exists, "the fleet is up", timeout_s=60.0)
        (learner,) = (one for one in psutil.Process(child.pid).children() if "train" in one.cmdline())
        learner.suspend()
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=30.0)
    assert child.returncode == errors.EXIT_INTERRUPTED
    assert stderr.endswith("interrupted; the learner was busy, and could not save\n")


def test_leaves_nothing_behind_when_killed(run_root: Path) -> None:
    run = run_root / "run"
    child = subprocess.Popen(demo("--run-dir", str(run), "--no-energy"), stderr=subprocess.DEVNULL)
    conftest.wait_until((run / "logs" / "actor-1.log").exists, "the fleet is up", timeout_s=60.0)
    children = psutil.Process(child.pid).children(recursive=True)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not psutil.wait_procs(children, timeout=15.0)[1]
