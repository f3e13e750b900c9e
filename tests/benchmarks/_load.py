"""A TLS broker, a learner and a swarm as processes of their own, for benchmarks of what they carry."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from broker.contract import address, errors
from broker.fleet import identity
from broker.serve import listener
from learner.files import run_directory
from tests.benchmarks import _broker

FLEET = "bench"
FIRST_ROW_S = 120.0
ROOT = Path(__file__).parents[2]


class Site:
    """Brokers with TLS on this machine, and as many enrolled actors as wanted; a context that ends all it started.

    Raises:
        RuntimeMissing: Mosquitto is not installed.
    """

    def __init__(self, actors: int, brokers: int = 1) -> None:
        _broker.require_mosquitto()
        self._temporary = tempfile.TemporaryDirectory(prefix="actorq-bench-")
        self.directory = Path(self._temporary.name)
        self._environment = os.environ | {"ACTORQ_HOME": str(self.directory / "home"), "PYTHONPATH": str(ROOT)}
        self.children: list[subprocess.Popen[str]] = []
        self._run, self._commits = self.directory / "run", self.directory / "commits.log"
        self._fleet_directory = self.directory / "home" / "fleets" / FLEET
        fleet = identity.Fleet.open(FLEET, self._fleet_directory)
        port = _free_ports(brokers)
        self.addresses = [address.Address("127.0.0.1", port + index, True) for index in range(brokers)]
        self.address = ",".join(map(str, self.addresses))
        fleet.name_brokers(self.addresses)
        for index in range(actors):
            fleet.enroll(f"actor-{index:04}")
        broker = ["broker", "up", "--fleet", FLEET, "--tls", "--port", str(port), "--kind", "mosquitto", "--json"]
        self.broker = self.spawn([*broker, "--brokers", str(brokers)])
        self.broker_pid, *self.other_pids = (int(json.loads(self.line(self.broker))["pid"]) for _ in range(brokers))

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in reversed(self.children):
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(10.0)
            if child.poll() is None:
                child.kill()
                child.wait()
        self._temporary.cleanup()

    def spawn(self, module: Sequence[str]) -> subprocess.Popen[str]:
        """Starts `python -m MODULE ...`; stdout is a pipe, stderr a file beside the keys."""
        with open(self.directory / f"{module[0]}-{len(self.children)}.log", "w") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                cwd=self.directory,
            )
        self.children.append(child)
        return child

    def swarm(self, *arguments: str) -> subprocess.Popen[str]:
        """Simulated actors; see tests/fakes/swarm.py."""
        return self.spawn(["tests.fakes.swarm", "--bundles", str(self._fleet_directory / "actors"), *arguments])

    def actor(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """A real one."""
        bundle = str(self._fleet_directory / "actors" / f"{name}.json")
        state = str(self.directory / "state" / name)
        return self.spawn(["edge_actor", "run", "--bundle", bundle, "--state-dir", state, *arguments])

    @property
    def mosquitto_pid(self) -> int:
        """Returns the id of the process that serves now: one that was exceeded is started anew."""
        return int(psutil.Process(self.broker.pid).children()[0].pid)

    def learner(self, *arguments: str) -> subprocess.Popen[str]:
        """`actorq-learner train --json` on this fleet, which notes when its commits return."""
        module = ["tests.benchmarks._committed", str(self._commits), "train", "--fleet", FLEET]
        command = [*module, "--broker", self.address, "--json", "--no-energy", "--evaluate-episodes", "0"]
        return self.spawn([*command, "--run-dir", str(self._run), *arguments])

    def durable_ms(self, report: dict[str, Any], *, since_s: float = 0.0) -> NDArray[np.float64]:
        """From sending a message until the commit that has it returned, of all that count, by a swarm's report.

        Args:
            report: Of the swarm.
            since_s: Monotonic time from which on they count.
        """
        ended: dict[int, float] = {}
        for line in self._commits.read_text().rpartition("\n")[0].splitlines():
            start, stop, at_s = line.split()
            ended.update(dict.fromkeys(range(int(start), int(stop)), float(at_s)))
        with contextlib.closing(
            sqlite3.connect(f"{(self._run / run_directory.LEDGER).as_uri()}?mode=ro", uri=True)
        ) as db:
            rows = db.execute("SELECT actor, seq, id FROM messages WHERE boot = ?", (report["boot"],))
            ids = {(actor, seq): id_ for actor, seq, id_ in rows}
        return (
            np.array([ended[ids[actor, seq]] - at_s for actor, seq, at_s in report["sent_s"] if at_s >= since_s]) * 1e3
        )

    def counts(self, report: dict[str, Any]) -> dict[str, int]:
        """Messages of a swarm that the ledgers took, by its report, and how many different ones they are."""
        query = "SELECT count(*), count(DISTINCT actor || ' ' || seq) FROM messages WHERE verdict = 'ok' AND boot = ?"
        messages = distinct = 0
        for path in run_directory.ledgers(self._run):
            with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
                own = db.execute(query, (report["boot"],)).fetchone()
            messages, distinct = messages + own[0], distinct + own[1]
        return {"messages": messages, "distinct": distinct}

    def line(self, child: subprocess.Popen[str]) -> str:
        """The next line that a child prints; says what it wrote on stderr if it ended instead."""
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            child.wait()
            logs = "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in sorted(self.directory.glob("*.log")))
            raise RuntimeError(f"a process ended with {child.returncode} without a word\n{logs}")
        return line

    def warm(self) -> None:
        """Lets a swarm send a little, and waits until the learner has compiled its networks and published."""
        swarm = self.swarm("--messages", "100")
        for _ in ("connected", "done"):
            self.line(swarm)
        deadline = time.monotonic() + FIRST_ROW_S
        while not self.newest_metrics()["policy_version"]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the learner published nothing within {FIRST_ROW_S:g} s")
            time.sleep(0.1)

    def newest_metrics(self) -> dict[str, Any]:
        """The last row that the learner wrote; waits for the first one, which comes when the networks are compiled."""
        deadline = time.monotonic() + FIRST_ROW_S
        file = self._run / "metrics.jsonl"
        while time.monotonic() < deadline:
            rows = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
            if rows:
                row: dict[str, Any] = json.loads(rows[-1])
                return row
            time.sleep(0.1)
        raise RuntimeError(f"the learner wrote no metrics within {FIRST_ROW_S:g} s")

    @staticmethod
    def stop_learner(learner: subprocess.Popen[str]) -> dict[str, Any]:
        """Ends the learner as Ctrl-C does; its summary."""
        learner.terminate()
        output, _ = learner.communicate(timeout=60.0)
        summary: dict[str, Any] = json.loads(output)
        return summary


def _free_ports(count: int) -> int:
    """The first of so many ports that follow each other, all of them free."""
    while True:
        first = listener.reserve("127.0.0.1", 0)
        with contextlib.suppress(errors.ConfigError):
            for port in range(first + 1, first + count):
                listener.reserve("127.0.0.1", port)
            return first


def rss_mb(pid: int) -> float:
    """Resident memory of a process now."""
    return float(psutil.Process(pid).memory_info().rss) / (1 << 20)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
