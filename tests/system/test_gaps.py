"""A robot cannot wait: its spool drops the oldest while the learner stands still, and every step of that is counted."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from broker import codec, errors, identity, messages, signing, topics
from learner import local_fleet
from tests import conftest
from tests.broker import plain_client
from tests.system import books
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.system, pytest.mark.slow]
SPOOL_BYTES = 2_000_000


def steps_dropped(fleet: local_fleet.LocalFleet) -> int:
    """As the actor's newest heartbeat says."""
    keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
    topic = topics.Topics(fleet.name).actor_state("robot")
    with plain_client.PlainClient(int(fleet.broker["port"]), "reader") as client:
        client.subscribe(topic)
        body = signing.ActorMac(keys.bundle("robot").mac_key).open(topic, client.next()[1])
    return codec.decode(messages.ActorState, body).vitals.steps_dropped


def test_what_is_lost_was_dropped_and_counted_on_both_sides(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, run = run_root / "log", run_root / "run"
    log.mkdir()
    monkeypatch.setenv("COUNTING_LOG", str(log))
    fleet = start_fleet("mosquitto")
    kept = books.Books(log, run)
    fleet.start_actor(
        "robot", ["--env", f"{books.ENV_FILE}:Wide", "--rate-hz", "300", "--spool-bytes", str(SPOOL_BYTES)]
    )
    learner = fleet.start_learner(
        [*QUICK, "--run-dir", str(run), "--keep-experience", "--evaluate-episodes", "0", "--message-steps", "20"]
        + ["--samples-per-insert", "0.01", "--max-env-steps", "10000000", "--json"]
    )
    kept.await_rows(20)
    learner.send_signal(signal.SIGSTOP)
    conftest.wait_until(lambda: steps_dropped(fleet) > 2500, "the spool is full", 60.0)
    learner.send_signal(signal.SIGCONT)
    after = kept.accepted(0)
    conftest.wait_until(lambda: max(after)[1] in kept.numbers(), "what it holds has arrived", 60.0)
    dropped = steps_dropped(fleet)
    fleet.children["robot"].send_signal(signal.SIGTERM)
    assert fleet.children["robot"].wait(10.0) == errors.EXIT_OK
    learner.send_signal(signal.SIGTERM)
    output, _ = learner.communicate(timeout=60.0)

    found = kept.numbers()
    assert max(found.values()) == 1
    last = max(found)
    lost = {number for _, number in kept.accepted(0) if number <= last} - found.keys()
    assert json.loads(output)["steps_missed"] == len(lost)
    assert 0 < len(lost) <= dropped, "what the broker still had may have arrived all the same"
