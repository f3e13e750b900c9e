"""The fidelity study of a small run, with real models and real actors; and what it says where it cannot be made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, specs
from broker.program import settings
from learner import __main__ as command_line
from learner import config
from learner.algorithms import dqn, registry
from learner.experience import ledger
from learner.files import checkpoint, run_directory
from learner.quantize.tflite import interpreter
from learner.study import fidelity, play, recipes, trained
from tests.fakes import fleet_examples, log_reader

SPEC = fleet_examples.SPEC  # CartPole's


def make_run(path: Path, *, dueling: bool = True, replay: bool = True, states: int = 400, **meta: Any) -> Path:
    """A run directory with a checkpoint of an untrained network, whose biases make it act differently by state."""
    algorithm = config.DqnConfig(hidden=(16, 8), dueling=dueling)
    agent = dqn.Dqn(SPEC, algorithm, seed=0)
    rng = np.random.default_rng(0)
    observations = (rng.normal(size=(states, 4)) * [2, 0.3, 0.1, 1]).astype(np.float32)
    agent.normalize(observations)
    state = agent.state()
    for name in (
        ("weights/advantage/1/kernel", "weights/value/1/kernel") if dueling else ("weights/advantage/0/kernel",)
    ):
        state[name] = rng.normal(size=state[name].shape).astype(np.float32)
    path.mkdir()
    (path / "checkpoints").mkdir()
    (path / "config.toml").write_text(settings.dump(config.TrainConfig(), algorithm))
    facts = {"env_id": "CartPole-v1", "fingerprint": SPEC.fingerprint} | meta
    checkpoint.save(path / "checkpoints", 7, facts, {"algorithm": state})
    book = ledger.Ledger.open(path / run_directory.LEDGER, about={"spec": json.dumps(dataclasses.asdict(SPEC))})
    if replay:
        body = codec.encode(fleet_examples.experience((states - 1,), observation=observations))
        book.begin([ledger.Entry("pi", 1, 1, 0, states - 1, 1, len(body), ledger.OK, body)], forget_before=0)
        book.wait()
    book.close()
    return path


def make_pendulum_run(path: Path, name: str = "d4pg") -> Path:
    """A run whose policy is random and steep."""
    bounds: dict[str, Any] = {"shape": (1,), "low": (-2.0,), "high": (2.0,)}
    spec = specs.EnvSpec(specs.ObservationSpec((3,)), specs.ActionSpec("continuous", **bounds))
    algorithm = config.ALGORITHMS[name](hidden=(32, 16), critic_hidden=(8,))  # type: ignore[call-arg]
    chosen = config.Settings(config.TrainConfig(algorithm=name), algorithm, config.GateConfig())
    agent = registry.make(chosen, spec)
    rng = np.random.default_rng(0)
    observations = (rng.normal(size=(400, 3)) * [1, 1, 8]).astype(np.float32)
    agent.normalize(observations)
    state = agent.state()
    last = state["weights/actor/2/kernel"]
    state["weights/actor/2/kernel"] = rng.normal(size=last.shape).astype(np.float32)
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.toml").write_text(settings.dump(chosen.train, algorithm))
    facts = {"env_id": "Pendulum-v1", "fingerprint": spec.fingerprint}
    checkpoint.save(path / "checkpoints", 7, facts, {"algorithm": state})
    book = ledger.Ledger.open(path / run_directory.LEDGER, about={"spec": json.dumps(dataclasses.asdict(spec))})
    action = np.zeros((399, 1), np.float32)
    body = codec.encode(fleet_examples.experience((399,), observation=observations, action=action))
    book.begin([ledger.Entry("pi", 1, 1, 0, 399, 1, len(body), ledger.OK, body)], forget_before=0)
    book.wait()
    book.close()
    return path


def test_every_row_is_compared_with_fp32_on_held_back_states(tmp_path: Path, log: log_reader.LogReader) -> None:
    run = make_run(tmp_path / "run")
    study = fidelity.study(run, episodes=0)
    assert json.loads((run / "fidelity.json").read_text()) == study
    rows = {row["recipe"]: row for row in study["rows"]}
    assert list(rows) == [recipe.name for recipe in recipes.CHOICES]
    assert (study["states"], study["calibration_states"]) == (200, 200)
    assert rows["fp32"]["agreement"] == 1.0
    assert rows["float16"]["agreement"] > 0.99
    assert rows["all together (ships)"]["agreement"] > 0.95
    measures = ("fp32", "plain int8", "+ advantages", "+ dueling export", "+ per-feature input", "all together (ships)")
    assert len({rows[name]["sha256"] for name in measures}) == len(measures)
    assert f"making {rows['fp32']['recipe']}" in log.lines
    text = fidelity.table(study)
    assert all(len(line) <= 120 for line in text.splitlines())
    assert all(name in text for name in rows)
    assert "not played: no episodes were asked for" in text


def test_the_file_that_was_published_has_a_row_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", published="v000003.int8")
    assert command_line.main(["fidelity", str(run)]) == 17  # it was removed
    (run / "policies").mkdir()
    network = trained.load(make_run(tmp_path / "like"))
    model = recipes.make(recipes.SHIPPED, network, network.observations[:32])
    (run / "policies" / "v000003.int8.tflite").write_bytes(model)
    study = fidelity.study(run, episodes=0, rows=["plain int8"])
    assert [row["recipe"] for row in study["rows"]] == ["fp32", "as published", "plain int8"]
    assert study["rows"][1]["sha256"] == hashlib.sha256(model).hexdigest()
    assert study["rows"][1]["agreement"] > 0.9


def test_actors_play_the_policies_in_the_same_episodes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    names = ["all together (ships)", "plain int8"]
    study = fidelity.study(run, episodes=3, seed=5, rows=names)
    rows = {row["recipe"]: row for row in study["rows"]}
    assert set(rows) == {"fp32", *names}
    chance = play.play({}, "CartPole-v1", 3, 5)[play.RANDOM]
    assert study["random_return"] == pytest.approx(chance.episode_return.mean())
    assert rows["fp32"]["return_difference"] == rows["fp32"]["return_low"] == 0.0
    for row in rows.values():
        assert len(row["returns"]) == 3
        assert row["return_mean"] == pytest.approx(np.mean(row["returns"]))
        assert row["return_difference"] == pytest.approx(np.mean(row["returns"]) - study["fp32_return"], abs=1e-4)
        assert row["delegate"] in ("XNNPACK", "built-in")
    text = fidelity.table(study)
    assert all(len(line) <= 120 for line in text.splitlines())
    assert f"random {study['random_return']:.1f}" in text


def test_continuous_actions_are_compared_by_their_error_and_played(tmp_path: Path) -> None:
    run = make_pendulum_run(tmp_path / "run")
    study = fidelity.study(run, episodes=2)
    rows = {row["recipe"]: row for row in study["rows"]}
    assert list(rows) == [recipe.name for recipe in recipes.ACTIONS]
    assert rows["fp32"]["error_mean"] == 0.0
    assert rows["float16"]["error_max"] < 0.01
    plain, ships = rows["plain int8"], rows["all together (ships)"]
    assert ships["error_mean"] < 0.5 * plain["error_mean"]
    assert ships["error_p99"] < 0.5 * plain["error_p99"]
    assert rows["+ split input"]["error_mean"] < rows["+ bounded tanh"]["error_mean"]
    assert len(ships["error_means"]) == 1
    assert ships["delegate"] == "XNNPACK"
    text = fidelity.table(study)
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "in % of its range" in text


def test_a_squashed_gaussian_has_its_divergence_too_and_is_played_by_its_mode(tmp_path: Path) -> None:
    run = make_pendulum_run(tmp_path / "run", "sac")
    study = fidelity.study(run, episodes=2, rows=["plain int8", "all together (ships)", "float16"])
    fp32, plain, ships, half = study["rows"]
    assert fp32["kl_mean"] == fp32["error_mean"] == 0.0
    assert 0.0 < half["kl_mean"] < ships["kl_mean"] < plain["kl_mean"]
    assert ships["kl_mean"] < ships["kl_p99"]
    assert ships["error_mean"] < min(0.006, 0.5 * plain["error_mean"])
    assert ships["delegate"] == "XNNPACK"
    text = fidelity.table(study)
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "divergence" in text


def test_where_the_environment_is_not_here_the_rest_is_still_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", env_id="NoSuchThing-v0")
    study = fidelity.study(run, episodes=2, rows=["plain int8"])
    assert "NoSuchThing" in study["not_played"]
    assert (study["random_return"], study["fp32_return"]) == (None, None)
    assert study["rows"][1]["agreement"] > 0.5
    assert "return_mean" not in study["rows"][1]
    assert "not played: unknown environment" in fidelity.table(study)


def test_models_are_what_their_names_say(tmp_path: Path) -> None:
    run = trained.load(make_run(tmp_path / "run"))
    x = run.observations
    by_name = {recipe.name: recipe for recipe in recipes.CHOICES}
    outputs = {
        name: interpreter.run(recipes.make(by_name[name], run, x), x)[0]
        for name in ("fp32", "plain int8", "+ advantages", "only dueling export", "all together (ships)")
    }
    centred = outputs["fp32"]
    assert np.abs(centred.sum(1)).max() < 1e-4
    step = np.ptp(outputs["plain int8"]) / 255
    assert np.abs(outputs["plain int8"].sum(1)).max() > 0.3  # values of states are in it
    assert np.abs(outputs["+ advantages"].sum(1)).max() < 4 * step
    assert np.abs(outputs["only dueling export"] - outputs["+ advantages"]).max() > 2 * step
    assert (outputs["all together (ships)"].argmax(1) == centred.argmax(1)).mean() > 0.95


def test_a_network_without_value_stream_has_no_dueling_rows(tmp_path: Path) -> None:
    study = fidelity.study(make_run(tmp_path / "run", dueling=False), episodes=0)
    names = [row["recipe"] for row in study["rows"]]
    assert "+ advantages" in names
    assert not [name for name in names if "dueling" in name]


@pytest.mark.parametrize(
    ("changes", "arguments", "code", "message"),
    [
        ({}, ["--rows", "nonsense"], 10, "no row 'nonsense'"),
        ({}, ["--episodes", "-1"], 10, "at least 0"),
        ({"replay": False}, [], 17, "holds no experience"),
        ({"states": 100}, [], 17, "too few"),
        ({"fingerprint": "0" * 16}, [], 17, "another network"),
    ],
)
def test_what_cannot_be_studied(
    tmp_path: Path, changes: Any, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", **changes)
    assert command_line.main(["fidelity", str(run), *arguments]) == code
    assert message in capsys.readouterr().err
    assert not (run / "fidelity.json").exists()


def test_runs_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["fidelity", str(tmp_path)]) == 17
    assert "there is no run" in capsys.readouterr().err
    run = make_run(tmp_path / "run")
    (run / "config.toml").write_text("hidden = [32, 8]\ndueling = true\n")
    assert command_line.main(["fidelity", str(run)]) == 17
    assert "another network" in capsys.readouterr().err
    (run / "config.toml").write_text("hidden = [16, 16, 8]\ndueling = true\n")
    assert command_line.main(["fidelity", str(run)]) == 17
    assert "torso/1/kernel" in capsys.readouterr().err
    for file in (run / "checkpoints").iterdir():
        file.unlink()
    (run / "config.toml").write_text("")
    assert command_line.main(["fidelity", str(run)]) == 17
    assert "no checkpoint yet" in capsys.readouterr().err


def test_the_command_prints_the_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    arguments = ["fidelity", str(run), "--rows", "plain int8", "--episodes", "0"]
    assert command_line.main([*arguments, "--json"]) == errors.EXIT_OK
    study = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in study["rows"]] == ["fp32", "plain int8"]
    assert command_line.main(arguments) == errors.EXIT_OK
    assert capsys.readouterr().out.strip() == fidelity.table(study)


def test_a_policy_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "junk.tflite").write_bytes(b"\1" * 100)
    with pytest.raises(errors.ActorqError, match="not a TFLite model"):
        play.play({"junk": tmp_path / "junk.tflite"}, "CartPole-v1", 1, 0)
