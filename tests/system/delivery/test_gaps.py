"""A robot cannot wait: its spool drops the oldest while the learner stands still, and every step of that is counted."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.fakes.connections import plain_client
from tests.system import books
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.system, pytest.mark.slow]
SPOOL_BYTES = 2_000_000


def steps_dropped(fleet: local_fleet.LocalFleet) -> int:
    """Returns the steps that it dropped, as the actor's newest heartbeat says."""
    keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
    topic = topics.Topics(fleet.name).actor_state("robot")
    with plain_client.PlainClient(int(fleet.broker["port"]), "reader") as client:
        client.subscribe(topic)
        body = signing.ActorMac(keys.bundle("robot").mac_key).open(topic, client.next()[1])
    return codec.decode(messages.ActorState, body).vitals.steps_dropped


def test_what_is_lost_was_dropped_and_counted_on_both_sides(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    run, life = run_root / "run", ("robot", 0)
    fleet = start_fleet("mosquitto")
    kept = books.Books(run_root / "books", run)
    environment = kept.environment("robot", "Wide")
    fleet.start_actor("robot", [*environment, "--rate-hz", "300", "--spool-bytes", str(SPOOL_BYTES)])
    learner = fleet.start_learner(
        [*QUICK, "--run-dir", str(run), "--keep-experience", "--evaluate-episodes", "0", "--message-steps", "20"]
        + ["--samples-per-insert", "0.01", "--max-env-steps", "10000000", "--json"]
    )
    kept.await_rows(20)
    learner.send_signal(signal.SIGSTOP)
    conftest.wait_until(lambda: steps_dropped(fleet) > 2500, "the spool is full", 60.0)
    learner.send_signal(signal.SIGCONT)
    newest = kept.accepted(life)[life].max()
    conftest.wait_until(lambda: newest in kept.in_ledger()[life], "what it holds has arrived", 60.0)
    dropped = steps_dropped(fleet)
    fleet.children["robot"].send_signal(signal.SIGTERM)
    assert fleet.children["robot"].wait(120.0) == errors.EXIT_OK
    learner.send_signal(signal.SIGTERM)
    output, _ = learner.communicate(timeout=240.0)

    balance = kept.balance()
    assert balance.twice == balance.invented == 0
    found, accepted = kept.in_ledger()[life], kept.accepted(life)[life]
    lost = np.setdiff1d(accepted[accepted <= found.max()], found)
    assert json.loads(output)["steps_missed"] == len(lost)
    assert 0 < len(lost) <= dropped, "what the broker still had may have arrived all the same"
    assert np.isin(lost, kept.dropped(life)[life]).all()
