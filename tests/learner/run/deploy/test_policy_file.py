"""What `actorq-learner deploy` takes: a .tflite whose report fits it and says that the gate let it pass."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors
from learner.run.deploy import policy_file

MODEL = b"no model"


def report(path: Path, **changes: Any) -> Path:
    path.write_bytes(MODEL)
    said = {"sha256": hashlib.sha256(MODEL).hexdigest(), "outputs": "values", "precision": "int8", "passed": True}
    path.with_suffix(".json").write_text(json.dumps(said | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"passed": False, "written": "recipe", "candidates": {"recipe": {"reason": "ties"}}}, "refused"),
        ({"sha256": "0" * 64}, "sha256"),
        ({"outputs": "logits"}, "report"),
        ({}, "unrunnable"),
    ],
)
def test_what_may_not_go_to_a_fleet_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.PolicyError) as refused:
        policy_file.PolicyFile.read(report(tmp_path / "policy.tflite", **changes))
    assert refused.value.reason == reason and refused.value.where


def test_a_policy_that_nobody_judged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.tflite").write_bytes(MODEL)
    with pytest.raises(errors.PolicyError, match="no report"):
        policy_file.PolicyFile.read(tmp_path / "policy.tflite")


def test_force_takes_what_the_gate_refused_but_not_what_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(errors.PolicyError) as refused:
        policy_file.PolicyFile.read(report(tmp_path / "policy.tflite", passed=False), forced=True)
    assert refused.value.reason == "unrunnable"
