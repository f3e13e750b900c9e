"""A person who tries an environment of their own sees never silence, and always an end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.contract import errors
from learner.run import local_fleet
from tests.system.conftest import command

pytestmark = pytest.mark.system
ODD = Path(__file__).with_name("odd.py")
LAST_S = 110.0
"""Seconds for whatever would wait for two minutes, or for ever."""


def demo(env: str, run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "learner", "demo", "--env", f"{ODD}:{env}", "--run-dir", str(run)]
    words += ["--hidden", "32", "--no-energy", "--json", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=LAST_S, check=False)


@pytest.mark.fault(2)
@pytest.mark.fault(25)
def test_episodes_that_never_end_are_trained_on_and_the_last_score_is_given_up(run_root: Path) -> None:
    limits = ["--max-env-steps", "4000", "--max-wall-s", "80", "--learning-starts", "200", "--evaluate-episodes", "1"]
    done = demo("Endless", run_root / "run", *limits)
    assert done.returncode == errors.EXIT_OK, done.stderr
    summary = json.loads(done.stdout)
    assert summary["updates"] > 0
    assert summary["int8_return_mean"] is None
    assert "gave no score: gave up after " in done.stderr
    assert "to score the last policy, at most " in done.stderr


@pytest.mark.fault(23)
def test_the_algorithm_follows_from_the_environment(run_root: Path) -> None:
    limits = ["--max-env-steps", "4000", "--learning-starts", "200", "--evaluate-episodes", "2"]
    done = demo("Continuous", run_root / "run", *limits)
    assert done.returncode == errors.EXIT_OK, done.stderr
    assert json.loads(done.stdout)["algorithm"] == "d4pg"
    assert json.loads(done.stdout)["updates"] > 0


@pytest.mark.fault(23)
def test_a_clash_is_said_before_anything_is_started(run_root: Path) -> None:
    done = demo("Continuous", run_root / "run", "--algorithm", "dqn")
    assert done.returncode == errors.ConfigError.exit_code
    assert "dqn learns discrete actions" in done.stderr
    assert not (run_root / "run").exists()
    done = demo("NoSuch", run_root / "run")
    assert done.returncode == errors.EnvironmentFailure.exit_code
    assert "no class and no environment id 'NoSuch'" in done.stderr
    assert not (run_root / "run").exists()


@pytest.mark.fault(24)
@pytest.mark.fault(28)
def test_a_broken_and_slow_environment_is_named_and_nothing_learned_is_no_success(run_root: Path) -> None:
    done = demo("Rickety", run_root / "run", "--learning-starts", "1000", "--max-wall-s", "24")
    assert "the environment of actor actor-" in done.stderr
    assert "OSError: the wheel came off" in done.stderr
    assert " of 1,000 first steps; learning waits for about" in done.stderr
    assert done.returncode == errors.NothingLearned.exit_code
    assert "error: nothing was learned: the environment of actor" in done.stderr
    assert json.loads(done.stdout)["env_failures"]["actor-0"]["count"] > 0
    rows = [json.loads(line) for line in (run_root / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["env_failures"] > 0


@pytest.mark.fault(24)
@pytest.mark.fault(25)
def test_the_time_limit_counts_the_wait_for_actors(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet = start_fleet()
    arguments = ["--fleet", fleet.name, "--broker", fleet.address, "--max-wall-s", "2"]
    done = command("learner", "train", *arguments, home=fleet.directory / "home")
    assert done.returncode == errors.NothingLearned.exit_code, done.stderr
    assert done.stderr.count("nothing was learned: 0 of 1 actors came before the time was up") == 1
