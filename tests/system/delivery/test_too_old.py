"""A limit on age: what comes after an outage is in the ledger and receipted, and nothing is learned from it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.fakes.connections import plain_client
from tests.system import books
from tests.system.conftest import QUICK

pytestmark = pytest.mark.system


def receipted(fleet: local_fleet.LocalFleet) -> int:
    """Returns the newest message that the learner has a receipt for, as the broker retains it."""
    keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
    topic = topics.Topics(fleet.name).receipt("robot")
    with plain_client.PlainClient(int(fleet.broker["port"]), "reader") as client:
        client.subscribe(topic)
        body = signing.LearnerVerifier(keys.bundle("robot").learner_key).open(topic, client.next()[1])
    return codec.decode(messages.Receipt, body).seq


def test_after_an_outage_all_is_in_the_ledger_and_only_what_is_new_in_replay(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    run, life = run_root / "run", ("robot", 0)
    fleet = start_fleet()
    kept = books.Books(run_root / "books", run)
    fleet.start_actor("robot", [*kept.environment("robot"), "--rate-hz", "200"])
    learner = fleet.start_learner(
        [*QUICK, "--run-dir", str(run), "--keep-experience", "--evaluate-episodes", "0", "--samples-per-insert", "0.01"]
        + ["--max-env-steps", "10000000", "--max-experience-age-s", "1.5", "--json"]
    )
    kept.await_rows(8)
    conftest.wait_until(lambda: len(conftest.rows_of(run / "metrics.jsonl")) >= 3, "heartbeats that came in time", 60.0)
    learner.send_signal(signal.SIGSTOP)
    before = len(kept.accepted(life)[life])
    conftest.wait_until(lambda: len(kept.accepted(life)[life]) > before + 600, "three seconds of steps", 60.0)
    learner.send_signal(signal.SIGCONT)
    newest = kept.accepted(life)[life].max()
    conftest.wait_until(lambda: newest in kept.in_ledger()[life], "what the actor held has arrived", 60.0)
    ((last, steps),) = kept.ask("SELECT max(seq), sum(steps) FROM messages WHERE verdict = 'too old'")
    assert steps >= 100, "what was more than 1.5 s old"
    conftest.wait_until(lambda: receipted(fleet) >= last, "it has its receipt", 20.0)
    conftest.wait_until(
        lambda: conftest.rows_of(run / "metrics.jsonl")[-1]["steps_too_old"] > 0, "a row of metrics tells", 20.0
    )
    learner.send_signal(signal.SIGTERM)
    output, _ = learner.communicate(timeout=240.0)
    assert learner.returncode == errors.EXIT_INTERRUPTED, fleet.log_tail("learner")

    balance, summary = kept.balance(), json.loads(output)
    assert balance.twice == balance.invented == 0
    ((too_old,),) = kept.ask("SELECT sum(steps) FROM messages WHERE verdict = 'too old'")
    assert summary["steps_too_old"] == summary["steps_stale"] == too_old
    assert summary["env_steps"] == kept.steps() - too_old, "nothing else is missing in replay"
    assert summary["messages_refused"].keys() <= {"duplicate", "gap"}
    assert 0.0 < summary["experience_age_s_p50"] <= summary["experience_age_s_p99"]
    assert any("experience_age_s_p99" in row for row in conftest.rows_of(run / "metrics.jsonl"))
