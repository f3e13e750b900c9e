"""Brokers that share a fleet, and what ten thousand enrolled cost those who let them in.

Three brokers are killed one after the other, under actors that send to a learner which trains: how their actors spread,
how soon they are back, and that nothing is lost.

Most of the ten thousand are bundles on disk alone. Some are connected over TLS and revoked one after the other, while
another actor publishes without pause: how long it waits for an acknowledgement is what a change of the fleet costs.

SCALE_PARTS names some of its parts: shared, ledger, enrolled, standby (`_standby.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.contract import errors, topics
from broker.fleet import identity
from broker.program import children
from broker.serve.mosquitto import process
from learner.experience import ledger
from learner.fleet import enrolment
from tests.benchmarks import _load
from tests.benchmarks.fleet import _standby
from tests.fakes.connections import plain_client

PARTS = os.environ.get("SCALE_PARTS", "shared,ledger,enrolled,standby").split(",")
ENROLLED = int(os.environ.get("ACTORQ_BENCH_ENROLLED", "10000"))
FEW = 10
ACTORS, BROKERS = 300, 3
MESSAGES, BOOTS, LEDGER_ACTORS, HELD = int(os.environ.get("ACTORQ_BENCH_MESSAGES", "5000000")), 100, 1000, 4000
RETURN_S = 5.0
"""What actors wait at another broker, here, before they go back to their own."""
REVOKED = 7
FLEET = "bench"
_OUT_S = 60.0


def run() -> Iterator[dict[str, Any]]:
    """Yields the rows of each part."""
    if process.find() is None:
        raise errors.RuntimeMissing("Mosquitto is not installed", todo="sudo apt install mosquitto")
    for name, rows in (
        ("shared", _shared),
        ("ledger", _resumed),
        ("enrolled", _enrolled),
        ("standby", _standby.rows),
    ):
        if name in PARTS:
            yield from rows()


def _enrolled() -> Iterator[dict[str, Any]]:
    """Rows for start, revocation, acknowledgements, and the learner's look."""
    few, many = _measured(FEW), _measured(ENROLLED)
    for key, what, unit in (
        ("up_s", "actorq-broker up serves after", "s"),
        ("out_ms", "a revoked actor is out after, the slowest", "ms"),
        ("ack_ms", "another actor waits for an acknowledgement meanwhile, the longest", "ms"),
        ("follow_ms", "a revocation holds up the learner's loop, the longest", "ms"),
    ):
        value, reference = max(many[key]), max(few[key])
        yield {
            "benchmark": "scale",
            "case": f"{ENROLLED} enrolled: {what}",
            "value": round(value, 3),
            "unit": unit,
            "reference": round(reference, 3),
            "ratio": round(value / reference, 2),
            "runs": len(many[key]),
            "spread": round(value - min(many[key]), 3),
            "explain": f"median {statistics.median(many[key]):.3f}; reference is {FEW} enrolled; "
            f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores",
        }


def _measured(enrolled: int) -> dict[str, list[float]]:
    """Returns what was measured of a fleet of so many."""
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name:
        fleet = identity.Fleet.open(FLEET, Path(name) / "fleets" / FLEET)
        bundles = [fleet.enroll(f"real-{n}") for n in range(REVOKED + 1)]
        _fill(fleet, bundles[0], enrolled - len(bundles))
        followed = enrolment.Enrolment(fleet)
        followed.read()
        began = time.monotonic()
        with _up(name) as port:
            found: dict[str, list[float]] = {"up_s": [time.monotonic() - began], "out_ms": [], "follow_ms": []}
            speaker, *others = bundles
            with _enter(port, speaker) as client, _Speaker(client, topics.Topics(FLEET)) as speaking:
                for bundle in others:
                    with _enter(port, bundle) as revoked:
                        began = time.monotonic()
                        fleet.revoke(bundle.actor_id)
                        assert revoked.disconnected.wait(_OUT_S), f"{bundle.actor_id} stays connected"
                        found["out_ms"].append(1e3 * (time.monotonic() - began))
                    found["follow_ms"].append(_follow_ms(followed, bundle.actor_id))
            return found | {"ack_ms": speaking.waited_ms}


