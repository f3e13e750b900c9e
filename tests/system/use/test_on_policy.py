"""Learning once from each step, through a real fleet: a learner that is killed, lock-step, and a task."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from broker.contract import errors
from learner.files import checkpoint, run_directory
from learner.run import local_fleet
from tests import conftest
from tests.fakes.environments import toys

pytestmark = pytest.mark.system

StartFleet = Callable[..., local_fleet.LocalFleet]
SMALL = (
    *("--hidden", "32", "--value-hidden", "32", "--rollout-steps", "256", "--learning-starts", "200", "--no-energy"),
    *("--message-period-s", "0.02", "--message-steps", "100", "--kept-steps", "2000"),  # cut anywhere
)


def accepted(run: Path) -> tuple[int, int]:
    """The steps that the ledger has taken for learning, and the messages that are there twice or missing."""
    with sqlite3.connect(f"file:{run / run_directory.LEDGER}?mode=ro", uri=True) as book:
        rows = book.execute("SELECT actor, boot, min(seq), max(seq), count(*), sum(steps) FROM messages GROUP BY 1, 2")
        found = rows.fetchall()
    return sum(row[5] for row in found), sum(row[3] - row[2] + 1 - row[4] for row in found)


def test_a_killed_run_goes_on_and_counts_what_is_stale(start_fleet: StartFleet, run_root: Path) -> None:
    fleet, run = start_fleet(), run_root / "run"
    for index in range(2):
        fleet.start_actor(f"a{index}", ["--env", "Pendulum-v1", "--heartbeat-s", "0.5", "--envs", "2"])
    flags = ("--env", "Pendulum-v1", "--algorithm", "ppo", *SMALL, "--actors", "2", "--run-dir", str(run))
    learner = fleet.start_learner([*flags, "--checkpoint-period-s", "0.5"])

    def saved() -> checkpoint.Checkpoint | None:
        return checkpoint.load_newest(run / "checkpoints") if run.is_dir() else None

    conftest.wait_until(
        lambda: (found := saved()) is not None and found.parts["algorithm"]["updates"] >= 40,
        "a checkpoint behind some updates",
        timeout_s=180.0,
    )
    learner.send_signal(signal.SIGKILL)
    learner.wait()
    before, (steps, odd) = saved(), accepted(run)
    assert before is not None
    assert not odd
    goal = steps + 2000
    fleet.start_learner(["--resume", str(run), "--max-env-steps", str(goal), "--evaluate-episodes", "2", "--json"])
    fleet.children["learner"].wait(240.0)
    summary = json.loads(fleet.learner_output())
    assert summary["env_steps"] >= goal
    assert summary["updates"] > int(before.parts["algorithm"]["updates"])
    assert summary["steps_stale"] > 0, "what the session before left, and what its last policy did"
    assert summary["kl_mean"] < 0.02
    assert summary["messages_refused"].keys() <= {"duplicate", "gap"}
    steps, odd = accepted(run)
    assert (steps, odd) == (summary["env_steps"], 0), "each message once, and none is missing"


def test_the_same_seed_gives_the_same_bits(start_fleet: StartFleet, run_root: Path) -> None:
    results = []
    for attempt in range(2):
        fleet, run = start_fleet(), run_root / f"run-{attempt}"
        fleet.start_actor("only", ["--env", "CartPole-v1", "--envs", "3"])
        fleet.start_learner(
            ["--algorithm", "a2c", *SMALL, "--deterministic", "--seed", "7", "--run-dir", str(run), "--json"]
            + ["--max-env-steps", "2000", "--evaluate-episodes", "2", "--solved-return", "inf"]
        )
        assert fleet.children["learner"].wait(240.0) == errors.EXIT_OK
        summary = json.loads(fleet.learner_output())
        assert summary["policy_lag_mean_versions"] == 0.0
        assert summary["steps_stale"] == 0
        with np.load(sorted((run / "checkpoints").glob("*.npz"))[-1]) as saved:
            weights = {key: saved[key].tobytes() for key in saved.files if key.startswith("algorithm/")}
        policies = {path.name: path.read_bytes() for path in (run / "policies").glob("*.tflite")}
        results.append((weights, policies, summary["env_steps"], summary["updates"], summary["int8_returns"]))
        fleet.stop()
    assert results[0][3] >= 4
    assert len(results[0][1]) >= 4
    assert results[0] == results[1]


@pytest.mark.slow
def test_trains_cartpole_by_ppo(start_fleet: StartFleet, run_root: Path) -> None:
    fleet = start_fleet()
    for index in range(2):
        fleet.start_actor(f"a{index}", ["--env", "CartPole-v1"])
    fleet.start_learner(
        ["--env", "CartPole-v1", "--algorithm", "ppo", "--actors", "2", "--no-energy", "--json"]
        + ["--run-dir", str(run_root / "run")]
    )
    assert fleet.children["learner"].wait(240.0) == errors.EXIT_OK, fleet.log_tail("learner")
    summary = json.loads(fleet.learner_output())
    assert summary["solved"]
    assert summary["int8_return_mean"] >= 475.0


def test_several_choices_at_once_are_learned_where_no_algorithm_is_named(
    start_fleet: StartFleet, run_root: Path
) -> None:
    """Twelve keys have 4096 combinations: a softmax for each, sampled by the int8 policy on the actor."""
    fleet, name = start_fleet(), f"{toys.__file__}:Panel"
    fleet.start_actor("only", ["--env", name, "--envs", "2"])
    fleet.start_learner(
        ["--env", name, *SMALL, "--learning-rate", "0.003", "--max-env-steps", "8000", "--evaluate-episodes", "10"]
        + ["--run-dir", str(run_root / "run"), "--json"]
    )
    assert fleet.children["learner"].wait(240.0) == errors.EXIT_OK, fleet.log_tail("learner")
    summary = json.loads(fleet.learner_output())
    assert summary["messages_refused"].keys() <= {"duplicate", "gap"}
    assert summary["kl_mean"] < 0.02
    assert summary["int8_return_mean"] > 11.5, "by chance it is 10, give or take 0.2"
