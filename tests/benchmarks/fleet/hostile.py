"""One enrolled client that floods, over TLS: what it leaves of a fleet's experience and of the learner's updates.

Four real actors hold a control rate and a learner trains; a hostile client, with keys of its own, comes and goes. Each
phase with it is compared with the mean of those before and after. Then one client of each kind floods at the same time
for HOSTILE_MEMORY_S, over which memory and ledger are looked at. Whoever floods is on the same machine, and takes a
core of it; with HOSTILE_NICE=19 it leaves the cores to the others first, as one on another machine would.
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

import psutil

from learner.experience import ledger
from learner.files import run_directory
from tests.benchmarks import _load
from tests.benchmarks.fleet import _hostile

HONEST = 4
RATE_HZ, ENVS = 250, 8
"""The control rate and the environments of each honest actor: 2000 steps/s."""
BATCH, SAMPLES_PER_INSERT = 128, 4.0
PHASE_S = float(os.environ.get("HOSTILE_PHASE_S", "12"))
TURNS = int(os.environ.get("HOSTILE_TURNS", "2"))
MEMORY_S = float(os.environ.get("HOSTILE_MEMORY_S", "60"))
LOOKS = 10
SETTLE_S = 3.0
KINDS = tuple(filter(None, os.environ.get("HOSTILE_KINDS", ",".join(_hostile.KINDS)).split(",")))


def run() -> Iterator[dict[str, Any]]:
    """Yields two rows for each kind of flood, honest steps/s and updates/s; then memory beside all of them."""
    for kind in KINDS:
        yield from _flooded(kind)
    if MEMORY_S:
        yield from _together()


@contextlib.contextmanager
def _training(hostile: int) -> Iterator[tuple[_load.Site, subprocess.Popen[str]]]:
    """A fleet at work, in which so many others are enrolled."""
    with _load.Site(HONEST + hostile) as site:
        learner = site.learner(
            *("--actors", str(HONEST), "--samples-per-insert", str(SAMPLES_PER_INSERT), "--batch-size", str(BATCH)),
            *("--learning-starts", "5000", "--replay-capacity", "200000", "--max-env-steps", "1000000000"),
            *("--env", "CartPole-v1", "--solved-return", "inf"),
        )
        for index in range(HONEST):
            pace = ("--rate-hz", str(RATE_HZ), "--envs", str(ENVS))
            site.actor(f"actor-{index:04}", "--env", "CartPole-v1", *pace)
        while not site.newest_metrics()["policy_version"]:
            time.sleep(0.1)
        yield site, learner
        site.stop_learner(learner)


def _flooded(kind: str) -> Iterator[dict[str, Any]]:
    with _training(1) as (site, learner):
        alone, flooded = [_phase(site)], []
        memory = [_memory(site, learner)]
        rows, sent, client_cores = [_refused_rows(site)], 0, list[float]()
        for _ in range(TURNS):
            client = _start(site, kind)
            flooded.append(_phase(site))
            memory.append(_memory(site, learner))
            rows.append(_refused_rows(site))
            client_cores.append(round(_load.cpu_s(client.pid) / (PHASE_S + SETTLE_S), 2))
            sent += _end(site, client)
            alone.append(_phase(site))
        refused = site.newest_metrics()["messages_refused"]
    explain = (
        f"{HONEST} actors at {RATE_HZ * ENVS} steps/s over TLS; {TURNS} floods of {PHASE_S:g} s, {sent} packets by a "
        f"client on {client_cores} cores; honest steps/s, updates/s: with {_rounded(flooded)}, without "
        f"{_rounded(alone)}; {refused:.0f} messages refused or left unread; memory of learner and broker in MB, "
        f"before and after each flood: {memory}; rows of refused messages in the ledger: {rows}"
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


def _together() -> Iterator[dict[str, Any]]:
    kinds = tuple(_hostile.KINDS)
    with _training(len(kinds)) as (site, learner):
        before = _memory(site, learner)
        clients = [_start(site, kind, index) for index, kind in enumerate(kinds)]
        looks = []
        for _ in range(LOOKS):
            time.sleep(MEMORY_S / LOOKS)
            looks.append((*_memory(site, learner), _refused_rows(site)))
        sent = {kind: _end(site, client) for kind, client in zip(kinds, clients, strict=True)}
    for index, name in enumerate(("learner", "broker")):
        seen = [look[index] for look in looks]
        yield {
            "benchmark": "hostile",
            "case": f"memory of the {name}, largest of {LOOKS} looks while one client of each kind floods",
            "value": max(seen),
            "unit": "MB",
            "reference": before[index],
            "ratio": round(max(seen) / before[index], 2),
            "runs": 1,
            "spread": max(seen) - min(seen),
            "explain": f"{MEMORY_S:g} s; learner, broker (MB) and rows of refused messages at each look: {looks}; "
            f"packets sent: {sent}",
        }


def _memory(site: _load.Site, learner: subprocess.Popen[str]) -> tuple[int, int]:
    """Returns the memory of learner and broker, MB; 0 of a broker that is being started anew."""
    broker = 0.0
    with contextlib.suppress(IndexError, psutil.NoSuchProcess):
        broker = _load.rss_mb(site.mosquitto_pid)
    return round(_load.rss_mb(learner.pid)), round(broker)


def _start(site: _load.Site, kind: str, index: int = 0) -> subprocess.Popen[str]:
    bundle = sorted((site.directory / "home" / "fleets" / _load.FLEET / "actors").glob("*.json"))[HONEST + index]
    client = site.spawn(["tests.benchmarks.fleet._hostile", "--bundle", str(bundle), "--kind", kind])
    site.line(client)
    return client


def _end(site: _load.Site, client: subprocess.Popen[str]) -> int:
    """Stops it; packets that it sent."""
    client.terminate()
    sent = int(json.loads(site.line(client))["sent"])
    client.wait(10.0)
    return sent


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
    path: Path = site.directory / "run" / run_directory.LEDGER
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        (found,) = db.execute(query, values).fetchone()
    return int(found)


def _honest_steps(site: _load.Site) -> int:
    query = "SELECT coalesce(sum(steps), 0) FROM messages WHERE verdict = ? AND actor < ?"
    return _ask(site, query, ledger.OK, f"actor-{HONEST:04}")


def _refused_rows(site: _load.Site) -> int:
    return _ask(site, "SELECT count(*) FROM messages WHERE verdict != ?", ledger.OK)
