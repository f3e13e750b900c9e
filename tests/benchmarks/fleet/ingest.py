"""Measures how much experience a learner takes in: decoded, checked and committed to disk before its receipt.

Mosquitto with TLS, a real `actorq-learner train`, and simulated actors (tests/fakes/swarm.py) that act as fast as
receipts come: segments of 256 steps with observations of 24 floats, 27.6 KB a message. They begin when the learner has
compiled its networks, and the first tenth of the messages does not count. Everything shares this machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import _load

ACTORS = 4
STEPS = 256
MESSAGES = 40_000
PACED_STEPS_PER_S = 300_000
IDLE = ("--samples-per-insert", "0.001", "--learning-starts", "1000")
TRAINING = [("--samples-per-insert", samples, "--learning-starts", "10000") for samples in ("0.05", "0.1")]
"""Updates and intake share two cores, and are coupled by this ratio."""
ALWAYS = ("--replay-capacity", "1000000", "--max-env-steps", "1000000000", "--message-steps", str(STEPS))
REVERB_PYTHON = os.environ.get("ACTORQ_BENCH_REVERB", "")


def run() -> Iterator[dict[str, Any]]:
    """Yields one row per case; Reverb's between two of ours, so that both meet the same machine."""
    first = _sustained(IDLE)
    reverb = _reverb()
    second = _sustained(IDLE)
    rates = [first["rate"], second["rate"]]
    yield _row("sustained, learner idle", statistics.mean(rates), max(rates) - min(rates), reverb, second)
    for arguments in TRAINING:
        training = _sustained(arguments)
        case = f"sustained, learner training, each sampled {arguments[1]} times"
        yield _row(case, training["rate"], None, reverb, training)
    yield _paced()


def _sustained(learner: tuple[str, ...]) -> dict[str, Any]:
    with _load.Site(ACTORS) as site:
        process = site.learner("--actors", str(ACTORS), *ALWAYS, *learner)
        site.warm()
        swarm = site.swarm("--messages", str(MESSAGES // ACTORS), "--message-steps", str(STEPS))
        site.line(swarm)
        before = _cpu(site, process)
        report = json.loads(site.line(swarm))
        after = _cpu(site, process)
        wall_s = report["last_receipt_s"] - report["first_sent_s"]
        rss_mb = _load.rss_mb(process.pid)
        summary = site.stop_learner(process)
        assert report["receipted"] == report["sent"] == MESSAGES, report
        cpu_us = {name: (after[name] - before[name]) / MESSAGES * 1e6 for name in after}
        cpu_us["actors"] = report["cpu_s"] / MESSAGES * 1e6
        return {
            "rate": (report["steps"] - report["warm_steps"]) / (report["last_receipt_s"] - report["warm_s"]),
            "wall_s": wall_s,
            "cpu_us": cpu_us,
            "receipt_ms": report["receipt_ms"],
            "bytes": report["bytes_sent"] / MESSAGES,
            "updates": summary["updates"],
            "rss_mb": rss_mb,
        }


def _cpu(site: _load.Site, learner: subprocess.Popen[str]) -> dict[str, float]:
    return {"learner": _load.cpu_s(learner.pid), "broker": _load.cpu_s(site.broker_pid)}


def _row(
    case: str, rate: float, spread: float | None, reverb: dict[str, Any] | None, detail: dict[str, Any]
) -> dict[str, Any]:
    cpu = ", ".join(f"{name} {us:.0f}" for name, us in detail["cpu_us"].items())
    return {
        "benchmark": "ingest",
        "case": case,
        "value": round(rate / 1e6, 3),
        "unit": "M transitions/s",
        "reference": round(reverb["rate"] / 1e6, 3) if reverb else None,
        "ratio": round(rate / reverb["rate"], 2) if reverb else None,
        "runs": 1 if spread is None else 2,
        "spread": None if spread is None else round(spread / 1e6, 3),
        "explain": f"{MESSAGES} messages of {STEPS} steps, {detail['bytes'] / 1e3:.1f} kB, from {ACTORS} actors over "
        f"TLS in {detail['wall_s']:.0f} s; CPU per message in us: {cpu}, together "
        f"{sum(detail['cpu_us'].values()) / 1e6 * MESSAGES / detail['wall_s']:.2f} of {os.cpu_count()} cores; "
        f"{detail['updates'] / detail['wall_s']:.0f} updates/s; learner's memory {detail['rss_mb']:.0f} MB; "
        f"sent to receipt p99 {detail['receipt_ms']['99']:.0f} ms; "
        f"reference: {reverb['explain'] if reverb else 'Reverb, not installed (ACTORQ_BENCH_REVERB=python)'}",
    }


def _paced() -> dict[str, Any]:
    with _load.Site(ACTORS) as site:
        process = site.learner("--actors", str(ACTORS), *ALWAYS, *IDLE)
        site.warm()
        swarm = site.swarm("--messages", "8000", "--rate", str(PACED_STEPS_PER_S / ACTORS))
        site.line(swarm)
        report = json.loads(site.line(swarm))
        rate = (report["steps"] - report["warm_steps"]) / (report["last_receipt_s"] - report["warm_s"])
        site.stop_learner(process)
        durable_ms = site.durable_ms(report)
    return {
        "benchmark": "ingest",
        "case": f"sent to durable at a paced {PACED_STEPS_PER_S}/s, p99",
        "value": round(float(np.percentile(durable_ms, 99)), 2),
        "unit": "ms",
        "reference": None,
        "ratio": None,
        "runs": len(durable_ms),
        "spread": None,
        "explain": f"p50 {np.percentile(durable_ms, 50):.1f}, max {durable_ms.max():.1f} ms; sent to receipt: "
        f"p50 {report['receipt_ms']['50']:.1f}, p99 {report['receipt_ms']['99']:.1f}, max "
        f"{report['receipt_ms']['100']:.1f} ms; {rate:.0f} steps/s came",
    }


def _reverb() -> dict[str, Any] | None:
    """Reverb 0.14 with its TrajectoryWriter and chunks as long as our messages, in a Python that has it."""
    if not REVERB_PYTHON:
        return None
    script = Path(__file__).with_name("_reverb.py")
    done = subprocess.run([REVERB_PYTHON, str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"reverb: {done.stderr[-1500:]}", file=sys.stderr)
        return None
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
