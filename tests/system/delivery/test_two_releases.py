"""An actor of the schema before ours beside one of ours, and a real learner: it acts, obeys, is updated; 0 lost."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.contract import codec, errors, messages, previous
from learner.run import local_fleet
from tests import conftest
from tests.fakes import previous_release
from tests.system import books
from tests.system.conftest import QUICK, command

pytestmark = [pytest.mark.system, pytest.mark.mosquitto]
FLAGS = [*QUICK, "--keep-experience", "--evaluate-episodes", "0", "--message-steps", "100", "--json"]
FLAGS += ["--max-env-steps", "10000000", "--solved-return", "inf", "--actors", "2"]


def acted_on(kept: books.Books) -> dict[tuple[str, int], int]:
    """The newest policy version that is in the ledger, by actor and schema of the message; refused ones fail."""
    found: dict[tuple[str, int], int] = {}
    for actor, body in kept.ask("SELECT actor, body FROM payloads JOIN messages USING (id)"):
        key = actor, int(codec.metadata(body)["schema"])
        found[key] = max(found.get(key, 0), codec.decode(messages.Experience, body).version)
    return found


def test_an_actor_of_the_schema_before_loses_nothing_before_and_after_its_update(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet, run = start_fleet("mosquitto"), run_root / "run"
    before, kept = previous_release.PreviousRelease(run_root / "before"), books.Books(run_root / "books", run)
    flags = {name: [*kept.environment(name), "--heartbeat-s", "0.2", "--allow", "pause,resume"] for name in ("a", "b")}
    before.start_actor(fleet, "a", flags["a"])
    fleet.start_actor("b", flags["b"])
    learner = fleet.start_learner([*FLAGS, "--run-dir", str(run)])

    def both_act() -> bool:
        found = acted_on(kept)
        return min(found.get(("a", previous.VERSION), 0), found.get(("b", messages.SCHEMA_VERSION), 0)) > 1

    conftest.wait_until(both_act, "actors of both schemas act by the learner's policies", 150.0)

    home, where = fleet.directory / "home", ["--fleet", fleet.name, "--broker", fleet.address]
    done = command("learner", "fleet", "ls", *where, "--json", home=home)
    schemas = {row["actor"]: row["schema"] for row in map(json.loads, done.stdout.splitlines())}
    assert schemas == {"a": previous.VERSION, "b": messages.SCHEMA_VERSION}, done.stderr
    for verb in ("pause", "resume"):  # by the way that an update goes
        done = command("learner", "fleet", verb, "a", *where, "--json", home=home)
        assert done.returncode == errors.EXIT_OK and json.loads(done.stdout)["outcome"] == "done", done.stderr

    def is_holding() -> bool:
        """Stops the learner; goes on with it unless a has by now what the next release is to find in its spool."""
        learner.send_signal(signal.SIGSTOP)
        time.sleep(0.2)  # what it has written down is committed by then
        if kept.missing(kept.accepted(("a", 0))):
            return True
        learner.send_signal(signal.SIGCONT)
        return False

    conftest.wait_until(is_holding, "a's spool holds experience", 60.0)
    fleet.children["a"].kill()
    fleet.children["a"].wait()
    rows = kept.rows()
    learner.send_signal(signal.SIGCONT)
    fleet.start_actor("a", flags["a"])
    conftest.wait_until(lambda: acted_on(kept).get(("a", messages.SCHEMA_VERSION), 0) > 1, "it acts updated", 90.0)
    assert kept.rows() > rows
    fleet.children["b"].send_signal(signal.SIGTERM)
    assert fleet.children["b"].wait(120.0) == errors.EXIT_OK
    fleet.start_actor("b", flags["b"])  # which sends what the life before left

    lives = [("a", 0), ("b", 0)]
    conftest.wait_until(lambda: not kept.missing(kept.accepted(*lives)), "all that was accepted arrives", 60.0)
    balance = kept.balance(*lives)
    assert balance.holds and balance.dropped == 0 and balance.accepted > 200, balance
    learner.send_signal(signal.SIGTERM)
    output, _ = learner.communicate(timeout=240.0)
    assert learner.returncode == errors.EXIT_INTERRUPTED
    refused = json.loads(output)["messages_refused"]
    assert not [reason for reason in refused if "schema" in reason or "conflict" in reason], refused
