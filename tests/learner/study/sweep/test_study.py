"""`actorq-learner study` on small policies of every kind; and killed in the middle of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from broker.contract import errors, specs
from learner import __main__ as main
from learner.networks import layers, policy_value
from learner.quantize import fp32
from learner.quantize.distil import training
from learner.study import trained
from learner.study.sweep import cells, opening, plan
from learner.study.user_models import distilled, recipe
from tests.learner.study import test_fidelity
from tests.learner.study.user_models import test_distil, test_env

pytestmark = pytest.mark.system
SMALL = ["--episodes", "2", "--calibration-episodes", "4", "--precisions", "int8-recipe", "--bits", "3"]
SMALL += ["--aware-bits", "none"]
COLUMNS = ("random", "fp32", "int8-recipe", "w3")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An agent's file, a run of ours, and two of which nothing can be known."""
    path = tmp_path_factory.mktemp("policies")
    test_env.balancer(path / "dqn-CartPole-v1.zip")
    test_fidelity.make_pendulum_run(path / "run")
    shutil.copy(path / "dqn-CartPole-v1.zip", path / "agent.zip")
    (path / "ppo-CartPole-v1.zip").write_bytes(b"no agent")
    return path


@pytest.fixture(scope="module")
def whole(policies: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of them from beginning to end."""
    path = tmp_path_factory.mktemp("whole") / "study"
    assert main.main(["study", "--policies", str(policies), "-o", str(path), *SMALL]) == errors.EXIT_OK
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / cells.CELLS).read_text().splitlines()]


def keys(path: Path) -> list[tuple[str, str]]:
    return [(one["policy"], one["column"]) for one in lines(path)]


def test_each_policy_has_each_column_and_who_has_none_says_why(whole: Path) -> None:
    assert keys(whole) == [(name, column) for name in ("dqn-CartPole-v1.zip", "run") for column in COLUMNS]
    found = json.loads((whole / "study.json").read_text())
    assert not any(row["failed"] for row in found["cells"])
    cell = {(row["policy"], row["column"]): row for row in found["cells"]}
    agent = cell["dqn-CartPole-v1.zip", "int8-recipe"]
    assert agent["fp32_mean"] == 500 and agent["agreement"] > 0.9 and agent["random_mean"] < 100
    assert agent["error_percent"] == pytest.approx((500 - agent["return_mean"]) / 5)
    assert cell["dqn-CartPole-v1.zip", "w3"]["agreement"] < 1
    assert cell["run", "int8-recipe"]["action_error_mean"] < cell["run", "w3"]["action_error_mean"]
    about = {one["policy"]: one for one in found["policies"]}
    assert "ALGO-ENV.zip, as in dqn-CartPole-v1, or give --env" in about["agent.zip"]["unusable"]
    assert "cannot be read" in about["ppo-CartPole-v1.zip"]["unusable"]
    assert (about["run"]["env"], about["run"]["source"]) == ("Pendulum-v1", "run, d4pg")
    layer = about["dqn-CartPole-v1.zip"]["weights"][0]
    assert layer["shape"] == [8, 4] and sum(layer["histogram"]) == 32 and layer["min"] < 0 < layer["max"]
    assert not (whole / opening.OBSERVATIONS).exists()
    assert {"study.md", "study.csv", "report.html"} <= {file.name for file in whole.iterdir()}


def test_nothing_is_computed_once_more(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (whole / cells.CELLS).read_bytes()
    assert main.main(["study", "--resume", str(whole), "--json"]) == errors.EXIT_OK
    said = capfd.readouterr()
    assert (whole / cells.CELLS).read_bytes() == before
    assert json.loads(said.out)["request"]["episodes"] == 2
    assert "error:" not in said.err and "agent.zip has no cells: its environment is unknown" in said.err
    assert main.main(["study", "--resume", str(whole), "--episodes", "3"]) == errors.RunError.exit_code
    assert "episodes 2, not 3" in capfd.readouterr().err


def test_killed_in_the_middle_it_loses_no_cell_and_computes_none_twice(
    whole: Path, policies: Path, tmp_path: Path
) -> None:
    path = tmp_path / "study"
    command = [sys.executable, "-m", "learner", "study"]
    begun = [*command, "--policies", str(policies), "-o", str(path), *SMALL]
    child = subprocess.Popen(begun, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if " fp32, return" in line:  # the next cell is at work
            break
    descendants = psutil.Process(child.pid).children(recursive=True)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert not alive  # its actor went with it
    kept = (path / cells.CELLS).read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 2 <= len(kept.splitlines()) < 8
    (path / cells.CELLS).write_bytes(kept + b'{"study": "half a li')
    done = subprocess.run([*command, "--resume", str(path), "--jobs", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == errors.EXIT_OK, done.stderr
    assert "oneDNN" not in done.stderr
    assert "its last line was cut off, and is removed (20 bytes)" in done.stderr
    assert (path / cells.CELLS).read_bytes().startswith(kept)
    assert sorted(keys(path)) == sorted(keys(whole))
    returns = [{(one["policy"], one["column"]): one["returns"] for one in lines(each)} for each in (whole, path)]
    assert returns[0] == returns[1]


def test_what_is_trained_is_the_same_once_more_and_a_student_plays_between_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_STEPS", 200)
    test_distil.agent(tmp_path / "dqn-CartPole-v1.zip")
    explored, played = distilled.explored, []

    def recorded(model: bytes, number: int, *rest: Any) -> Any:
        found = explored(model, number, *rest)
        played.append((number, len(found[0]), len(found[1])))
        return found

    monkeypatch.setattr(distilled, "explored", recorded)
    only = ["--episodes", "2", "--calibration-episodes", "4", "--precisions", "int8-distilled", "--aware-bits", "2"]
    only += ["--steps", "100", "--distil-rounds", "2"]
    paths = {"2": tmp_path / "one", "none": tmp_path / "other"}
    for bits, path in paths.items():
        command = ["study", "--policies", str(tmp_path / "dqn-CartPole-v1.zip"), "-o", str(path), *only]
        assert main.main([*command, "--bits", bits]) == errors.EXIT_OK
    cell, other = ({row["column"]: row for row in lines(path)} for path in paths.values())
    assert list(cell) == ["random", "fp32", "int8-distilled", "w2", "w2-aware"]
    assert not any(row["failed"] for row in cell.values())
    for name, row in other.items():
        assert row.get("sha256") == cell[name].get("sha256") and row["returns"] == cell[name]["returns"]
    assert [number for number, _, _ in played] == [0, 0]  # nothing is learned from what the last one would play
    assert all(episodes == 10 and rows > 1000 for _, episodes, rows in played)
    assert cell["int8-distilled"]["agreement"] > 0.95 and min(cell["int8-distilled"]["returns"]) > 400
    assert cell["w2-aware"]["agreement"] > cell["w2"]["agreement"]
    assert main.main(["study", "--resume", str(paths["2"]), "--distil-rounds", "3"]) == errors.RunError.exit_code


@pytest.mark.parametrize("head", ["gaussian", "squashed_gaussian"])
def test_a_run_that_samples_is_read_by_its_mode(head: specs.Head) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    hidden = layers.Dense(rng.normal(size=(16, 3)).astype(np.float32), np.ones(16, np.float32), "relu")
    size = 4 if head == "squashed_gaussian" else 2
    last = layers.Dense(rng.normal(size=(size, 16)).astype(np.float32), np.ones(size, np.float32), "none")
    action = specs.ActionSpec("continuous", shape=(2,), low=(-2.0, 0.0), high=(2.0, 3.0))
    half, middle = np.array([2, 1.5], np.float32), np.array([0, 1.5], np.float32)
    tail: tuple[layers.Layer, ...] = (last,)
    if head == "gaussian":
        tail = policy_value.gaussian_tail(last, np.zeros(2, np.float32), layers.Rescale(half, middle))
    needed = (hidden, *tail)
    run = trained.Trained("E-v0", 1, action, head, needed, needed, False, x, None)
    policy = recipe.ChainSubject(opening.of_run(run, "some"))
    mean, end = fp32.outputs(needed, x)[:, :2], specs.SQUASHED_MEAN_MAX
    expected = np.tanh(np.clip(mean, -end, end)) * half + middle if head == "squashed_gaussian" else mean
    expected = np.clip(expected, action.low, action.high)
    assert (np.ptp(expected, axis=0) > 2).all()
    np.testing.assert_allclose(np.clip(policy.exact(x), action.low, action.high), expected, atol=1e-5)
    assert (policy.size, policy.outputs, policy.head, policy.source) == (2, "actions", "deterministic", "run, some")


def test_only_unusable_policies_are_an_error(policies: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["study", "--policies", str(policies / "agent.zip"), "-o", str(tmp_path / "study")]
    assert main.main(command) == errors.RunError.exit_code
    assert "none of the 1 policies can be studied" in capfd.readouterr().err
    assert main.main([*command[:-1], str(tmp_path / "other"), "--env", "NoSuchThing-v0"]) == errors.RunError.exit_code
    assert "NoSuchThing" in capfd.readouterr().err


def test_cells_that_failed_are_done_again_when_asked(policies: Path, tmp_path: Path) -> None:
    path = tmp_path / "study"
    only = ["--episodes", "2", "--calibration-episodes", "4", "--bits", "none", "--aware-bits", "none"]
    file = str(policies / "dqn-CartPole-v1.zip")
    request = plan.Request((file,), precisions=("fp16",), bits=(), aware_bits=(), episodes=2, calibration_episodes=4)
    from learner.study.sweep import policies as finding

    held = cells.Cells.new(path, request, finding.find([file], ""))
    for column in ("random", "fp32", "fp16"):
        held.add({"policy": "dqn-CartPole-v1.zip", "column": column, "failed": "the disk was full", "wall_s": 1.0})
    held.close()
    assert main.main(["study", "--resume", str(path), *only, "--precisions", "fp16"]) == errors.EXIT_OK
    assert len(lines(path)) == 3
    assert main.main(["study", "--resume", str(path), "--retry-failed"]) == errors.EXIT_OK
    assert len(lines(path)) == 6
    found = json.loads((path / "study.json").read_text())
    assert [row["failed"] for row in found["cells"]] == ["", "", ""]
