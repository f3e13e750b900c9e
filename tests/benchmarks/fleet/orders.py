"""From giving an order until every actor of a large fleet has answered, while a learner takes in what they send.

Mosquitto with TLS, `actorq-learner train`, and 200 simulated actors in one process (tests/fakes/swarm.py), which take
orders by the code of the real ones: verified and written down before they are done. They all are paused and resumed in
turn by the classes of `actorq-learner fleet`; at the end the ledger must hold every step sent. 200 boards have as many
disks, and this machine has one: so what they write is in memory, and what a synced write takes is told beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import messages
from broker.fleet import identity
from edge_actor.orders import order_log
from learner.experience import ledger
from learner.files import run_directory
from learner.operate.orders import courier, order_book
from tests.benchmarks import _load
from tests.benchmarks.speed import swap

ACTORS = 200
RATE = 50.0
RUNS = 10
LIMIT_S = 30.0
_BETWEEN_S = 1.0


def run() -> Iterator[dict[str, Any]]:
    """Yields a row for `pause`, and one for `resume`."""
    with (
        _load.Site(ACTORS) as site,
        swap.home(site.directory),
        tempfile.TemporaryDirectory(prefix="actorq-orders-", dir="/dev/shm") as memory,
    ):
        synced_ms = _synced_ms(site.directory)
        learner = site.learner("--actors", "1", "--max-env-steps", "1000000000", "--samples-per-insert", "1")
        swarm = site.swarm("--rate", str(RATE), "--state", memory)
        site.line(swarm)
        site.newest_metrics()
        took: dict[str, list[list[float]]] = {"pause": [], "resume": []}
        fleet = identity.Fleet.open(_load.FLEET, create=False)
        actors = fleet.actors()
        with (
            contextlib.closing(order_book.OrderBook.open(fleet.directory)) as book,
            contextlib.closing(courier.Courier(fleet, book, (site.address,), actors, fleet.tls())) as carrier,
        ):
            carrier.start()
            for _ in range(RUNS):
                for kind, times in took.items():
                    times.append(_given(kind, actors, book, carrier))
                    for _answer in carrier.drain(_BETWEEN_S):
                        pass
        swarm.terminate()
        report = json.loads(site.line(swarm))
        site.stop_learner(learner)
        with contextlib.closing(sqlite3.connect(site.directory / "run" / run_directory.LEDGER)) as rows:
            (kept,) = rows.execute("SELECT SUM(steps) FROM messages WHERE verdict = ?", (ledger.OK,)).fetchone()
    lost = report["steps"] - kept
    assert report["sent"] == report["receipted"] and not lost, f"{lost} steps were lost: {report}"
    for kind, times in took.items():
        yield _row(kind, times, report, synced_ms)


def _synced_ms(directory: Path) -> float:
    """The median time that an actor takes to write an order down on this disk."""
    log, times = order_log.OrderLog.open(directory / "one", bytes(32)), []
    for number in range(1, 51):
        began = time.perf_counter()
        log.note(messages.Instruction(number, "pause", 0.0), "done", paused=True)
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def _given(kind: str, actors: list[str], book: order_book.OrderBook, carrier: courier.Courier) -> list[float]:
    """Seconds until each actor had answered that it is done."""
    began = time.monotonic()
    numbers = book.add(actors, kind, {}, time.time(), 60.0)
    carrier.deliver(actors)
    answered: dict[str, float] = {}
    while len(answered) < len(actors) and time.monotonic() - began < LIMIT_S:
        answers = []
        for name, answer in carrier.drain(0.1):
            if answer.number == numbers[name]:
                assert answer.outcome == "done", answer
                answered.setdefault(name, time.monotonic() - began)
                answers.append((name, answer))
        book.note(answers)
    assert len(answered) == len(actors), f"{len(actors) - len(answered)} actors did not answer"
    carrier.deliver(actors)
    return list(answered.values())


def _row(kind: str, times: list[list[float]], report: dict[str, Any], synced_ms: float) -> dict[str, Any]:
    p99 = [float(np.percentile(one, 99)) for one in times]
    p50 = [float(np.percentile(one, 50)) for one in times]
    return {
        "benchmark": "orders",
        "case": f"{ACTORS} actors answer {kind}: p99",
        "value": round(float(np.median(p99)), 3),
        "unit": "s",
        "reference": None,
        "ratio": None,
        "runs": len(p99),
        "spread": round(max(p99) - min(p99), 3),
        "explain": f"p50 {np.median(p50):.3f}, slowest {max(map(max, times)):.3f} s, from writing the orders down; "
        f"without the synced write, of {synced_ms:.1f} ms on this disk; {report['steps']:,} steps sent at {RATE:g} a "
        f"second each, all of them in the ledger; TLS; {os.cpu_count()} cores",
    }
