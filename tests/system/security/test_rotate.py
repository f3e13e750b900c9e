"""New keys for a fleet at work: the old ones end, nothing that was accepted is lost, and training goes on."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from broker.contract import errors
from learner.files import run_directory
from learner.run import local_fleet
from tests import conftest as brokers
from tests.system import conftest
from tests.system.conftest import QUICK, STICK

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_a_fleet_at_work_gets_new_keys(start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path) -> None:
    fleet, run = start_fleet(), run_root / "run"
    home = fleet.directory / "home"
    actor = ["--env", f"{STICK}:Stick", "--heartbeat-s", "0.5"]
    common = ["--json", "--keep-experience", "--evaluate-episodes", "0"]
    fleet.start_actor("pi", actor)
    fleet.start_learner([*QUICK, *common, "--run-dir", str(run), "--max-env-steps", "100000000"])
    brokers.wait_until(lambda: list(run.glob("policies/*.tflite")), "training began", 60.0)

    done = conftest.command("broker", "rotate", "--fleet", fleet.name, "-o", str(home), home=home)
    assert done.returncode == errors.EXIT_OK, done.stderr
    assert fleet.children["learner"].wait(120.0) == errors.IdentityError.exit_code
    assert fleet.children["pi"].poll() is None, "an actor acts on; it is out, and holds what it has"
    fleet.children["pi"].kill()
    fleet.children["pi"].wait()
    before = rows(run)

    fleet.start_actor("pi", actor)  # its bundle is the new one now
    resumed = fleet.start_learner(["--resume", str(run), "--max-env-steps", str(before[1] + 20_000), "--json"])
    output, _ = resumed.communicate(timeout=240.0)
    assert resumed.returncode == errors.EXIT_OK
    assert fleet.children["pi"].poll() is None, fleet.log_tail("pi")
    summary = json.loads(output)
    assert summary["env_steps"] >= before[1] + 20_000
    assert summary["steps_missed"] == 0, "what was accepted before is not lost, though its MAC key is gone"
    after = rows(run)
    assert after[0] > before[0] and after[2] == 2, "two boots in one ledger"


def rows(run: Path) -> tuple[int, int, int]:
    """Messages, steps and boots in the ledger; no message is there twice."""
    with closing(sqlite3.connect(run / run_directory.LEDGER)) as book:
        copies = book.execute("SELECT count(*) FROM messages GROUP BY actor, boot, seq HAVING count(*) > 1").fetchall()
        assert not copies
        found: tuple[int, int, int] = book.execute(
            "SELECT count(*), sum(steps), count(DISTINCT boot) FROM messages"
        ).fetchone()
    return found


def test_rotating_what_does_not_exist(tmp_path: Path) -> None:
    done: subprocess.CompletedProcess[str] = conftest.command("broker", "rotate", "--fleet", "none", home=tmp_path)
    assert done.returncode == errors.IdentityError.exit_code
    assert "actorq-broker init" in done.stderr and not list(tmp_path.iterdir())
