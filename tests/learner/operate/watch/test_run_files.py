"""A run's rows, followed while they are written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from broker.contract import errors
from learner.operate.watch import run_files


def write(path: Path, *rows: object, end: str = "\n") -> None:
    with open(path / "metrics.jsonl", "a") as file:
        file.write("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end)


def test_follows_rows_also_where_one_is_half_written(tmp_path: Path) -> None:
    run = run_files.RunFiles(tmp_path)
    run.follow()
    assert run.points == []
    write(tmp_path, {"wall_s": 1.0, "env_steps": 10, "other": 7, "loss": None})
    write(tmp_path, '{"wall_s": 2.0, "env_', end="")
    run.follow()
    assert run.points == [{"wall_s": 1.0, "env_steps": 10.0}] and run.newest["other"] == 7
    write(tmp_path, 'steps": 20}', "no row", {"wall_s": 0.5, "env_steps": 30})
    run.follow()
    assert [point["env_steps"] for point in run.points] == [10, 20, 30]
    assert run.points[-1]["wall_s"] == 2.5, "a resumed run counts from its own start"


def test_of_many_rows_it_keeps_ever_fewer(tmp_path: Path) -> None:
    write(tmp_path, *({"wall_s": n, "env_steps": n} for n in range(5 * run_files.POINTS_MAX)))
    run = run_files.open_run(tmp_path)
    assert run.generation and run_files.POINTS_MAX / 2 <= len(run.points) < run_files.POINTS_MAX
    steps = [point["env_steps"] for point in run.points]
    assert steps == list(range(0, 5 * run_files.POINTS_MAX, int(steps[1])))


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.RunError, match="no metrics"):
        run_files.open_run(tmp_path)


def test_finds_the_newest_run_of_a_fleet(tmp_path: Path) -> None:
    for name, fleet in (("one", "lab"), ("two", "home")):
        (tmp_path / name).mkdir()
        write(tmp_path / name, {})
        (tmp_path / name / "config.toml").write_text(f'fleet = "{fleet}"\n')
    assert run_files.newest_run("lab", tmp_path) == tmp_path / "one"
    assert run_files.newest_run("other", tmp_path) is None


def test_follows_who_drifts_while_the_learner_lives(tmp_path: Path) -> None:
    write(tmp_path, {"wall_s": 1.0})
    run = run_files.open_run(tmp_path)
    assert run.drift == {}
    (tmp_path / "drift.json").write_text(json.dumps({"pi": {"outside": "feature 2"}, "odd": 3}))
    run.follow()
    assert run.drift == {"pi": {"outside": "feature 2"}}
    os.utime(tmp_path / "metrics.jsonl", (1e9, 1e9))
    run.follow()
    assert run.drift == {}, "its learner was killed"
