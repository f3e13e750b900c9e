"""The page of `actorq-learner watch` with 200 simulated actors and two real ones.

How late it is, without a learner beside it and with one, when it shows that a plug was pulled, what a scrape takes, its
memory, and what it costs a learner.

The heartbeats are on the clock of this machine, and so is the browser, headless Chromium by WebDriver: a heartbeat has
reached the pixels at the second animation frame after its row was written. Chromium and chromium-driver must be
installed for that (`sudo apt install chromium chromium-driver`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import errors, messages
from learner.operate.watch import fleet_view, history, server
from tests.benchmarks import _load, _windows
from tests.fakes import simulated_actor, webdriver
from tests.fakes.environments import toys

ACTORS = int(os.environ.get("ACTORQ_BENCH_ACTORS", "200"))
REAL = 2
WINDOW_S = 20.0
RUNS = int(os.environ.get("WATCH_RUNS", "3"))
"""Windows; 0: the page's cost alone."""
SCRAPES = 20
SILENT_S = 11.0
COST_S = float(os.environ.get("WATCH_COST_S", "150"))
TURN_S = 0.25
STEADY_S = 15.0
HOUR_S = 3600
_WATCH = """
window.late = [];
new MutationObserver((changes) => {
  const created = changes.map((one) => Number(one.target.dataset.createdS));
  requestAnimationFrame(() => requestAnimationFrame(() => {
    for (const at of created) window.late.push(Date.now() - 1000 * at);
  }));
}).observe(document.getElementById("rows"), {attributes: true, attributeFilter: ["data-created-s"], subtree: true});
"""
_TAKE = "const late = window.late; window.late = []; return late;"


def run() -> Iterator[dict[str, Any]]:
    """Yields rows for lateness, a pulled plug, scrapes, memory, and updates of a learner beside it."""
    if not webdriver.is_installed():
        raise errors.RuntimeMissing("Chromium is not installed", todo="sudo apt install chromium chromium-driver")
    if RUNS:
        yield _hour()
    with _load.Site(ACTORS + REAL) as site:
        swarm = site.swarm("--count", str(ACTORS), "--rate", "20")
        site.line(swarm)
        names = [f"actor-{ACTORS + index:04}" for index in range(REAL)]
        real = {name: site.actor(name, "--env", f"{toys.__file__}:Arm", "--rate-hz", "50") for name in names}
        watch = site.spawn(
            ["learner", "watch", "--fleet", _load.FLEET, "--broker", site.address, "--port", "0", "--json"]
        )
        url = json.loads(site.line(watch))["url"]
        if RUNS:
            yield from _shown(url, watch.pid, real)
            yield from _scraped(url)
            yield _row("memory of the page's process", [_load.rss_mb(watch.pid)], "MB", None, "resident")
        if COST_S:
            learner, passes = _learner(site)
            yield _cost(site, watch, url, passes)
            if RUNS:
                with webdriver.browser() as page:
                    yield from _late(page, url, watch.pid, f"beside a learner, all on {os.cpu_count()} cores: ")
            site.stop_learner(learner)


def _late(page: webdriver.Browser, url: str, pid: int, where: str = "") -> Iterator[dict[str, Any]]:
    """Yields rows of how late a browser shows heartbeats."""
    page.open(url)
    page.wait(f"return document.querySelectorAll('#rows tr:not(.away)').length == {ACTORS + REAL}", 60.0)
    page.run(_WATCH)
    p95, counts = [], 0
    cpu_before = _load.cpu_s(pid)
    for _ in range(RUNS):
        page.run(_TAKE)
        time.sleep(WINDOW_S)
        late = sorted(page.run(_TAKE))
        counts += len(late)
        p95.append(late[int(0.95 * (len(late) - 1))])
    share = (_load.cpu_s(pid) - cpu_before) / (RUNS * WINDOW_S)
    yield _row(
        f"{where}heartbeat to pixel, p95", p95, "ms", 200.0, f"{counts / RUNS / WINDOW_S:.0f} heartbeats/s drawn"
    )
    yield _row(f"{where}a core that the page's process takes", [100 * share], "%", None, "one page open")


def _shown(url: str, pid: int, real: dict[str, subprocess.Popen[str]]) -> Iterator[dict[str, Any]]:
    """Yields rows of what a browser shows, and when."""
    with webdriver.browser() as page:
        yield from _late(page, url, pid)
        took = []
        for name, actor in real.items():
            is_silent = (
                "return [...document.querySelectorAll('#rows tr')].some((row) => "
                f"row.children[0].textContent == '{name}' && row.children[1].textContent.includes('silent'))"
            )
            assert not page.run(is_silent), f"{name} is silent before its plug is pulled"
            began = time.monotonic()
            actor.send_signal(signal.SIGSTOP)  # its sockets stay as they were, as with a board without power
            page.wait(is_silent, 60.0)
            took.append(time.monotonic() - began)
            actor.send_signal(signal.SIGCONT)
        yield _row("from a pulled plug of a real one until the page says so", took, "s", SILENT_S, "process stopped")


def _scraped(url: str) -> Iterator[dict[str, Any]]:
    """Yields rows of what a scrape takes, and of what Prometheus' own tool says of it."""
    took = []
    for _ in range(SCRAPES):
        began = time.perf_counter()
        with urllib.request.urlopen(f"{url}metrics") as answer:
            told = answer.read()
        took.append(1e3 * (time.perf_counter() - began))
    yield _row("scrape of /metrics, over HTTP", took, "ms", 50.0, f"{len(told):,} bytes")
    if shutil.which("promtool"):
        checked = subprocess.run(["promtool", "check", "metrics"], check=False, input=told, capture_output=True)
        said = (checked.stdout + checked.stderr).decode().splitlines()
        yield _row("lines that promtool check metrics complains with", [float(len(said))], "lines", None, f"{said[:3]}")


