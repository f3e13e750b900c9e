"""One enrolled client that floods, over TLS: what it leaves of a fleet's experience and of the learner's updates.

Four simulated actors send at a steady rate and a learner trains; a hostile client, with keys of its own, comes and
goes. Each phase with it is compared with the mean of those before and after. HOSTILE_PHASE_S and HOSTILE_TURNS make it
longer: with 120 and 5 each kind floods for ten minutes, over which memory and ledger are looked at. Whoever floods is
on the same machine, and takes a core of it; with HOSTILE_NICE=19 it leaves the cores to the others first, as one on
another machine would.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from learner import ledger
from tests.benchmarks import _hostile, _load

HONEST = 4
RATE = 2000.0
"""Steps/s of each."""
BATCH, SAMPLES_PER_INSERT = 128, 4.0
PHASE_S = float(os.environ.get("HOSTILE_PHASE_S", "12"))
TURNS = int(os.environ.get("HOSTILE_TURNS", "2"))
SETTLE_S = 3.0
KINDS = tuple(filter(None, os.environ.get("HOSTILE_KINDS", ",".join(_hostile.KINDS)).split(",")))


def run() -> Iterator[dict[str, Any]]:
    """Yields two rows for each kind of flood: honest steps/s, and updates/s."""
    for kind in KINDS:
        yield from _flooded(kind)


def _flooded(kind: str) -> Iterator[dict[str, Any]]:
    with _load.Site(HONEST + 1) as site:
        learner = site.learner(
            *("--actors", str(HONEST), "--samples-per-insert", str(SAMPLES_PER_INSERT), "--batch-size", str(BATCH)),
            *("--learning-starts", "5000", "--replay-capacity", "200000", "--max-env-steps", "1000000000"),
        )
        swarm = site.swarm("--count", str(HONEST), "--rate", str(RATE))
        site.line(swarm)
        while not site.newest_metrics()["policy_version"]:
            time.sleep(0.1)
        pids = {"learner": learner.pid, "broker": site.broker_pid}
        alone, flooded = [_phase(site)], []
        memory = {name: [round(_load.rss_mb(pid))] for name, pid in pids.items()}
        rows, sent, client_cores = [_refused_rows(site)], 0, list[float]()
        for _ in range(TURNS):
            client = _start(site, kind)
            flooded.append(_phase(site))
            for name, pid in pids.items():
                memory[name].append(round(_load.rss_mb(pid)))
            rows.append(_refused_rows(site))
            client_cores.append(round(_load.cpu_s(client.pid) / (PHASE_S + SETTLE_S), 2))
            client.terminate()
            sent += json.loads(site.line(client))["sent"]
            client.wait(10.0)
            alone.append(_phase(site))
        refused = site.newest_metrics()["messages_refused"]
        swarm.terminate()
        report = json.loads(site.line(swarm))
        site.stop_learner(learner)
    explain = (
        f"{HONEST} actors at {RATE:g} steps/s over TLS; {TURNS} floods of {PHASE_S:g} s, {sent} packets by a client on "
        f"{client_cores} cores; honest steps/s, updates/s: with {_rounded(flooded)}, without {_rounded(alone)}; "
        f"{refused:.0f} messages refused or left unread; memory in MB, before and after each flood: {memory}; rows of "
        f"refused messages in the ledger: {rows}; of {report['sent']} honest messages "
        f"{report['sent'] - report['receipted']} have no receipt"
    )
    for index, what in enumerate(("honest steps/s", "updates/s")):
        around = [statistics.mean((a[index], b[index])) for a, b in itertools.pairwise(alone)]
        ratios = [phase[index] / reference for phase, reference in zip(flooded, around, strict=True)]
        yield {
            "benchmark": "hostile",
            "case": f"{what} beside one client that floods: {kind}",
            "value": round(statistics.median(phase[index] for phase in flooded), 1),
            "unit": "1/s",
            "reference": round(statistics.median(phase[index] for phase in alone), 1),
            "ratio": round(statistics.median(ratios), 3),
            "runs": TURNS,
            "spread": round(max(ratios) - min(ratios), 3),
            "explain": f"{explain}; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores",
        }


def _start(site: _load.Site, kind: str) -> subprocess.Popen[str]:
    bundle = sorted((site.directory / "home" / "fleets" / _load.FLEET / "actors").glob("*.json"))[HONEST]
    client = site.spawn(["tests.benchmarks._hostile", "--bundle", str(bundle), "--kind", kind])
    site.line(client)
    return client


def _phase(site: _load.Site) -> tuple[float, float]:
    """Honest steps/s that became durable, and updates/s."""
    time.sleep(SETTLE_S)
    first, steps, began_s = site.newest_metrics(), _honest_steps(site), time.monotonic()
    time.sleep(PHASE_S)
    last, more, ended_s = site.newest_metrics(), _honest_steps(site), time.monotonic()
    elapsed_s = max(1e-9, last["wall_s"] - first["wall_s"])
    return (more - steps) / (ended_s - began_s), (last["updates"] - first["updates"]) / elapsed_s


def _rounded(phases: list[tuple[float, float]]) -> list[tuple[int, int]]:
    return [(round(steps), round(updates)) for steps, updates in phases]


def _ask(site: _load.Site, query: str, *values: object) -> int:
    path: Path = site.directory / "run" / ledger.NAME
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        (found,) = db.execute(query, values).fetchone()
    return int(found)


def _honest_steps(site: _load.Site) -> int:
    query = "SELECT coalesce(sum(steps), 0) FROM messages WHERE verdict = ? AND actor < ?"
    return _ask(site, query, ledger.OK, f"actor-{HONEST:04}")


def _refused_rows(site: _load.Site) -> int:
    return _ask(site, "SELECT count(*) FROM messages WHERE verdict != ?", ledger.OK)
