"""A large fleet on one machine: every actor with a TLS connection of its own, and a learner that trains meanwhile.

What the fleet costs the learner is measured in one process: it trains on the messages of one actor that sends 512
steps at once, and on those of the whole fleet, in turn. In all of them it trains as fast as it can, because the fleet
offers more than it takes, however fast this machine is: that is measured first. A turn with the fleet is compared with
the mean of those before and after it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.benchmarks import _load

ACTORS = 500
SIZES = (60, 120, 240, 480, 960)
PHASE_S, WARM_S = 15.0, 6.0
TURNS = 6
"""Measurements of the fleet; one actor has one more."""
ONE = ("--first", "0", "--count", "1", "--message-steps", "512")
"""The swarm that the fleet is compared with."""
OFFERED = 1.4
"""Times the updates/s of a learner with plenty of experience: it takes most of what comes, and never waits for it."""
BATCH = 128
PLENTY = 1000.0
"""Samples per step that keep a learner busy whatever comes."""
PUBLISH_PERIOD_UPDATES = 2000
"""Updates between policies, as 500 actors are sent them at most: publishing costs the same, whoever receives them."""


def run() -> Iterator[dict[str, Any]]:
    """Yields a row per rate at 500 actors, one of 2000 connections, and a row per size of the fleet."""
    yield from _compared(ACTORS, 50.0)
    yield from _compared(ACTORS, 500.0)
    for size in (*SIZES, 2000):
        yield _cost(size)


def _learner(site: _load.Site, samples_per_insert: float) -> subprocess.Popen[str]:
    arguments = ("--actors", "1", "--samples-per-insert", f"{samples_per_insert:.4g}", "--learning-starts", "10000")
    period = ("--publish-period-updates", str(PUBLISH_PERIOD_UPDATES), "--batch-size", str(BATCH))
    return site.learner(*arguments, *period, "--replay-capacity", "1000000", "--max-env-steps", "1000000000")


def _offered() -> float:
    """Updates/s for which the fleet shall bring experience."""
    with _load.Site(1) as site:
        learner = _learner(site, PLENTY)
        updates, _ = _phase(site, ONE)
        site.stop_learner(learner)
    return OFFERED * updates


def _compared(actors: int, rate: float) -> Iterator[dict[str, Any]]:
    offered = _offered()
    with _load.Site(actors + 1) as site:
        learner = _learner(site, offered * BATCH / (actors * rate))
        alone, crowded, reports, durable_ms = [_phase(site, ONE)[0]], [], [], []
        for _ in range(TURNS):
            updates, report = _phase(site, ("--first", "1", "--rate", str(rate)))
            crowded.append(updates)
            reports.append(report)
            durable_ms.append(site.durable_ms(report))
            alone.append(_phase(site, ONE)[0])
        memory = {**_memory(site, learner), "actors": round(reports[-1]["rss_mb"])}
        site.stop_learner(learner)
    if max(*alone, *crowded) > 0.97 * offered:
        raise RuntimeError(
            f"a learner that made {max(*alone, *crowded):.0f} updates/s lacked experience, for {offered:.0f}: this "
            "machine became faster since that was measured; run it again"
        )
    around = [statistics.mean(pair) for pair in itertools.pairwise(alone)]
    ratios = [value / reference for value, reference in zip(crowded, around, strict=True)]
    receipts = {p: [report["receipt_ms"][p] for report in reports] for p in ("50", "99", "100")}
    p50, p99, p100 = ([round(float(np.percentile(turn, p)), 1) for turn in durable_ms] for p in (50, 99, 100))
    what = f"{actors} actors at {rate:g} steps/s"
    explain = (
        f"sent {sum(r['sent'] for r in reports)}, receipts {sum(r['receipted'] for r in reports)} messages, "
        f"{[round(r['taken_per_s']) for r in reports]} steps/s taken of {actors * rate:.0f} offered, for {offered:.0f} "
        f"updates/s; {[round(u) for u in crowded]} were made, {[round(u) for u in alone]} without them; "
        f"sent to durable p50 {p50}, p99 {p99}, max {p100} ms; sent to receipt p50 {receipts['50']}, "
        f"p99 {receipts['99']}, max {receipts['100']} ms; memory in MB: {memory}; "
        f"at most {reports[-1]['held_max']} messages held by an actor"
    )
    lost = sum(r["sent"] - r["receipted"] for r in reports)
    assert not lost, f"{lost} messages lost"
    yield {
        **_row(f"{what}: updates/s while they send", statistics.median(crowded), "1/s", explain),
        "reference": round(statistics.median(alone), 3),
        "ratio": round(statistics.median(ratios), 3),
        "runs": TURNS,
        "spread": round(max(ratios) - min(ratios), 3),
    }
    yield {
        **_row(f"{what}: sent to durable, p99 (the median turn's)", statistics.median(p99), "ms", explain),
        "runs": TURNS,
        "spread": round(max(p99) - min(p99), 1),
    }


def _cost(actors: int) -> dict[str, Any]:
    """CPU time per second that so many actors at 50 steps/s cost all processes but for training."""
    with _load.Site(actors) as site:
        learner = site.learner(
            *("--actors", str(actors), "--samples-per-insert", "0.001", "--learning-starts", "1000"),
            *("--replay-capacity", "1000000", "--max-env-steps", "1000000000"),
        )
        swarm = site.swarm("--rate", "50", "--warm-s", str(WARM_S))
        site.line(swarm)
        site.newest_metrics()  # the learner has compiled its networks
        time.sleep(WARM_S)
        began_s = time.monotonic()
        before = [_load.cpu_s(pid) for pid in (learner.pid, site.broker_pid, swarm.pid)]
        first = site.newest_metrics()
        time.sleep(PHASE_S)
        last = site.newest_metrics()
        spent = [_load.cpu_s(pid) for pid in (learner.pid, site.broker_pid, swarm.pid)]
        memory = _memory(site, learner)
        swarm.terminate()
        report = json.loads(site.line(swarm))
        site.stop_learner(learner)
        durable_ms = float(np.percentile(site.durable_ms(report, since_s=began_s), 99))
    cores = [(b - a) / PHASE_S for a, b in zip(before, spent, strict=True)]
    receipt_ms, memory["actors"] = report["receipt_ms"]["99"], round(report["rss_mb"])
    return _row(
        f"{actors} connections at 50 steps/s: cores in use",
        sum(cores),
        "cores",
        f"learner {cores[0]:.3f}, broker {cores[1]:.3f}, actors {cores[2]:.3f}; {report['connected']} connected, "
        f"{report['lost']} lost; {_taken_per_s(first, last):.0f} of {50 * actors} steps/s taken; {report['sent']} "
        f"messages sent, {report['receipted']} receipts; p99 sent to durable {durable_ms:.0f}, to receipt "
        f"{receipt_ms:.0f} ms; memory in MB: {memory}",
    )


def _phase(site: _load.Site, swarm_arguments: tuple[str, ...]) -> tuple[float, dict[str, Any]]:
    """Updates/s while this swarm sends, and its report."""
    swarm = site.swarm(*swarm_arguments, "--warm-s", str(WARM_S))
    site.line(swarm)
    site.newest_metrics()
    time.sleep(WARM_S)  # until the first row of metrics that is all this swarm's
    first = site.newest_metrics()
    time.sleep(PHASE_S)
    last = site.newest_metrics()
    swarm.terminate()
    report = json.loads(site.line(swarm))
    report["taken_per_s"] = _taken_per_s(first, last)
    return (last["updates"] - first["updates"]) / (last["wall_s"] - first["wall_s"]), report


def _taken_per_s(first: dict[str, Any], last: dict[str, Any]) -> float:
    return float((last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"]))


def _memory(site: _load.Site, learner: subprocess.Popen[str]) -> dict[str, int]:
    pids = {"learner": learner.pid, "broker": site.broker_pid}
    return {name: round(_load.rss_mb(pid)) for name, pid in pids.items()}


def _row(case: str, value: float, unit: str, explain: str) -> dict[str, Any]:
    return {
        "benchmark": "load",
        "case": case,
        "value": round(value, 3),
        "unit": unit,
        "reference": None,
        "ratio": None,
        "runs": 1,
        "spread": None,
        "explain": f"{explain}; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores",
    }
