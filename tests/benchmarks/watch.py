"""The page of `actorq-learner watch` with simulated actors: how late it is, what a scrape takes, and its memory.

The heartbeats are on the clock of this machine, and so is the browser, headless Chromium by WebDriver: a heartbeat has
reached the pixels at the second animation frame after its row was written. Chromium and chromium-driver must be
installed for that (`sudo apt install chromium chromium-driver`).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from broker.contract import errors
from tests.benchmarks import _load
from tests.fakes import webdriver

ACTORS = int(os.environ.get("ACTORQ_BENCH_ACTORS", "200"))
WINDOW_S = 20.0
RUNS = 3
SCRAPES = 20
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
    """Yields rows for lateness, scrapes, and memory."""
    if not webdriver.is_installed():
        raise errors.RuntimeMissing("Chromium is not installed", todo="sudo apt install chromium chromium-driver")
    with _load.Site(ACTORS) as site:
        swarm = site.swarm()
        site.line(swarm)
        watch = site.spawn(
            ["learner", "watch", "--fleet", _load.FLEET, "--broker", site.address, "--port", "0", "--json"]
        )
        url = json.loads(site.line(watch))["url"]
        with webdriver.browser() as page:
            page.open(url)
            page.wait(f"return document.querySelectorAll('#rows tr').length == {ACTORS}", 30.0)
            page.run(_WATCH)
            page.run(_TAKE)
            p95, counts = [], 0
            cpu_before = _load.cpu_s(watch.pid)
            for _ in range(RUNS):
                page.run(_TAKE)
                time.sleep(WINDOW_S)
                late = sorted(page.run(_TAKE))
                counts += len(late)
                p95.append(late[int(0.95 * (len(late) - 1))])
            share = (_load.cpu_s(watch.pid) - cpu_before) / (RUNS * WINDOW_S)
        yield _row("heartbeat to pixel, p95", p95, "ms", 200.0, f"{counts / RUNS / WINDOW_S:.0f} heartbeats/s drawn")
        yield _row("a core that the page's process takes", [100 * share], "%", None, "one page open")
        scrapes = []
        for _ in range(SCRAPES):
            began = time.perf_counter()
            with urllib.request.urlopen(f"{url}metrics") as answer:
                told = answer.read()
            scrapes.append(1e3 * (time.perf_counter() - began))
        yield _row("scrape of /metrics", scrapes, "ms", 50.0, f"{len(told):,} bytes")
        if shutil.which("promtool"):
            checked = subprocess.run(["promtool", "check", "metrics"], check=False, input=told, capture_output=True)
            said = (checked.stdout + checked.stderr).decode().splitlines()
            yield _row(
                "lines that promtool check metrics complains with", [float(len(said))], "lines", None, f"{said[:3]}"
            )
        yield _row("memory of the page's process", [_load.rss_mb(watch.pid)], "MB", None, "resident")


def _row(case: str, values: list[float], unit: str, limit: float | None, explain: str) -> dict[str, Any]:
    value = statistics.median(values)
    return {
        "benchmark": "watch",
        "case": f"{ACTORS} actors: {case}",
        "value": round(value, 2),
        "unit": unit,
        "reference": limit,
        "ratio": round(value / limit, 3) if limit else None,
        "runs": len(values),
        "spread": [round(min(values), 2), round(max(values), 2)],
        "explain": explain,
    }
