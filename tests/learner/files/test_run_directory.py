"""A run directory explains itself, belongs to one process, and is never overwritten."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest

from broker.contract import errors, messages
from broker.program import settings
from learner import config
from learner.files import run_directory

SETTINGS = config.Settings(config.TrainConfig(env="CartPole-v1", seed=5), config.DqnConfig(), config.GateConfig())


def test_says_what_it_ran_with(tmp_path: Path) -> None:
    found = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    found.describe(SETTINGS)
    assert (found.path / "config.toml").read_text() == settings.dump(*SETTINGS)
    found.describe(SETTINGS)
    starts = json.loads((found.path / "run.json").read_text())["starts"]
    assert len(starts) == 2
    assert starts[0]["versions"]["tensorflow"]
    assert starts[0]["command"]


def test_is_not_overwritten(tmp_path: Path) -> None:
    run_directory.RunDirectory.open(tmp_path / "run", resume=False).describe(SETTINGS)
    with pytest.raises(errors.RunError, match="holds a run already") as caught:
        run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    assert "--resume" in caught.value.todo


def test_is_not_resumed_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(errors.RunError, match="no run to resume"):
        run_directory.RunDirectory.open(tmp_path / "run", resume=True)


def test_belongs_to_one_process(tmp_path: Path) -> None:
    first = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    first.describe(SETTINGS)
    with pytest.raises(errors.RunError, match="another process"):
        run_directory.RunDirectory.open(tmp_path / "run", resume=True)


def test_gives_a_kept_policy_back_if_it_is_the_one_that_was_published(tmp_path: Path) -> None:
    found = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    digest = hashlib.sha256(b"model").hexdigest()
    path = found.save_policy(messages.Manifest(3, 7, "main", 5, digest, "", "q_values", "int8", 1.0), b"model")
    assert found.stored_policy(messages.Order(3, 7)) == b"model"
    assert found.stored_policy(messages.Order(2, 7)) is None, "of a session before"
    assert found.stored_policy(messages.Order(3, 8)) is None
    path.write_bytes(b"other")
    assert found.stored_policy(messages.Order(3, 7)) is None, "the disk has spoilt it"


def test_keeps_policies_as_plain_files(tmp_path: Path) -> None:
    found = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    model = b"a model"
    digest = hashlib.sha256(model).hexdigest()
    manifest = messages.Manifest(1, 12, "main", len(model), digest, "f" * 16, "q_values", "int8", 1.0)
    path = found.save_policy(manifest, model)
    assert path.name == "v000012.int8.tflite"
    assert path.read_bytes() == model
    assert json.loads(path.with_suffix(".json").read_text())["sha256"] == digest


def test_keeps_ever_fewer_of_the_older_policies(tmp_path: Path) -> None:
    found = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    for version in range(1, 1206):
        found.save_policy(messages.Manifest(1, version, "main", 1, "", "", "q_values", "int8", 1.0), b"m")
    kept = sorted(int(path.name[1:7]) for path in found.policies.glob("*.tflite"))
    assert kept == [100, 200, *range(210, 1105, 10), *range(1106, 1206)]
    assert len(list(found.policies.glob("*.json"))) == len(kept)


def test_names_new_runs_by_environment_and_time() -> None:
    found = run_directory.new_path(config.TrainConfig(algorithm="dqn"), "ALE/Pong-v5")
    assert found.parent == Path("runs")
    assert found.name.startswith("ALE_Pong-v5-dqn-")


@pytest.mark.fault(14)
def test_an_actor_that_names_its_environment_at_length_makes_no_path_that_is_too_long(tmp_path: Path) -> None:
    path = run_directory.new_path(config.TrainConfig(), "x" * 1000)
    assert len(path.name) < 200
    (tmp_path / path.name).mkdir()


@pytest.mark.fault(13)
def test_what_was_granted_outlives_the_learner_and_is_unbounded_where_nobody_knows(tmp_path: Path) -> None:
    found = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    assert found.owed_steps() == math.inf
    for steps in (4096, math.inf):
        found.note_owed_steps(steps)
        assert found.owed_steps() == steps
    (found.path / "owed.json").write_text("{")
    assert found.owed_steps() == math.inf


def test_a_run_keeps_its_number_of_ingest_workers(tmp_path: Path) -> None:
    assert run_directory.ledgers(tmp_path) == [tmp_path / run_directory.LEDGER]
    run_directory.check_workers(tmp_path, 3)
    for file in run_directory.ledgers(tmp_path, 2):
        file.touch()
    assert [file.name for file in run_directory.ledgers(tmp_path)] == [
        "ledger-0-of-2.sqlite",
        "ledger-1-of-2.sqlite",
    ]
    run_directory.check_workers(tmp_path, 2)
    for other in (0, 3):
        with pytest.raises(
            errors.RunError, match=f"begun with 2 ingest workers, and would go on with {other}"
        ) as caught:
            run_directory.check_workers(tmp_path, other)
        assert "--ingest-workers 2" in caught.value.todo
    with pytest.raises(errors.RunError, match="holds a run already"):
        run_directory.RunDirectory.open(tmp_path, resume=False)
    (tmp_path / run_directory.LEDGER).touch()
    with pytest.raises(errors.RunError, match="ledgers of 0 and of 2 ingest workers"):
        run_directory.workers_of(tmp_path)
