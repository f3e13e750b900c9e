"""Ingest workers on Ray beside a learner that does all in its own process: what they take in, and its updates.

What they take in is recorded (`_recorded.py`). Updates are of the same fleet in turn: Mosquitto with TLS, a real
learner that samples from two shards of replay or from its own, two real actors of CartPole at a control rate.
Everything shares this machine.

WORKERS_PARTS names some of its parts: recorded, kill, updates, thresholds (`_thresholds.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from broker.contract import errors, topics
from tests.benchmarks import _load, _windows
from tests.benchmarks.learning import _recorded, _thresholds

TURNS = int(os.environ.get("WORKERS_TURNS", "24"))
TURN_S, WARM_S = 4.0, 1.0
PARTS = os.environ.get("WORKERS_PARTS", "recorded,kill,updates,thresholds").split(",")
LEARNER = [
    *("--learning-starts", "400", "--samples-per-insert", "100000", "--hidden", "256,256", "--batch-size", "64"),
    *("--max-env-steps", "100000000", "--solved-return", "inf"),
]


def run() -> Iterator[dict[str, Any]]:
    """Yields the rows of each part."""
    if importlib.util.find_spec("ray") is None:
        raise errors.RuntimeMissing("Ray is not installed", todo="pip install 'actorq-fleet[ray]'")
    if "recorded" in PARTS:
        yield from _recorded.rows()
    if "kill" in PARTS:
        yield from _recorded.kill_rows()
    if "updates" in PARTS:
        yield _updates()
    if "thresholds" in PARTS:
        yield from _thresholds.rows()


def _updates() -> dict[str, Any]:
    """Compares both while they live side by side, one of them halted: two runs, one after the other, differ by more."""
    ratios, rates = [], []
    with _Turns(2) as sharded, _Turns(0) as local:
        for turn in range(TURNS):
            pair = {one: one.updates_per_s() for one in ((sharded, local), (local, sharded))[turn % 2]}
            ratios.append(pair[sharded] / pair[local])
            rates.append((pair[sharded], pair[local]))
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "benchmark": "workers",
        "case": "updates/s with two shards of replay on Ray, DQN, MLP 256x2, batch 64",
        "value": round(statistics.median(sharded for sharded, _ in rates), 1),
        "unit": "updates/s",
        "reference": round(statistics.median(local for _, local in rates), 1),
        "ratio": round(statistics.median(ratios), 3),
        "runs": TURNS,
        "spread": round(quartiles[2] - quartiles[0], 3),
        "explain": f"reference: the same without --ingest-workers; both live, in turns of {TURN_S:g} s in which all of "
        f"the other is halted; the spread is the middle half's of the ratios; load average {os.getloadavg()[0]:.1f}",
    }


class _Turns(contextlib.ExitStack):
    """A fleet that is halted but for its turns: broker, learner with so many workers, and two actors."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._workers = workers

    def __enter__(self) -> _Turns:
        super().__enter__()
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)  # else what has begun of it would go on
            self._begin()
            failing.pop_all()
        return self

    def _begin(self) -> None:
        site = self.enter_context(_load.Site(8))
        names = [f"actor-{number:04}" for number in range(8)]
        chosen = [next(name for name in names if topics.shard_of(name, 2) == shard) for shard in range(2)]
        for name in chosen:
            site.actor(name, "--env", "CartPole-v1", "--rate-hz", "100")
        self._passes = site.directory / "passes.txt"
        command = ["tests.benchmarks._noted", str(self._passes), "-", "train", "--fleet", _load.FLEET, "--json"]
        command += ["--broker", site.address, "--no-energy", "--evaluate-episodes", "0", "--actors", "2"]
        command += ["--run-dir", str(site.directory / "run"), *LEARNER, "--ingest-workers", str(self._workers)]
        learner = site.spawn(command)
        while site.newest_metrics()["updates"] < 200:
            time.sleep(0.1)
        trees = [psutil.Process(child.pid) for child in site.children]
        self._processes = [*trees, *(below for one in trees for below in one.children(recursive=True))]
        self._signal(signal.SIGSTOP)
        self.callback(site.stop_learner, learner)
        self.callback(self._signal, signal.SIGCONT)  # before it

    def updates_per_s(self) -> float:
        """Returns what a turn makes, once it has found its pace again."""
        self._signal(signal.SIGCONT)
        time.sleep(WARM_S)
        began = time.monotonic()
        time.sleep(TURN_S)
        ended = time.monotonic()
        self._signal(signal.SIGSTOP)
        made = np.interp([began, ended], *_windows.read(self._passes).T)
        return float(made[1] - made[0]) / (ended - began)

    def _signal(self, number: signal.Signals) -> None:
        for one in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # one that Ray had at its start
                one.send_signal(number)
