"""`make bench` on a machine without Mosquitto: what can be measured is, the rest is said to be left out.

And what the peers rest on, without them: `make peers` checks those themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from broker.contract import errors
from edge_actor import config
from edge_actor.bench import models
from edge_actor.policies import interpreter
from learner.experience import ledger
from learner.fleet import budget
from learner.networks import layers
from learner.quantize.tflite import convert
from tests import conftest
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import _windows, peers
from tests.benchmarks.fleet import scale, simulate
from tests.benchmarks.learning import age
from tests.benchmarks.peers import __main__ as bench_peers
from tests.benchmarks.peers import arms, mlp

REPOSITORY = Path(__file__).parents[1]
BARE = """
import pathlib, shutil, subprocess, sys
from broker.serve.mosquitto import process
from tests.benchmarks import __main__
from tests.benchmarks.speed import actor
process.find = lambda: None
actor.ALTERNATIONS, actor.SLICE_S = 1, 0.01
model = pathlib.Path("tests/edge_actor/policies/models/cartpole-int8.tflite")
run = subprocess.run
subprocess.run = lambda command, **options: (  # the actor's model is there already
    shutil.copy(model, command[-1]) if "tests.edge_actor.policies.models.make" in command else run(command, **options)
)
actor._frames = lambda directory: actor._latency(model)  # whose model takes TensorFlow, as do these heads'
actor._sampled = lambda directory, head: actor._latency(model)
sys.exit(__main__.main(sys.argv[1:]))
"""


@pytest.mark.fault(30)
def test_what_needs_no_mosquitto_is_measured_and_the_rest_listed() -> None:
    conftest.require("embedded")
    command = [sys.executable, "-c", BARE, "load", "actor"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=os.environ, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == errors.RuntimeMissing.exit_code, done.stderr
    left_out = [row for row in rows if "left_out" in row]
    assert [row["benchmark"] for row in left_out] == ["load"]
    assert {(row["left_out"], row["todo"]) for row in left_out} == {
        ("Mosquitto is not installed", "sudo apt install mosquitto")
    }
    measured = [row for row in rows if "left_out" not in row]
    assert [row.get("broker") for row in measured] == ["embedded"] * 4 + [None] * 5
    assert all(row["benchmark"] == "actor" and row["value"] > 0 for row in measured)
    assert "sudo apt install mosquitto" in done.stderr


def test_peers_read_the_policy_that_was_written() -> None:
    shape = models.Shape(32, 2)
    policy, rows = models.make(shape), models.observations(shape, 16)
    found = mlp.read(models.tflite(policy, "float32"))
    # Not to the bit: some processors add up a product in another order where a matrix lies transposed
    np.testing.assert_allclose(mlp.run(found, rows), policy(rows), rtol=0, atol=2e-6)
    np.testing.assert_allclose(mlp.run(mlp.folded(found), rows), policy(rows), atol=1e-5)
    assert (mlp.inputs(found), mlp.outputs(found)) == (models.FEATURES, models.ACTIONS)
    assert [type(layer) for layer in mlp.folded(found)] == [mlp.Dense] * 3


def test_peers_read_what_the_learner_publishes() -> None:
    """Bounded actions: a tanh, and a scaling behind it. The reference is the actor's own runtime."""
    rng = np.random.default_rng(0)
    made: list[layers.Layer] = []
    for inputs, outputs, activation in ((3, 24, "relu"), (24, 24, "relu"), (24, 2, "tanh")):
        kernel, bias = (rng.normal(0.0, 0.5, size).astype(np.float32) for size in ((outputs, inputs), outputs))
        made.append(layers.Dense(kernel, bias, activation))  # type: ignore[arg-type]
    made.append(layers.Rescale(np.array([2.0, 3.0], np.float32), np.array([0.0, 1.0], np.float32)))
    rows = rng.normal(size=(32, 3)).astype(np.float32)
    model = convert.convert(tuple(made), rows, "float32")
    built = interpreter.Interpreter(model, len(rows))
    built.input[...] = rows
    built.invoke()
    for read in (mlp.read(model), mlp.folded(mlp.read(model))):
        np.testing.assert_allclose(mlp.run(read, rows), built.output, atol=1e-4)