def _learner(site: _load.Site) -> tuple[subprocess.Popen[str], Path]:
    """Returns a learner at work, and the file in which it notes its updates."""
    passes = site.directory / "passes.txt"
    # 32 samples of each step: the fleet offers more than it can use, and still acts; with many more it would be held
    learner = site.spawn(
        ["tests.benchmarks._noted", str(passes), "-", "train", "--fleet", _load.FLEET, "--broker", site.address]
        + ["--json", "--no-energy", "--evaluate-episodes", "0", "--run-dir", str(site.directory / "run")]
        + ["--actors", "1", "--samples-per-insert", "32", "--batch-size", "128", "--learning-starts", "1000"]
        + ["--max-env-steps", "1000000000", "--publish-period-updates", "1000", "--checkpoint-period-s", "3600"]
    )
    while site.newest_metrics()["policy_version"] < 3:
        time.sleep(0.1)
    return learner, passes


def _cost(site: _load.Site, watch: subprocess.Popen[str], url: str, passes: Path) -> dict[str, Any]:
    """Compares a learner's updates with those in turns in which the page's process is stopped."""
    reading = threading.Thread(target=_read, args=(f"{url}events",), daemon=True)
    reading.start()  # an owner's browser is on a machine of its own

    def share(seconds: float) -> float:
        cpu_before = _load.cpu_s(watch.pid)
        time.sleep(seconds)
        return (_load.cpu_s(watch.pid) - cpu_before) / seconds

    time.sleep(STEADY_S)  # in which the fleet comes to speak as often as the learner wants
    turns: list[tuple[float, bool]] = []
    shares: list[float] = []
    ends = time.monotonic() + COST_S
    while (now := time.monotonic()) < ends:
        is_on = len(turns) % 4 in (1, 2)
        watch.send_signal(signal.SIGCONT if is_on else signal.SIGSTOP)
        turns.append((now, is_on))
        told = share(TURN_S)
        if is_on:
            shares.append(told)
    watch.send_signal(signal.SIGCONT)
    time.sleep(TURN_S)
    steady = share(STEADY_S)
    found = _windows.compare(_windows.read(passes), np.array(turns, float), TURN_S)
    on = statistics.mean(shares)
    return {
        **_row(
            "updates/s of a learner beside the page, and while its process is stopped", [0.0], "updates/s", None, ""
        ),
        "value": round(found.rate, 1),
        "reference": round(found.reference, 1),
        "ratio": round(found.value, 4),
        "runs": found.windows,
        "spread": round(found.error, 4),
        "explain": f"MLP 256x2, batch 128; turns of {TURN_S:g} s, the spread is the ratio's standard error; one page "
        f"open, read and not drawn; what the process missed it takes in when it goes on, with {100 * on:.1f} % of a "
        f"core of {os.cpu_count()}, and {100 * steady:.1f} % where it is never stopped: for that share the ratio is "
        f"{1 - (1 - found.value) * steady / on:.4f} ({found.error * steady / on:.4f})",
    }


def _read(url: str) -> None:
    """Reads a page's events until they end, as if it were far away: in few calls, and interrupting nobody."""
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))
    where = urllib.parse.urlsplit(url)
    with contextlib.suppress(OSError), socket.create_connection((where.hostname or "", where.port or 0)) as page:
        page.sendall(f"GET {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
        while page.recv(1 << 20):
            pass


def _hour() -> dict[str, Any]:
    """What memory grows by over an hour of heartbeats whose clock is set forward, once an hour is behind it."""
    now_s = 1.8e9
    view = fleet_view.FleetView(lambda: now_s)
    birth = messages.Birth("Arm-v0", simulated_actor.SPEC, 1, "", "3.11", "litert", "XNNPACK", 50.0, release="0.1.0")
    changes = server._Changes(view, lambda: None, "bench", None)
    beats = 0
    resident: list[float] = []
    for period_s, hours in ((history.PERIOD_S, 1), (1.0, 1)):
        for _ in range(int(hours * HOUR_S / period_s)):
            now_s += period_s
            beats += 1
            for index in range(ACTORS + REAL):
                vitals = messages.Vitals(steps=50 * beats, created_s=now_s, policy_version=beats, power_w=4.5)
                state = messages.ActorState(True, "s", 1, beats, birth, vitals)
                view.hear_actor(f"actor-{index:04}", state, retained=False)
            view.tick()
            changes.drain(now_s)
        resident.append(_load.rss_mb(os.getpid()))
    explain = f"{HOUR_S * (ACTORS + REAL):,} heartbeats in {HOUR_S} s that are not waited for, one page; before it an "
    explain += f"hour with a heartbeat in {history.PERIOD_S:g} s, after which {resident[0]:.1f} MB are resident"
    return _row("an hour more of heartbeats: memory grows by", [resident[1] - resident[0]], "MB", None, explain)


def _row(case: str, values: list[float], unit: str, limit: float | None, explain: str) -> dict[str, Any]:
    value = statistics.median(values)
    return {
        "benchmark": "watch",
        "case": f"{ACTORS + REAL} actors: {case}",
        "value": round(value, 2),
        "unit": unit,
        "reference": limit,
        "ratio": round(value / limit, 3) if limit else None,
        "runs": len(values),
        "spread": [round(min(values), 2), round(max(values), 2)],
        "explain": explain,
    }
