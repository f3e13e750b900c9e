"""Thousands of odd answers of an environment, through an actor and a learner: both go on, and each is counted."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, messages, specs
from broker.fleet import identity
from broker.program import logs
from edge_actor import config
from edge_actor.run import build
from learner.experience import ledger
from learner.files import checkpoint, run_directory
from learner.run import local_fleet
from tests import conftest
from tests.system.conftest import QUICK
from tests.system.use import odd_numbers
from tests.system.use.test_continuous import SMALL

pytestmark = [pytest.mark.system, pytest.mark.fault(7), pytest.mark.fault(8)]
ANSWERS = int(os.environ.get("ODD_ANSWERS", "10000"))


class InAThread:
    """An actor of this process, so that its threads can be looked at."""

    def __init__(self, fleet: local_fleet.LocalFleet, env: str, state: Path) -> None:
        self.error: BaseException | None = None
        keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
        settings = config.ActorConfig(env=env, state_dir=str(state), spool_dir=str(state / "spool"), heartbeat_s=0.2)
        self.actor = build.build(settings, keys.enroll("odd", fleet.addresses))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.actor.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.actor.stop()
        self.thread.join(20.0)


@pytest.fixture
def tally() -> Iterator[odd_numbers.Tally]:
    before = odd_numbers.tally
    odd_numbers.tally = odd_numbers.Tally(seed=22, odd_share=0.1)
    yield odd_numbers.tally
    odd_numbers.tally = before


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Yields what people are told, without what is said once and was said already."""
    caplog.set_level(logging.INFO, "edge_actor")
    with caplog.filtering(logs.Once()):
        yield caplog


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
@pytest.mark.parametrize(("world", "flags"), [("Choices", QUICK), ("Levers", SMALL)])
def test_odd_answers_by_the_thousand(
    start_fleet: Callable[..., local_fleet.LocalFleet],
    run_root: Path,
    tally: odd_numbers.Tally,
    world: str,
    flags: tuple[str, ...],
    said: pytest.LogCaptureFixture,
) -> None:
    file = run_root / "odd.py"
    file.write_text(f"from tests.system.use.odd_numbers import {world}\n")
    fleet, run = start_fleet(), run_root / "run"
    odd = InAThread(fleet, f"{file}:{world}", run_root / "odd")
    endless = ["--max-env-steps", "100000000", "--solved-return", "inf", "--evaluate-episodes", "2", "--json"]
    learner = fleet.start_learner([*flags, "--run-dir", str(run), "--checkpoint-period-s", "1", *endless])

    def has_ended() -> bool:
        return odd.error is not None or learner.poll() is not None

    conftest.wait_until(lambda: tally.answers >= ANSWERS or has_ended(), "enough answers", 120.0 + ANSWERS / 100)
    metrics = run / "metrics.jsonl"
    before = conftest.rows_of(metrics)
    conftest.wait_until(
        lambda: has_ended() or (conftest.rows_of(metrics)[-1:] or [{"updates": 0}])[0]["updates"] > _updates(before),
        "it learns on",
        60.0,
    )
    threads = {thread.name for thread in threading.enumerate()}
    learner.send_signal(signal.SIGTERM)
    output, _ = learner.communicate(timeout=240.0)
    odd.stop()
    assert learner.returncode == errors.EXIT_INTERRUPTED, output
    assert odd.error is None, odd.error
    assert not odd.thread.is_alive()
    assert {"heartbeat", "mqtt"} <= threads
    assert tally.answers >= ANSWERS

    loop = odd.actor.loop
    assert loop is not None
    assert loop.environment.failures == sum(tally.failed.values()), "each is counted, and nothing else"
    assert len(tally.failed) > 20 and len(tally.carried) > 15, "of every kind"
    assert loop.status.heartbeat.failures == 0
    assert 0 < len(said.messages) < 200, "it is not said each time"
    assert all(line.isprintable() for line in said.messages)

    saved = checkpoint.load_newest(run / "checkpoints")
    assert saved is not None and saved.parts["algorithm"]["updates"] > 0
    for name, array in saved.parts["algorithm"].items():
        assert np.isfinite(array).all(), name
    refused: dict[str, Any] = json.loads(output)["messages_refused"]
    assert "value" not in refused and "shape" not in refused and "field" not in refused, refused
    limit = 0.0
    for _, body in ledger.bodies(run / run_directory.LEDGER):
        experience = codec.decode(messages.Experience, body)
        limit = max(limit, float(np.abs(experience.observation).max()))
        assert np.isfinite(experience.observation).all() and np.isfinite(experience.reward).all()
    assert limit == specs.MAX_MAGNITUDE, "what is finite and too large is clipped, not lost"


def _updates(rows: list[dict[str, Any]]) -> int:
    return int(rows[-1]["updates"]) if rows else 0
