"""Several brokers at once: whichever is killed, the fleet goes on, and nothing that was accepted is lost or doubled."""

from __future__ import annotations

import contextlib
import json
import os
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
from tests.system.conftest import QUICK, command

pytestmark = [pytest.mark.system, pytest.mark.slow]
StartFleet = Callable[..., local_fleet.LocalFleet]
ACTORS = ("one", "two")


def kill_broker(fleet: local_fleet.LocalFleet, index: int) -> None:
    """Ends a broker with SIGKILL, Mosquitto and whoever started it."""
    child = fleet.children[f"broker-{index}"]
    for pid in {child.pid, fleet.brokers[index]["pid"]}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def learner_is_on(fleet: local_fleet.LocalFleet, index: int) -> bool:
    """Returns whether a broker has a live learner's state and a policy, retained."""
    keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
    names = topics.Topics(fleet.name)
    tls = keys.tls() if fleet.brokers[index]["tls"] else None
    with plain_client.PlainClient(int(fleet.brokers[index]["port"]), "reader", "learner", keys.password, tls) as client:
        client.subscribe(names.policy(topics.MAIN_CHANNEL))
        client.subscribe(names.learner_state)
        while True:
            topic, payload, _ = client.next()
            if topic == names.learner_state:
                body = signing.LearnerVerifier(keys.sealer.public_key).open(topic, payload)
                return codec.decode(messages.LearnerState, body).online


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_either_of_two_brokers_may_die(start_fleet: StartFleet, run_root: Path, *, tls: bool) -> None:
    run, lives = run_root / "run", [(name, 0) for name in ACTORS]
    fleet = start_fleet("mosquitto", brokers=2, tls=tls)
    kept = books.Books(run_root / "books", run)
    for name in ACTORS:
        fleet.start_actor(name, kept.environment(name))
    fleet.start_learner(
        [*QUICK, "--actors", "2", "--keep-experience", "--evaluate-episodes", "0", "--run-dir", str(run), "--json"]
        + ["--message-steps", "100", "--samples-per-insert", "4", "--max-env-steps", "10000000"]
    )

    def both_get_through() -> None:
        """Everything that either has accepted until now is in the ledger soon, and both go on."""
        before = kept.accepted(*lives)
        conftest.wait_until(lambda: kept.missing(before) == 0, "all has arrived", 30.0)
        for life, numbers in before.items():
            more = len(numbers) + 500
            conftest.wait_until(lambda: len(kept.accepted(life)[life]) > more, f"{life} goes on", 30.0)  # noqa: B023  called at once

    kept.await_rows(20)
    kill_broker(fleet, 0)
    both_get_through()
    fleet.start_broker(0)
    conftest.wait_until(lambda: learner_is_on(fleet, 0), "the learner is on the first broker again", 20.0)
    kill_broker(fleet, 1)
    both_get_through()
    both_get_through()

    fleet.children["learner"].send_signal(15)
    output, _ = fleet.children["learner"].communicate(timeout=240.0)
    found, balance = kept.in_ledger(), kept.balance()
    assert balance.twice == balance.invented == 0
    assert found.keys() == set(lives)
    summary = json.loads(output)
    assert summary["env_steps"] == sum(map(len, found.values())), "what is in the ledger is in replay, once"
    assert summary["steps_missed"] == 0
    assert summary["messages_refused"].keys() <= {"duplicate", "gap"}


def test_a_learner_starts_while_one_of_its_brokers_is_away(start_fleet: StartFleet, run_root: Path) -> None:
    fleet = start_fleet("mosquitto", brokers=2)
    kill_broker(fleet, 0)
    fleet.start_actor("one", ["--env", "CartPole-v1"])
    endless = ["--max-env-steps", "10000000", "--solved-return", "inf"]
    fleet.start_learner([*QUICK, "--run-dir", str(run_root / "run"), *endless])
    conftest.wait_until(lambda: list((run_root / "run").glob("policies/*")), "training goes on", 60.0)
    fleet.start_broker(0)
    conftest.wait_until(lambda: learner_is_on(fleet, 0), "what is retained is on the late broker too", 20.0)


def test_with_no_broker_there_the_learner_says_which(run_root: Path) -> None:
    done = command("learner", "train", "--broker", "127.0.0.1:1,127.0.0.1:2", "--no-energy", home=run_root / "home")
    assert done.returncode == errors.BrokerUnreachable.exit_code
    assert "127.0.0.1:1: " in done.stderr and "127.0.0.1:2: " in done.stderr
    assert "actorq-broker up" in done.stderr
