"""A comparison does what its plan says, but for what cannot be done any more."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors
from learner.study.compare import comparison, directory, fleet_run, plan

TUNED = {"learning_starts": 10, "epsilon_end": 0.1}


def test_a_peer_that_went_away_is_left_out_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = plan.Request(
        hidden=((8,),), seeds=1, regimes=("learner-bound",), kinds=("throughput",), steps=100, peers=("torch-int8",)
    )
    held = directory.Directory.new(tmp_path, request)
    started: list[Sequence[str]] = []

    def run(words: Sequence[str], *_: Any, **__: Any) -> fleet_run.Outcome:
        started.append(words)
        return fleet_run.Outcome({}, "there is no fleet in this test", False, 1.0)

    monkeypatch.setattr(fleet_run, "run", run)
    compared = comparison.Comparison(held, TUNED, threading.Event(), frozenset({"torch-int8"}))
    with pytest.raises(errors.RunError, match="2 of 2 failed"):
        compared.run()
    assert ["--actor-runtime" in words for words in started] == [False, False]
    assert [one["arm"]["precision"] for one in held.runs()] == ["float32", "int8"]
