"""A learner and an actor at work, as real processes, and an attacker beside them."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from broker.contract import errors, signing, topics
from broker.fleet import identity
from learner.experience import dead_letters
from learner.files import run_directory
from learner.run import local_fleet
from tests import conftest as brokers
from tests.fakes.connections import plain_client
from tests.system.conftest import QUICK


class Training:
    """A learner and its actor `pi`; the attacker reads and writes all, and holds the keys of `rogue`, enrolled too."""

    def __init__(self, fleet: local_fleet.LocalFleet, run: Path) -> None:
        self.fleet, self.run = fleet, run
        self.names = topics.Topics(fleet.name)
        keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
        self.learner_key = keys.sealer.public_key
        self.rogue = signing.ActorMac(keys.enroll("rogue").mac_key)
        fleet.start_actor("pi", ["--env", "CartPole-v1", "--heartbeat-s", "0.3"])
        self.pi = signing.ActorMac(keys.bundle("pi").mac_key)
        limits = ["--max-env-steps", "100000000", "--solved-return", "inf", "--json"]
        fleet.start_learner([*QUICK, "--run-dir", str(run), "--message-steps", "256", *limits])
        self.attacker = plain_client.PlainClient(int(fleet.broker["port"]), "attacker")
        self.goes_on()

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest row."""
        rows = brokers.rows_of(self.run / "metrics.jsonl")
        return rows[-1] if rows else {"updates": 0, "messages_refused": 0, "env_steps": 0}

    def goes_on(self) -> None:
        """It learns, and from new experience."""
        before = self.metrics
        assert self.fleet.children["learner"].poll() is None
        brokers.wait_until(
            lambda: all(self.metrics[key] > before[key] for key in ("updates", "env_steps")), "it learns on", 60.0
        )

    def capture(self, leaf: str, count: int) -> list[bytes]:
        """Genuine payloads of `pi`."""
        topic = self.names.actor("pi", leaf)
        listener = plain_client.PlainClient(int(self.fleet.broker["port"]), "listener")
        with listener:
            listener.subscribe(topic)
            return [listener.next()[1] for _ in range(count)]

    def await_refused(self, count: int) -> None:
        brokers.wait_until(lambda: self.metrics["messages_refused"] >= count, f"{count} refused", 60.0)

    def end(self) -> Counter[str]:
        """Stops the learner; what it refused."""
        learner = self.fleet.children["learner"]
        learner.send_signal(signal.SIGTERM)
        output, _ = learner.communicate(timeout=240.0)
        assert learner.returncode == errors.EXIT_INTERRUPTED
        assert self.fleet.children["pi"].poll() is None, self.fleet.log_tail("pi")
        return Counter(json.loads(output)["messages_refused"])

    def book(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.run / run_directory.LEDGER)) as book:
            return book.execute(query).fetchall()

    @property
    def letters(self) -> list[dict[str, Any]]:
        return brokers.rows_of(self.run / dead_letters.NAME)
