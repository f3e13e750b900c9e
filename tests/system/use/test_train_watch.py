"""`actorq-learner train --watch`: a real fleet is on the page that its learner brings along, and so is who drifts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors
from learner.run import local_fleet
from tests import conftest
from tests.fakes.environments import drifting
from tests.system.conftest import QUICK, started

pytestmark = pytest.mark.system


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        return str(answer.read(1 << 20).decode())


def first_event(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}events", timeout=30.0) as events:
        event: dict[str, Any] = json.loads(events.readline().removeprefix(b"data: "))
        return event


def newest_row(run: Path) -> dict[str, Any]:
    rows = conftest.rows_of(run / "metrics.jsonl")
    return rows[-1] if rows else {}


def test_the_page_of_a_learner_shows_who_is_there_and_who_drifts(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet, run, said = start_fleet(), run_root / "run", run_root / "stderr"
    astray = run_root / "astray"
    env = ["--env", f"{drifting.__file__}:Sensor", "--env-kwargs", json.dumps({"when": str(astray)})]
    fleet.start_actor("pi", [*env, "--heartbeat-s", "0.2"])
    command = [sys.executable, "-m", "learner", "train", "--watch", "0", "--fleet", fleet.name]
    command += ["--broker", fleet.address, "--run-dir", str(run), "--solved-return", "1000", *QUICK]
    command += ["--max-env-steps", "1000000000"]  # a fast machine takes the usual ones in seconds
    command += ["--publish-period-updates", "1000000000"]  # returns are held against the first ones of one policy
    home = os.environ | {"ACTORQ_HOME": str(fleet.directory / "home")}
    with said.open("w") as stderr, started(command, env=home, stderr=stderr, stdout=subprocess.DEVNULL) as learner:

        def address() -> str:
            assert learner.poll() is None, said.read_text()
            found = re.search(rf"fleet {fleet.name}: (http://127\.0\.0\.1:\d+/)", said.read_text())
            return found[1] if found else ""

        conftest.wait_until(lambda: bool(address()), "the page's address is said", 60.0)
        url = address()
        wanted = ('actorq_actor_up{actor="pi"} 1.0', "actorq_learner_up 1.0", "actorq_learner_env_steps_total")

        def is_told() -> bool:
            assert learner.poll() is None, said.read_text()
            told = get(f"{url}metrics")
            return all(one in told for one in wanted)

        conftest.wait_until(is_told, f"/metrics has {wanted}", 60.0)
        event = first_event(url)
        assert event["names"] == ["pi"] and event["fleet"]["learner"]["env_id"].endswith(":Sensor")
        assert event["run"] == str(run) and event["curve"][-1]["env_steps"] > 0
        assert "<title>" in get(url)

        def alarms() -> dict[str, str]:
            found: dict[str, str] = first_event(url)["rows"][0]["alarms"]
            return found

        drifts = {"outside", "returns"}
        figures = {"return_fall_z", "observations_outside"}
        conftest.wait_until(lambda: figures <= newest_row(run).keys(), f"there are {figures}", 60.0)
        assert newest_row(run)["actors_drifting"] == 0, "all is well"
        assert not drifts & alarms().keys()
        astray.touch()
        conftest.wait_until(lambda: drifts <= alarms().keys(), "the page has both alarms", 60.0)
        is_counted = "actorq_learner_actors_drifting 1.0"
        conftest.wait_until(lambda: is_counted in get(f"{url}metrics"), f"/metrics has {is_counted}", 60.0)
        assert "feature 1 of its observations is outside" in alarms()["outside"]
        assert "(version 1)" in alarms()["returns"]
        assert newest_row(run)["observations_outside"] > 0.2
        assert "actor pi drifts" in said.read_text()
        learner.send_signal(signal.SIGINT)
        assert learner.wait(120.0) == errors.EXIT_INTERRUPTED, said.read_text()
        with pytest.raises(urllib.error.URLError):
            get(url)
        assert "Traceback" not in said.read_text()
