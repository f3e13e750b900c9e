"""`make bench` on a machine without Mosquitto: what can be measured is, the rest is said to be left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.contract import errors
from tests import conftest

REPOSITORY = Path(__file__).parents[1]
BARE = """
import pathlib, shutil, subprocess, sys
from broker.serve.mosquitto import process
from tests.benchmarks import __main__, actor
process.find = lambda: None
actor.ALTERNATIONS, actor.SLICE_S = 1, 0.01
model = pathlib.Path("tests/edge_actor/policies/models/cartpole-int8.tflite")
run = subprocess.run
subprocess.run = lambda command, **options: (  # the actor's model is there already
    shutil.copy(model, command[-1]) if "tests.edge_actor.policies.models.make" in command else run(command, **options)
)
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
    assert [row.get("broker") for row in measured] == ["embedded", "embedded", "embedded", None]
    assert all(row["benchmark"] == "actor" and row["value"] > 0 for row in measured)
    assert "sudo apt install mosquitto" in done.stderr
