"""From the end of an update until every actor of a large fleet holds the new policy and has verified it.

Mosquitto with TLS, the learner's own session and publisher, and 500 simulated actors in one process
(tests/fakes/swarm.py), each with its own connection, which check signature, difference and SHA-256 as edge_actor does.
One clock: it is one machine, so the actors' checks, which 500 boards would do at once, wait for each other here.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from learner import config
from learner.files import records, run_directory
from learner.fleet import gathering, roster, session
from learner.policies import publisher
from tests.benchmarks import _load
from tests.benchmarks.speed import swap

ACTORS = 500
HIDDEN = (256, 256)  # 80 KB in int8
PUBLISHES = 10


def run() -> Iterator[dict[str, Any]]:
    """Yields one row for whole policies and one for deltas."""
    for name, send_differences in (("whole policies", False), ("deltas", True)):
        with _load.Site(ACTORS) as site, swap.home(site.directory):
            yield _row(name, *_published(site, send_differences=send_differences))


def _published(
    site: _load.Site, *, send_differences: bool
) -> tuple[list[list[float]], publisher.Publisher, dict[str, Any]]:
    """Seconds until each actor had verified each policy."""
    swarm = site.swarm("--rate", "1", "--verify-each")
    settings = config.TrainConfig(fleet=_load.FLEET, broker=(site.address,), actors=ACTORS, wait_s=120.0)
    here = session.Session.open(settings)
    try:
        actors = roster.Roster(here.id, here.epoch, "")
        gathering.gather(settings, here, actors, threading.Event())
        site.line(swarm)
        spec = actors.the_spec
        rng = np.random.default_rng(0)
        policy = swap.initial(HIDDEN, spec.observation.shape[0], spec.action.n, rng)
        gate = config.GateConfig(gate_agreement_min=0.0, gate_ties_max=1.0, gate_saturation_max=1.0)
        publishing = publisher.Publisher(
            here,
            here.topics,
            spec,
            "q_values",
            here.epoch,
            0,
            gate,
            run_directory.RunDirectory.open(site.directory / "fanout", resume=False),
            records.Records(),
            send_differences=send_differences,
        )
        publishing.prepare(policy)
        sample = publishing.sample(policy)
        seen = sample.split(rng.standard_normal((sample.total, *spec.observation.shape), np.float32))
        began: dict[int, float] = {}
        for _ in range(PUBLISHES + 1):
            policy = swap.trained(policy, rng)
            at = time.monotonic()
            publishing.publish(policy, *seen).result()
            began[publishing.version] = at
            until = time.monotonic() + 3.0
            while (left := until - time.monotonic()) > 0:
                for _arrival in here.drain(left):
                    pass
                here.beat()
    finally:
        here.close()
    swarm.terminate()
    report = json.loads(site.line(swarm))
    first = min(began)  # always whole
    took = [
        [at - began[int(version)] for at in verified]
        for version, verified in report["verified_s"].items()
        if int(version) in began and int(version) != first
    ]
    missing = PUBLISHES * ACTORS - sum(map(len, took))
    assert not missing, f"{missing} policies did not arrive"
    return took, publishing, report


def _row(name: str, took: list[list[float]], publishing: publisher.Publisher, report: dict[str, Any]) -> dict[str, Any]:
    p99 = [float(np.percentile(times, 99)) for times in took]
    everything = [at for times in took for at in times]
    sent = publishing.summary()
    size = len(publishing.newest.model) if publishing.newest else 0
    return {
        "benchmark": "fanout",
        "case": f"{ACTORS} actors hold a new policy, {name}: p99",
        "value": round(statistics.median(p99), 3),
        "unit": "s",
        "reference": None,
        "ratio": None,
        "runs": len(p99),
        "spread": round(max(p99) - min(p99), 3),
        "explain": f"p50 {statistics.median(everything):.3f}, max {max(everything):.3f} s over {len(took)} policies of "
        f"{size / 1e3:.1f} kB; {(sent['bytes_per_policy'] or 0) / 1e3:.1f} kB sent for each; TLS; actors' process used "
        f"{report['cpu_s']:.1f} s of CPU; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores",
    }
