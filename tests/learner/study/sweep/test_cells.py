"""The directory of a study: cells that stay, a last line that was cut off, and settings that do not mix."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors
from learner.study.sweep import cells, plan, policies
from tests.fakes import log_reader

REQUEST = plan.Request(policies=("/nowhere",), precisions=("int8-plain",), bits=(), aware_bits=())


def entry(path: Path, name: str = "a.zip") -> policies.Entry:
    file = path / name
    file.write_bytes(b"a policy")
    return policies.Entry(name, str(file), ".zip", "dqn", "CartPole-v1", policies.digest(file, ".zip"))


def record(column: str, **changes: Any) -> cells.Record:
    return {"policy": "a.zip", "column": column, "failed": "", "returns": [1.0, 2.0], "wall_s": 1.0} | changes


def begun(path: Path) -> cells.Cells:
    held = cells.Cells.new(path / "study", REQUEST, [entry(path)])
    held.add(record("random"))
    held.add(record("fp32"))
    held.close()
    return held


def test_cells_are_there_after_they_were_added(tmp_path: Path) -> None:
    before = begun(tmp_path)
    held = cells.Cells.resume(tmp_path / "study", {"episodes": 50})
    assert (held.request, held.entries) == (REQUEST, before.entries)
    assert {key: found["returns"] for key, found in held.done.items()} == {
        ("a.zip", "random"): [1.0, 2.0],
        ("a.zip", "fp32"): [1.0, 2.0],
    }


@pytest.mark.parametrize(("cut", "left"), [(1, 1), (40, 1), (0, 2)])
def test_a_last_line_that_was_cut_off_is_removed_and_said(
    tmp_path: Path, log: log_reader.LogReader, cut: int, left: int
) -> None:
    begun(tmp_path)
    file = tmp_path / "study" / cells.CELLS
    whole = file.read_bytes()
    os.truncate(file, len(whole) - cut)
    held = cells.Cells.resume(tmp_path / "study", {})
    assert len(held.done) == left
    assert any("its last line was cut off" in line for line in log.lines) == (cut > 0)
    held.add(record("int8-plain"))
    held.close()
    lines = file.read_bytes().splitlines(keepends=True)
    assert lines[:left] == whole.splitlines(keepends=True)[:left] and len(lines) == left + 1
    assert all(json.loads(line) for line in lines)


def test_a_last_block_of_zeros_is_removed_too(tmp_path: Path) -> None:
    begun(tmp_path)
    with open(tmp_path / "study" / cells.CELLS, "ab") as file:
        file.write(b"\0" * 100 + b"\n")
    assert len(cells.Cells.resume(tmp_path / "study", {}).done) == 2


def test_what_is_no_cell_in_the_middle_is_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    file = tmp_path / "study" / cells.CELLS
    file.write_bytes(b"{}\n" + file.read_bytes())
    with pytest.raises(errors.RunError, match="line 1 is no cell"):
        cells.Cells.resume(tmp_path / "study", {})


def test_other_settings_do_not_mix(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(errors.RunError, match="with other settings: episodes 50, not 20; bits") as raised:
        cells.Cells.resume(tmp_path / "study", {"episodes": 20, "bits": (4,)})
    assert raised.value.exit_code == 17 and "must not mix" in raised.value.todo
    with pytest.raises(errors.RunError, match="holds a study already"):
        cells.Cells.new(tmp_path / "study", REQUEST, [entry(tmp_path)])
    file = tmp_path / "study" / cells.PLAN
    file.write_text(file.read_text().replace('"episodes": 50', '"episodes": 20'))
    with pytest.raises(errors.RunError, match="line 1 is a cell of a study with other settings"):
        cells.Cells.resume(tmp_path / "study", {})


def test_two_processes_do_not_share_one(tmp_path: Path) -> None:
    begun(tmp_path)
    held = cells.Cells.resume(tmp_path / "study", {})
    with pytest.raises(errors.RunError, match="another process is at work"):
        cells.Cells.resume(tmp_path / "study", {})
    held.close()
    cells.Cells.resume(tmp_path / "study", {}).close()


def test_a_policy_that_changed_is_refused(tmp_path: Path) -> None:
    held = begun(tmp_path)
    held.check_policies(["a.zip"])
    (tmp_path / "vecnormalize.pkl").write_bytes(b"other statistics")
    with pytest.raises(errors.RunError, match=r"a\.zip is not the policy"):
        held.check_policies(["a.zip"])
    held.check_policies([])  # of which nothing is left to compute


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"request": {}, "policies": [], "versions": {}}'])
def test_what_is_no_plan_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / cells.PLAN).write_text(text)
    with pytest.raises(errors.RunError, match="there is no study to resume"):
        cells.Cells.resume(tmp_path, {})


def test_every_setting_is_part_of_the_fingerprint() -> None:
    for field in dataclasses.fields(plan.Request):
        other = dataclasses.asdict(REQUEST) | {field.name: "something else"}
        assert plan.fingerprint(other) != plan.fingerprint(dataclasses.asdict(REQUEST))
