"""One enrolled actor that floods, where the broker lets each speak for itself alone: the others go on, and learning."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors, signing, topics
from broker.fleet import identity
from learner.files import run_directory
from learner.run import local_fleet
from tests import conftest
from tests.fakes.connections import plain_client
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.system, pytest.mark.mosquitto]


def connected(port: int, bundle: identity.Bundle) -> plain_client.PlainClient:
    """Returns a client that is connected as soon as the broker has heard of it."""
    made: list[plain_client.PlainClient] = []

    def is_let_in() -> bool:
        made.append(plain_client.PlainClient(port, "liar", "liar", bundle.password, bundle.tls()))
        return made[-1].reason == "Success"

    conftest.wait_until(is_let_in, "the broker lets it in", 20.0)
    return made[-1]


@pytest.mark.fault(16)
def test_one_that_floods_is_not_listened_to_and_the_others_are(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet, run = start_fleet("mosquitto", tls=True), run_root / "run"
    fleet.start_actor("pi", ["--env", "CartPole-v1"])
    keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
    topic = topics.Topics(fleet.name).experience("liar")
    budget = ["--max-env-steps", "100000000", "--solved-return", "inf", "--evaluate-episodes", "0", "--json"]
    learner = fleet.start_learner([*QUICK, "--run-dir", str(run), *budget])

    def metrics() -> dict[str, Any]:
        rows = conftest.rows_of(run / "metrics.jsonl")
        return rows[-1] if rows else {"updates": 0, "messages_refused": 0}

    def taken() -> int:
        with closing(sqlite3.connect(run / run_directory.LEDGER)) as book:
            return int(book.execute("SELECT count(*) FROM messages WHERE actor = 'pi'").fetchone()[0])

    conftest.wait_until(lambda: metrics()["updates"], "it learns", 60.0)
    bundle = keys.enroll("liar", fleet.addresses)  # while it learns: it is listened to, and then no longer
    junk = [signing.ActorMac(bundle.mac_key).seal(topic, bytes(500)), bytes(500)]
    port = int(fleet.broker["port"])
    with connected(port, bundle) as liar:
        for index in range(5000):
            liar.publish(topic, junk[index % 2], wait=index % 500 == 499)
        conftest.wait_until(lambda: metrics()["messages_refused"] >= 500, "counted", 30.0)
        refused, before, updates = metrics()["messages_refused"], taken(), metrics()["updates"]
        for index in range(2000):  # it goes on
            liar.publish(topic, junk[index % 2], wait=index % 500 == 499)
        conftest.wait_until(lambda: taken() > before + 20 and metrics()["updates"] > updates, "others go on", 60.0)
    assert metrics()["messages_refused"] < refused + 2000, "the learner does not hear the rest"
    learner.send_signal(signal.SIGTERM)
    output, _ = learner.communicate(timeout=240.0)
    assert learner.returncode == errors.EXIT_INTERRUPTED
    counted = json.loads(output)["messages_refused"]
    assert counted["rate"] >= 500
    looked_into = counted.get("signature", 0) + counted.get("header", 0) + counted.get("size", 0)
    assert looked_into <= 1200, "most of it was never opened"
    assert fleet.children["pi"].poll() is None, fleet.log_tail("pi")
