"""A learner that is killed, or cut off, under fifty actors while two others stand by for its run.

All are real programs but for the actors, which are simulated: Mosquitto with TLS, `actorq-learner train`, and `train
--standby --resume` twice. Cut off means here: nothing of it passes to the broker any more, and its lock is given up, as
a server of shared storage does to one that it hears nothing of. It lives on meanwhile, and is let back in later.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from broker.contract import address
from learner.files import run_directory
from tests.benchmarks import _load
from tests.system import network

ACTORS = 50
RATE = 20.0
STANDBYS = 2
HOW = {
    "kill": "kill -9 of the learner",
    "cut": "the learner cut off, and back",
    "workers": "kill -9 of a learner with two ingest workers",
}
_LIMIT_S = 120.0
_TAKES_OVER = "this standby takes over, and goes on with the run"
_LEARNER = [
    *("--checkpoint-period-s", "2", "--no-energy", "--evaluate-episodes", "0", "--max-env-steps", "1000000000"),
    *("--solved-return", "inf"),
]


class Succession(NamedTuple):
    """What became of a run whose learner was lost.

    Attributes:
        committed_s: From the loss to the first message in the ledger after it.
        trained_s: From the loss to the first policy that its successor published.
        sent, lost, twice: Messages.
        successors: How many took over.
        ended: The exit code of the one before, if it was let back in.
    """

    committed_s: float
    trained_s: float
    sent: int
    lost: int
    twice: int
    successors: int
    ended: int | None


def rows() -> Iterator[dict[str, Any]]:
    """Yields what a kill comes to, and what being cut off does."""
    for how, what in HOW.items():
        found = _succeeded(how)
        explain = (
            f"the first message was committed after {found.committed_s:.1f} s; {found.successors} of {STANDBYS} "
            "standbys took over" + (f", the one before ended with {found.ended}" if found.ended is not None else "")
        )
        for case, value, unit, said in (
            ("the successor publishes after", found.trained_s, "s", f"15 s at most is wanted; {explain}"),
            ("messages lost", found.lost, "messages", f"of {found.sent}, {found.twice} twice"),
        ):
            yield {
                "benchmark": "scale",
                "case": f"{what} of {ACTORS} TLS actors, {STANDBYS} stand by: {case}",
                "value": round(value, 2),
                "unit": unit,
                "reference": None,
                "ratio": None,
                "runs": 1,
                "spread": None,
                "explain": f"{said}; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores",
            }


def _succeeded(how: str) -> Succession:
    with _load.Site(ACTORS) as site, network.Network() as net:
        run = site.directory / "run"
        relay = net.relay(site.addresses[0].port)
        workers = ["--ingest-workers", "2"] if how == "workers" else []
        live = _learner(site, relay.port, ["--run-dir", str(run), "--actors", str(ACTORS), *_LEARNER, *workers])
        swarm = site.swarm("--rate", str(RATE))
        site.line(swarm)
        _wait(lambda: list(run.glob("checkpoints/*.npz")), "the learner has saved", live)
        _wait(lambda: _epochs(run), "it has published", live)
        (epoch,) = _epochs(run)
        ours = site.addresses[0].port
        standbys = [_learner(site, ours, ["--resume", str(run), "--standby"]) for _ in range(STANDBYS)]
        _wait(lambda: _said(site, "standing by for the run") == STANDBYS, "all stand by", live, *standbys)

        lost_s = time.monotonic()
        if how == "cut":
            relay.block()
            (run / ".lock").unlink()
        else:
            live.kill()
            live.wait()
        _wait(lambda: _said(site, _TAKES_OVER), "one takes over", *standbys)
        messages = _messages(run)
        _wait(lambda: _messages(run) > messages, "a message is committed", *standbys)
        committed_s = time.monotonic() - lost_s
        _wait(lambda: epoch + 1 in _epochs(run), "it publishes", *standbys)
        trained_s = time.monotonic() - lost_s
        ended = None
        if how == "cut":
            relay.mend()
            ended = live.wait(_LIMIT_S)
        messages = _messages(run)
        _wait(lambda: _messages(run) > messages + ACTORS, "it goes on", *standbys)
        swarm.terminate()
        report = json.loads(site.line(swarm))
        counts = site.counts(report)
        return Succession(
            committed_s,
            trained_s,
            report["sent"],
            report["sent"] - counts["distinct"],
            counts["messages"] - counts["distinct"],
            _said(site, _TAKES_OVER),
            ended,
        )


def _learner(site: _load.Site, port: int, arguments: list[str]) -> subprocess.Popen[str]:
    where = str(address.Address("127.0.0.1", port, True))
    return site.spawn(["learner", "train", "--fleet", _load.FLEET, "--broker", where, "--json", *arguments])


def _wait(condition: Callable[[], object], what: str, *needed: subprocess.Popen[str]) -> None:
    """Waits for what sends no event, as long as all that are needed for it live."""
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline or any(one.poll() is not None for one in needed):
            raise RuntimeError(f"it did not come to this: {what}")
        time.sleep(0.02)


def _said(site: _load.Site, words: str) -> int:
    """How often learners wrote some words."""
    return sum(file.read_text().count(words) for file in site.directory.glob("learner-*.log"))


def _epochs(run: Path) -> set[int]:
    """Those in which policies were published."""
    found = set()
    for file in run.glob("policies/*.json"):
        with contextlib.suppress(OSError):  # only the newest stay
            found.add(int(json.loads(file.read_text())["epoch"]))
    return found


def _messages(run: Path) -> int:
    """Messages in all ledgers of the run."""
    count = 0
    for path in run_directory.ledgers(run):
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as book:
            count += book.execute("SELECT count(*) FROM messages").fetchone()[0]
    return count