@pytest.mark.parametrize("precision", ["int8", "float16"])
def test_peers_say_what_they_want_instead(precision: str) -> None:
    model = models.tflite(models.make(models.Shape(32, 2)), precision)
    with pytest.raises(errors.PolicyError, match="float32 MLPs") as caught:
        mlp.read(model)
    assert caught.value.todo == "publish with --precision float32"


def test_peers_refuse_a_file_that_was_cut() -> None:
    model = models.tflite(models.make(models.Shape(32, 2)), "float32")
    for length in (0, 8, 200, len(model) // 2):
        with pytest.raises(errors.PolicyError):
            mlp.read(model[:length])


@pytest.mark.system
@pytest.mark.mosquitto
def test_scale_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    conftest.require("mosquitto")
    small: dict[str, object] = {"ENROLLED": 40, "REVOKED": 2, "ACTORS": 12, "RETURN_S": 0.5}
    small |= {
        "PARTS": ["shared", "ledger", "enrolled"],
        "MESSAGES": 20_000,
        "BOOTS": 10,
        "LEDGER_ACTORS": 20,
        "HELD": 100,
    }
    for name, value in small.items():
        monkeypatch.setattr(scale, name, value)
    monkeypatch.setattr(ledger, "ROWS_KEPT", 1000)
    rows = list(scale.run())
    shared, (opened, size), enrolled = rows[:5], rows[5:7], rows[7:]
    assert all(set(benchmarks.KEYS) <= row.keys() for row in rows)
    assert {row["case"].split(":")[0] for row in shared} == {"12 TLS actors on 3 brokers"}
    assert [row["value"] for row in shared if "lost" in row["case"]] == [0], "three kills, and all is in the ledger"
    assert opened["value"] > 0 and size["ratio"] < 1.5, "ten boots take no more room than three"
    assert [row["case"].split(":")[0] for row in enrolled] == ["40 enrolled"] * 4
    assert [row["runs"] for row in enrolled if "acknowledgement" not in row["case"]] == [1, 2, 2]
    assert all(row["value"] > 0 for row in enrolled)


@pytest.mark.parametrize(("age_s", "is_good"), [(7.0, True), (12.0, False)])
def test_what_is_older_is_learned_from_later(age_s: float, is_good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(age, "LIMIT_S", 10.0)
    monkeypatch.setattr(age, "_score", lambda *_: 500.0)  # as soon as there is a policy
    found = age._learned("CartPole-v1", age_s, seed=0)
    assert found.is_good == is_good
    assert age_s < found.seconds if is_good else found.seconds == age.LIMIT_S
    assert found.steps == age.ACTORS * age.RATES["CartPole-v1"] * found.seconds


@pytest.mark.parametrize("size", [50, 400])
def test_a_simulated_fleet_keeps_the_budgets(size: int) -> None:
    told = simulate.Simulation(size).run(30.0, 60.0)
    assert told.steps == pytest.approx(size * simulate.RATE * 60.0, rel=0.1), "all is taken"
    assert 0.8 * budget.MESSAGES_PER_S * 60 < told.messages < 1.2 * budget.MESSAGES_PER_S * 60
    assert told.receipts <= told.messages and not told.silent
    period_s = size / budget.MESSAGES_PER_S
    assert 0.4 * period_s < told.age_s / told.steps < 0.6 * period_s + 0.1, "half a period, and the way"
    assert told.budget_per_s == budget.MESSAGES_PER_S, "it serves them"


def test_a_simulated_fleet_says_more_where_ingest_has_room_and_less_where_it_has_none() -> None:
    slow = simulate.Simulation(400, rate=1.0, message_s=0.02).run(120.0, 60.0)
    quick = simulate.Simulation(1200, rate=1.0, message_s=0.0003).run(120.0, 60.0)
    assert quick.budget_per_s == pytest.approx(1200 / budget.WANTED_PERIOD_S), "up to what is wanted"
    assert quick.age_s / quick.steps == pytest.approx(budget.WANTED_PERIOD_S / 2, rel=0.2)
    low, high = (share / 0.02 for share in budget.NEEDED)
    assert low <= slow.budget_per_s <= high, "what its loop has time for"
    assert slow.messages / 60.0 <= 1.1 * high
    assert not quick.silent and not slow.silent


def test_every_peer_is_there() -> None:
    for runtime in peers.RUNTIMES.values():
        module, _, leaf = runtime.partition(":")
        assert config.is_runtime(runtime)
        source = (REPOSITORY / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        assert f"class {leaf}" in source


def test_who_is_late_counts_with_the_limit() -> None:
    duel = arms.duels()["cartpole"]
    matched, zoo = duel.theirs

    def results(*seconds: float) -> dict[int, dict[str, object]]:
        return {
            seed: {"solved": s < 100.0, "seconds": s, "training_s": s / 2, "env_steps": 1000}
            for seed, s in enumerate(seconds)
        }

    found = {
        duel.ours.name: results(10.0, 12.0, 20.0),
        matched.name: results(60.0, 130.0, 100.4),
        zoo.name: results(24.0),
    }
    for result in found[duel.ours.name].values():
        result |= {"env_steps": 1300, "solved_env_steps": 900}
    first, alone, steps, second, _, _ = bench_peers.duel_rows(duel, found, 100.0)
    assert (first["value"], first["reference"], first["ratio"], first["runs"]) == (12.0, 100.0, 0.12, 3)
    assert "2 not within it" in first["explain"] and "so the ratio is a bound" in first["explain"]
    assert (alone["value"], alone["reference"]) == (6.0, 100.0) and "loop of training" in alone["case"]
    assert (second["value"], second["reference"], second["runs"]) == (10.0, 24.0, 1)
    assert "bound" not in second["explain"]
    assert (steps["unit"], steps["value"], steps["ratio"]) == ("steps", 900, 0.9)
    assert "theirs 1000 to 1000, 2 not solved" in steps["explain"]
    assert all(key in first for key in benchmarks.KEYS)


def test_a_run_with_other_settings_is_run_again(tmp_path: Path) -> None:
    file, request = tmp_path / "a.json", {"seed": 1, "settings": {"hidden": (64, 64)}}
    assert bench_peers.read(file, request) is None
    file.write_text(json.dumps({"request": request, "result": {"solved": True}}))
    assert bench_peers.read(file, request) == {"solved": True}
    assert bench_peers.read(file, request | {"timeout_s": 5}) is None
    file.write_text('{"request": {"se')
    assert bench_peers.read(file, request) is None


def test_without_the_peers_it_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "REPOSITORY", tmp_path)
    assert bench_peers.main([]) == errors.RuntimeMissing.exit_code
    assert "to do: make peers" in capsys.readouterr().err
    assert bench_peers.main(["chess"]) == errors.ConfigError.exit_code
    assert "choose among updates, cartpole" in capsys.readouterr().err


def test_a_tenth_that_is_lost_in_short_windows_is_found_beside_more_drift() -> None:
    rng = np.random.default_rng(27)
    at = np.arange(0.0, 60.0, 0.25)
    windows = np.stack([at, rng.integers(2, size=len(at))], 1)
    seconds = np.arange(0.0, 60.0, 0.001)
    speed = 1000.0 * (1.0 + 0.3 * np.sin(seconds / 5.0)) * rng.normal(1.0, 0.2, len(seconds))
    speed *= 1.0 - 0.1 * np.repeat(windows[:, 1], 250)
    passes = np.stack([seconds, np.cumsum(speed) * 0.001], 1)[::12]
    found = _windows.compare(passes, windows, 0.25)
    assert found.error < 0.01 and abs(found.value - 0.9) < 3 * found.error
    assert found.windows == len(at) - 18, "those at the ends have no rate around them"
    shuffled = np.stack([at, rng.permutation(windows[:, 1])], 1)
    none = _windows.compare(passes, shuffled, 0.25)
    assert abs(none.value - 1.0) < 3 * none.error
