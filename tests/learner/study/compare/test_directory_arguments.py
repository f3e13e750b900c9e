"""Arguments of a comparison, what of them cannot be met, and the directory that remembers them."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import pytest

from broker.contract import errors
from learner.study.compare import arguments, directory, headroom, peers, plan

REQUEST = plan.Request(hidden=((64, 64), (8,)), precisions=("float32", "int8"), settings=("energy=false",))


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add(parser)
    return parser.parse_args(words)


def asked(*words: str) -> plan.Request:
    return arguments.request(arguments.given(parsed(*words)))


def test_flags_become_a_request() -> None:
    found = asked("--precisions", "float32,int8", "--hidden", "64,64", "--hidden", "8", "--seeds", "2", "--set", "x=1")
    assert (found.hidden, found.seeds, found.settings) == (((64, 64), (8,)), 2, ("x=1",))
    assert arguments.request({}) == plan.Request()
    tuned = {"hidden": [32], "solved_return": 475.0, "updates_per_call": 16}
    assert arguments.complete(plan.Request(), tuned).hidden == ((32,),)


def test_an_unknown_precision_is_named_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    assert asked("--precisions", "float32,int9,int8").precisions == ("float32", "int8")
    assert "left out: precision 'int9' is unknown; use some of int8, float32" in caplog.text
    with pytest.raises(errors.ConfigError, match="there is nothing to compare: int8 alone"):
        asked("--precisions", "int8,int9")


def test_a_peer_that_is_missing_is_named_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    assert asked("--peers", "abacus").peers == ()
    assert "left out: peer 'abacus' is " in caplog.text
    caplog.clear()
    assert asked("--peers", "abacus", "--fleet", "home").peers == ()
    assert "left to the actors of --fleet" in caplog.text


LISTED = """
from broker.contract import errors
RUNTIMES = {"torch-int8": f"{__name__}.no_such_module:Int8", "json": "json:Runtime"}
def python():
    if not PYTHON:
        raise errors.RuntimeMissing("the peers are not there", todo="make peers")
    return PYTHON
"""


def test_peers_without_their_environment_are_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "__init__.py"
    monkeypatch.setattr(peers, "_FILE", file)
    assert "not installed (peers come with the source tree)" in peers.missing(["torch-int8"])["torch-int8"]
    file.write_text(f"PYTHON = ''\n{LISTED}")
    assert peers.missing(["torch-int8"])["torch-int8"] == "not installed (the peers are not there): make peers"
    file.write_text(f"PYTHON = {sys.executable!r}\n{LISTED}")
    why = peers.missing(["torch-int8", "abacus", "json"])
    assert set(why) == {"torch-int8", "abacus"}
    assert "No module named 'tests.benchmarks.peers" in why["torch-int8"]
    assert why["abacus"] == "unknown; use some of torch-int8, json"
    assert peers.missing([]) == {}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--regimes", "bored"], "--regimes takes some of learner-bound, actor-bound, not bored"),
        (["--kinds", ""], "--kinds takes some of throughput, threshold, not nothing"),
        (["--seeds", "0"], "--seeds must be positive, not 0"),
        (["--steps", "-1"], "--steps must not be negative: -1"),
        (["--set", "energy"], "--set takes NAME=VALUE, not 'energy'"),
        (["--broker", "here"], "--broker goes with --fleet"),
    ],
)
def test_what_cannot_be_meant_is_said(words: list[str], what: str) -> None:
    with pytest.raises(errors.ConfigError, match=what):
        asked(*words)


def test_a_task_without_a_threshold_runs_for_throughput_only(caplog: pytest.LogCaptureFixture) -> None:
    tuned = {"hidden": [32], "solved_return": float("inf"), "updates_per_call": 16}
    assert arguments.complete(plan.Request(), tuned).kinds == ("throughput",)
    assert "--set solved_return=X" in caplog.text
    with pytest.raises(errors.ConfigError, match="no kind of run is left"):
        arguments.complete(plan.Request(kinds=("threshold",)), tuned)


def test_an_algorithm_without_replay_samples_nothing_from_it() -> None:
    tuned = {"hidden": [32], "solved_return": 475.0, "algorithm": "ppo"}
    assert arguments.complete(plan.Request(), tuned).regimes == plan.REGIMES
    with pytest.raises(errors.ConfigError, match=r"ppo learns from a step.*\n.*samples-per-insert\n.*epochs=N"):
        arguments.complete(plan.Request(samples_per_insert=2.0), tuned)


def test_a_comparison_is_resumed_as_it_was_begun(tmp_path: Path) -> None:
    begun = directory.Directory.new(tmp_path, REQUEST)
    begun.note_pace("actor-bound", (8,), headroom.Pace(500, 0.5))
    with pytest.raises(errors.RunError, match="holds a comparison already"):
        directory.Directory.new(tmp_path, REQUEST)
    with pytest.raises(errors.RunError, match="another process is at work"):
        directory.Directory.resume(tmp_path, {})
    del begun  # and with it its lock
    with pytest.raises(errors.RunError, match=r"begun with other arguments: seeds 3, not 4; env CartPole-v1, not X\n"):
        directory.Directory.resume(tmp_path, {"seeds": 4, "env": "X", "hidden": ((64, 64), (8,))})
    resumed = directory.Directory.resume(tmp_path, {"seeds": 3})
    assert resumed.request == REQUEST
    assert resumed.pace("actor-bound", (8,)) == headroom.Pace(500, 0.5)
    assert resumed.pace("actor-bound", (64, 64)) is None
    with pytest.raises(errors.RunError, match="there is no comparison to resume"):
        directory.Directory.resume(tmp_path / "none", {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "its plan is no JSON object"),
        ('{"env": "CartPole-v1", "kinds": []}', "its plan lacks precisions, regimes, peers, settings, hidden"),
        ('{"precisions": 5, "regimes": [], "kinds": [], "peers": [], "settings": [], "hidden": []}', "not iterable"),
        ("{", "Expecting property name"),
    ],
)
def test_a_plan_that_is_damaged_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / directory.PLAN).write_text(text)
    with pytest.raises(errors.RunError, match=f"there is no comparison to resume: .*{why}"):
        directory.Directory.resume(tmp_path, {})


def test_a_line_that_was_cut_off_is_written_over(tmp_path: Path) -> None:
    held = directory.Directory.new(tmp_path, REQUEST)
    held.note_run({"run": "a"})
    with open(tmp_path / directory.RUNS, "a") as file:
        file.write('{"run": "b", "half')
    assert held.runs() == [{"run": "a"}]
    held.note_run({"run": "c"})
    assert [one["run"] for one in held.runs()] == ["a", "c"]


def test_half_a_run_is_removed_and_one_that_ended_is_slimmed(tmp_path: Path) -> None:
    held = directory.Directory.new(tmp_path, REQUEST)
    run = held.clear("one")
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}")
    (run / "ledger.sqlite").write_text("")
    held.slim(run)
    assert [file.name for file in run.iterdir()] == ["metrics.jsonl"]
    assert held.clear("one") == run
    assert not run.exists()


@pytest.fixture(autouse=True)
def shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
