"""The ledgers of a run's workers are there as a whole, whenever their learner was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.contract import errors
from learner import config
from learner.experience import ledger
from learner.files import run_directory
from learner.run.workers import beginning
from tests.fakes import fleet_examples

ABOUT = {"env_id": "CartPole-v1", "spec": json.dumps({"fingerprint": fleet_examples.SPEC.fingerprint})}
TRAIN = config.TrainConfig(ingest_workers=2)


def prepare(directory: run_directory.RunDirectory, epoch: int, *, is_new: bool) -> frozenset[int]:
    epochs, held = beginning.prepare(directory, TRAIN, ABOUT, frozenset({epoch}), is_new=is_new)
    assert held == set()
    return epochs


def test_a_learner_killed_while_it_makes_ledgers_makes_them_when_it_is_started_again(tmp_path: Path) -> None:
    run = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    assert prepare(run, 3, is_new=True) == {3}
    first, second = run_directory.ledgers(run.path, 2)
    known = ledger.about(first)["id"]
    second.rename(f"{second}.new")  # where it was when the learner was killed
    with open(f"{second}.new", "r+b") as half:
        half.truncate(0)
    Path(f"{second}.new-wal").write_bytes(b"of the one that was killed")
    assert prepare(run, 4, is_new=True) == {3, 4}
    assert ledger.about(first)["id"] == known and ledger.about(second)["shard"] == "1 of 2"
    assert not list(run.path.glob("*.new*"))


def test_a_ledger_that_is_gone_later_is_missed(tmp_path: Path) -> None:
    run = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    prepare(run, 3, is_new=True)
    run_directory.ledgers(run.path, 2)[1].unlink()
    with pytest.raises(errors.RunError, match="worker 1 is missing"):
        prepare(run, 4, is_new=False)


def test_a_ledger_that_is_broken_or_in_another_s_place_is_named(tmp_path: Path) -> None:
    run = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    prepare(run, 3, is_new=True)
    first, second = run_directory.ledgers(run.path, 2)
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(errors.RunError, match="that of shard 1 of 2, and stands in the place of 0 of 2") as caught:
        prepare(run, 4, is_new=False)
    assert caught.value.where == str(first)
    first.write_bytes(b"no ledger at all" * 1000)
    with pytest.raises(errors.RunError, match="the ledger is broken") as caught:
        prepare(run, 4, is_new=False)
    assert caught.value.where == str(first)
    first.write_bytes(whole)
    assert prepare(run, 5, is_new=False) >= {3, 5}, "put back, it is used again"
