"""Whatever becomes of a process that tries settings, the actor comes back with those before."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from broker.contract import messages
from edge_actor.orders import order_log, trial

KEY = bytes(32)


@pytest.fixture
def log(tmp_path: Path) -> order_log.OrderLog:
    """The trial of a process that finds settings to try."""
    before = order_log.OrderLog.open(tmp_path, KEY)
    before.try_out(messages.Instruction(7, "set", 1e12, {"seed": "3"}), {"seed": "3"})
    return order_log.OrderLog.open(tmp_path, KEY)


def test_at_the_time_limit_the_actor_is_stopped_and_the_settings_are_undone(log: order_log.OrderLog) -> None:
    stopped = threading.Event()
    trying = trial.Trial(log, again=lambda: None)
    trying.stops_by(stopped.set)
    trying.start(0.05)
    assert stopped.wait(10.0)
    assert trying.is_undone and log.in_force == {}
    assert log.answer(7).outcome == "undone" and "not back within" in log.answer(7).text
    trying.end()


def test_a_process_that_hangs_is_replaced(log: order_log.OrderLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_END_S", 0.05)
    again = threading.Event()
    trial.Trial(log, again=again.set).start(0.05)
    assert again.wait(10.0)


def test_what_proved_good_is_left_alone(log: order_log.OrderLog) -> None:
    stopped = threading.Event()
    trying = trial.Trial(log, again=stopped.set)
    trying.stops_by(stopped.set)
    assert log.begin()
    answer = log.keep()
    assert answer is not None and answer.outcome == "done"
    assert not trying.failed("an environment that broke later"), "that has another cause"
    trying._watch(0.0)  # its time is up
    assert not stopped.is_set()
    assert log.in_force == {"seed": "3"} and not trying.is_undone


def test_a_failure_is_what_it_says(log: order_log.OrderLog) -> None:
    trying = trial.Trial(log)
    assert not trying.failed("before it began"), "nothing is tried in this process"
    trying.start(60.0)
    assert trying.failed("TypeError: wings") and log.answer(7).text == "TypeError: wings"
    trying.end()
