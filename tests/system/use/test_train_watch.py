"""`actorq-learner train --watch`: a real fleet trains CartPole, and is on the page that its learner brings along."""

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

import pytest

from broker.contract import errors
from learner.run import local_fleet
from tests import conftest
from tests.system.conftest import QUICK, started

pytestmark = pytest.mark.system


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        return str(answer.read(1 << 20).decode())


def test_the_page_of_a_learner(start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path) -> None:
    fleet, run, said = start_fleet(), run_root / "run", run_root / "stderr"
    fleet.start_actor("pi", ["--env", "CartPole-v1", "--heartbeat-s", "0.2"])
    command = [sys.executable, "-m", "learner", "train", "--watch", "0", "--fleet", fleet.name]
    command += ["--broker", fleet.address, "--run-dir", str(run), "--solved-return", "1000", *QUICK]
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
        with urllib.request.urlopen(f"{url}events", timeout=30.0) as events:
            event = json.loads(events.readline().removeprefix(b"data: "))
        assert event["names"] == ["pi"] and event["fleet"]["learner"]["env_id"] == "CartPole-v1"
        assert event["run"] == str(run) and event["curve"][-1]["env_steps"] > 0
        assert "<title>" in get(url)
        learner.send_signal(signal.SIGINT)
        assert learner.wait(60.0) == errors.EXIT_INTERRUPTED, said.read_text()
        with pytest.raises(urllib.error.URLError):
            get(url)
        assert "Traceback" not in said.read_text()
