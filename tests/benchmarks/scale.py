"""What a fleet of ten thousand enrolled actors costs those who let it in: `actorq-broker up`, and the learner.

Most of them are bundles on disk alone. Some are connected over TLS and revoked one after the other, while another actor
publishes without pause: how long it waits for an acknowledgement is what a change of the fleet costs all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
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
from learner.fleet import enrolment
from tests.fakes import plain_client

ENROLLED = int(os.environ.get("ACTORQ_BENCH_ENROLLED", "10000"))
FEW = 10
REVOKED = 7
FLEET = "bench"
_OUT_S = 60.0


def run() -> Iterator[dict[str, Any]]:
    """Yields a row for start, revocation, acknowledgements, and the learner's look."""
    if process.find() is None:
        raise errors.RuntimeMissing("Mosquitto is not installed", todo="sudo apt install mosquitto")
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
        raw = {**dataclasses.asdict(bundle), "mac_key": bundle.mac_key.hex(), "learner_key": bundle.learner_key.hex()}
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
