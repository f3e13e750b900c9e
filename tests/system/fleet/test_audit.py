"""Real actors that do not do what they say are named and held back; an honest one is not; a person decides."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors
from learner.experience import ledger
from learner.run import local_fleet
from tests import conftest as brokers
from tests.fakes.environments import liars
from tests.system.conftest import command

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_each_liar_is_named_and_held_back_until_a_person_decides(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet, run = start_fleet(), run_root / "run"
    home = fleet.directory / "home"
    fleet.start_actor("honest", ["--env", "Pendulum-v1"])
    for name, (liar, _) in liars.LIARS.items():
        fleet.start_actor(name, ["--env", f"{liars.__file__}:{liar}"])
    fleet.start_learner(
        [
            "--algorithm",
            "ddpg",
            "--hidden",
            "32",
            "--critic-hidden",
            "32",
            "--no-energy",
            "--run-dir",
            str(run),
            "--json",
        ]
        + ["--actors", "5", "--learning-starts", "1000", "--batch-size", "32", "--evaluate-episodes", "0"]
        + ["--max-env-steps", "100000000", "--publish-period-updates", "500", "--samples-per-insert", "1"]
    )

    def held() -> dict[str, Any]:
        file = run / "held.json"
        return json.loads(file.read_text()) if file.exists() else {}

    brokers.wait_until(lambda: held().keys() >= liars.LIARS.keys(), "all are named", timeout_s=400.0)
    assert held().keys() == liars.LIARS.keys()
    for name, (_, why) in liars.LIARS.items():
        assert why in held()[name]["why"], held()[name]

    done = command("learner", "held", str(run), "--release", "nobody", home=home)
    assert done.returncode == errors.ConfigError.exit_code
    assert "nobody is not held back" in done.stderr
    for name in ("flipped", "older"):
        fleet.children[name].terminate()
        assert fleet.children[name].wait(120.0) == errors.EXIT_OK
    assert command("learner", "held", str(run), "--release", "flipped", home=home).returncode == errors.EXIT_OK
    assert command("learner", "held", str(run), "--discard", "older", home=home).returncode == errors.EXIT_OK
    brokers.wait_until(lambda: held().keys() == {"kernels", "reports"}, "the learner follows", timeout_s=240.0)
    shown = command("learner", "held", str(run), "--json", home=home)
    assert json.loads(shown.stdout).keys() == {"kernels", "reports"}

    fleet.children["learner"].terminate()
    output, _ = fleet.children["learner"].communicate(timeout=240.0)
    summary = json.loads(output)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["actors_held"] for row in rows) == 4
    assert summary["actors_held"].keys() == {"kernels", "reports"}
    assert summary["actors_named"] == 4
    assert summary["audited_steps"] > 1000
    with sqlite3.connect(run / "ledger.sqlite") as book:
        verdicts = {
            name: dict(book.execute("SELECT verdict, sum(steps) FROM messages WHERE actor = ? GROUP BY 1", (name,)))
            for name in ("honest", *liars.LIARS)
        }
    assert verdicts["honest"].keys() == {ledger.OK}
    assert ledger.OK in verdicts["flipped"], "it was released"
    assert verdicts["flipped"].keys() <= {ledger.OK, ledger.DISCARDED}, "but for what was forgotten meanwhile"
    assert verdicts["older"].keys() <= {ledger.OK, ledger.QUARANTINED, ledger.DISCARDED}
    held_of = [verdicts[name][ledger.HELD] + verdicts[name].get(ledger.RECALLED, 0) for name in ("kernels", "reports")]
    assert sum(held_of) >= summary["steps_held"] > 0, "the ledger has rows of what it has forgotten since"
    counted = sum(found.get(one, 0) for found in verdicts.values() for one in (ledger.OK, "recalled", "quarantined"))
    assert summary["env_steps"] == counted, "what counts is what replay saw"
