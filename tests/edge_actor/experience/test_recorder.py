"""The recorder: when a message is due."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from broker.contract import specs
from edge_actor.experience import journal, recorder, spool, trajectory
from tests.fakes import fake_learner

SPEC = specs.EnvSpec(specs.ObservationSpec((4,)), specs.ActionSpec("discrete", n=2))
ASSIGNED = fake_learner.assignment(1, message_period_s=1000.0)


@pytest.fixture
def made(tmp_path: Path) -> recorder.Recorder:
    files = journal.Journal.open(tmp_path, 1 << 20)
    return recorder.Recorder(trajectory.Trajectory(SPEC, 1, 256), spool.Spool.open(1, "f" * 16, bytes, files))


def step(of: recorder.Recorder) -> int:
    """Takes a step; how many messages there are then."""
    of.trajectory.terminated[of.trajectory.used] = of.trajectory.truncated[of.trajectory.used] = False
    of.trajectory.advance(1)
    of.flush_if_due()
    return len(of._spool)


@pytest.mark.parametrize(("drawn", "messages"), [(0.999999, 1), (0.5, 0)])
def test_the_first_message_is_due_somewhere_in_the_period(
    made: recorder.Recorder, monkeypatch: pytest.MonkeyPatch, drawn: float, messages: int
) -> None:
    """Else a fleet that is told all at once would send all at once, period after period."""
    monkeypatch.setattr(random, "random", lambda: drawn)
    made.assign(ASSIGNED)
    made._flushed_at -= 0.01
    assert step(made) == messages
    monkeypatch.setattr(random, "random", lambda: 0.999999)
    made.assign(dataclasses.replace(ASSIGNED, steps_granted=5))
    assert step(made) == messages, "only the first assignment of a session does that"
    made.assign(dataclasses.replace(ASSIGNED, session="another"))
    made._flushed_at -= 0.01
    assert step(made) == messages + 1