def _shared() -> Iterator[dict[str, Any]]:
    """Rows for what becomes of a fleet whose brokers are killed one after the other, with a learner that trains."""
    with _load.Site(ACTORS, BROKERS) as site:
        learner = site.learner("--actors", str(ACTORS), "--max-env-steps", "1000000000", "--samples-per-insert", "0.1")
        swarm = site.swarm("--rate", "20", "--fail-over", "--return-s", str(RETURN_S))
        shares = json.loads(site.line(swarm))["shares"]
        back_s, uneven, returned_s = [], [], []
        for one, pid in zip(site.addresses, (site.broker_pid, *site.other_pids), strict=True):
            site.newest_metrics()  # the first one comes when the learner trains
            os.kill(pid, signal.SIGKILL)
            killed_s = time.monotonic()
            moved = json.loads(site.line(swarm))
            back_s.append(moved["at_s"] - killed_s)
            others = [moved["shares"].get(str(other), 0) for other in site.addresses if other != one]
            uneven.append(max(others) / max(1, min(others)) - 1.0)
            while moved["shares"] != shares:
                moved = json.loads(site.line(swarm))
            returned_s.append(moved["at_s"] - killed_s)
        swarm.terminate()
        report = json.loads(site.line(swarm))
        site.stop_learner(learner)
        counts = site.counts(report)
    counts_ = [shares[str(one)] / ACTORS for one in site.addresses]
    lost, twice = report["sent"] - counts["messages"], counts["messages"] - counts["distinct"]
    for what, values, unit, explain in (
        ("its share of the actors, of each broker", counts_, "of all", "33 +- 8 % is wanted"),
        ("after a kill -9 its actors are at the others after, of each", back_s, "s", "from the kill to the last birth"),
        (
            "after a kill -9 one survivor has more than the other by",
            uneven,
            "of it",
            "under 0.25 is wanted",
        ),
        (
            "messages lost, in three kills",
            [lost],
            "messages",
            f"of {report['sent']}; {report['receipted']} receipted, {twice} twice; {report['lost']} connections lost",
        ),
        (
            "after a kill -9 all are at their own broker again after, of each",
            returned_s,
            "s",
            f"it is started again at once, and they wait {RETURN_S:g} to {2 * RETURN_S:g} s here (30 to 60 by default)",
        ),
    ):
        yield {
            "benchmark": "scale",
            "case": f"{ACTORS} TLS actors on {BROKERS} brokers: {what}",
            "value": round(max(values), 3),
            "unit": unit,
            "reference": None,
            "ratio": None,
            "runs": len(values),
            "spread": round(max(values) - min(values), 3),
            "explain": f"{explain}; {[round(value, 3) for value in values]}; load average {os.getloadavg()[0]:.1f}",
        }


def _resumed() -> Iterator[dict[str, Any]]:
    """Rows for a ledger that has taken in five million messages of many boots: its size, and the next start."""
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name:
        path = Path(name) / "ledger.sqlite"
        book, sizes_mb, body = ledger.Ledger.open(path), [], bytes(100)
        for boot in range(1, BOOTS + 1):
            for seq in range(1, MESSAGES // (BOOTS * LEDGER_ACTORS) + 1):
                entries = [
                    ledger.Entry(f"actor-{actor:04}", boot, seq, 10 * seq, 10, 1, len(body), ledger.OK, body)
                    for actor in range(LEDGER_ACTORS)
                ]
                book.begin(entries, book.last_id - HELD)
                book.wait()
            with contextlib.closing(sqlite3.connect(path)) as db:  # what is still in the log counts too
                pages, page = (db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "page_size"))
            sizes_mb.append(pages * page / 1e6)
        book.close()
        resumed_s = []
        for _ in range(5):
            began = time.monotonic()
            again = ledger.resume(path, keep=False, before=(0, 0), about={})
            marks, totals, held = again.marks(), again.totals(), sum(1 for _ in again.newest(1 << 40))
            resumed_s.append(time.monotonic() - began)
            again.close()
        assert totals == (10 * MESSAGES, MESSAGES) and marks["actor-0000", BOOTS].seq > 0 and held >= HELD
        row: dict[str, Any] = {"benchmark": "scale", "reference": None, "ratio": None}
        yield row | {
            "case": f"ledger of {MESSAGES} messages: a session opens it, with its marks and what replay holds, after",
            "value": round(max(resumed_s), 3),
            "unit": "s",
            "runs": len(resumed_s),
            "spread": round(max(resumed_s) - min(resumed_s), 3),
            "explain": f"{LEDGER_ACTORS} actors, {BOOTS} boots of each, {len(marks)} marks, {held} messages held",
        }
        yield row | {
            "case": f"ledger of {MESSAGES} messages: its file after {BOOTS} boots of each of {LEDGER_ACTORS} actors",
            "value": round(sizes_mb[-1], 1),
            "unit": "MB",
            "reference": round(sizes_mb[BOOTS // 5], 1),
            "ratio": round(sizes_mb[-1] / sizes_mb[BOOTS // 5], 3),
            "runs": 1,
            "spread": 0.0,
            "explain": f"reference is after {BOOTS // 5 + 1} boots; largest {max(sizes_mb):.1f}",
        }


def _follow_ms(followed: enrolment.Enrolment, revoked: str) -> float:
    """How long following held up a loop that did so a thousand times a second, at most, until an actor was out."""
    longest, deadline = 0.0, time.monotonic() + _OUT_S
    while revoked in followed.macs:
        assert time.monotonic() < deadline, f"{revoked} is still heard"
        began = time.monotonic()
        followed.follow()
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.001)
    return 1e3 * longest


def _fill(fleet: identity.Fleet, like: identity.Bundle, count: int) -> None:
    """Writes bundles with secrets of their own, and one certificate for all: nobody connects with it."""
    directory = fleet.directory / "actors"
    for n in range(count):
        bundle = dataclasses.replace(
            like, actor_id=f"paper-{n}", mac_key=secrets.token_bytes(32), password=secrets.token_urlsafe(24)
        )
        raw = {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in dataclasses.asdict(bundle).items()
        }
        (directory / f"{bundle.actor_id}.json").write_text(json.dumps(raw))


@contextlib.contextmanager
def _up(home: str) -> Iterator[int]:
    """A broker as users start it; its port."""
    with subprocess.Popen(
        [sys.executable, "-m", "broker", "up", "--tls", "--port", "0", "--fleet", FLEET, "--json"],
        stdout=subprocess.PIPE,
        env=os.environ | {"ACTORQ_HOME": home},
        preexec_fn=children.die_with_parent(),  # noqa: PLW1509  one thread
    ) as up:
        assert up.stdout is not None
        try:
            yield json.loads(up.stdout.readline())["port"]
        finally:
            up.terminate()


def _enter(port: int, bundle: identity.Bundle) -> plain_client.PlainClient:
    client = plain_client.PlainClient(port, bundle.actor_id, bundle.actor_id, bundle.password, bundle.tls())
    assert client.reason == "Success", client.reason
    return client


class _Speaker:
    """Publishes from a thread, one message after the other's acknowledgement, as long as a `with` block runs.

    Attributes:
        waited_ms: For each acknowledgement.
    """

    def __init__(self, client: plain_client.PlainClient, names: topics.Topics) -> None:
        self._client, self._topic = client, names.actor("real-0", "experience")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)
        self.waited_ms: list[float] = []

    def _speak(self) -> None:
        while not self._done.wait(0.005):
            began = time.monotonic()
            self._client.publish(self._topic, b"\0" * 1000)
            self.waited_ms.append(1e3 * (time.monotonic() - began))

    def __enter__(self) -> _Speaker:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
