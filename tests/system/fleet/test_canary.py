"""Real fleets whose policies are tried on some of the actors first: a worse one reaches those alone."""

from __future__ import annotations

import collections
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from broker.mqtt import link
from learner import __main__ as main
from learner.files import run_directory
from learner.run import local_fleet
from tests import conftest
from tests.system.conftest import QUICK
from tests.system.fleet import test_deploy

pytestmark = [pytest.mark.system, pytest.mark.mosquitto]
ACTORS = ("pi-a", "pi-b", "pi-c")


class Witness:
    """Hears, beside the learner, which policy each actor says that it acted on, and what goes out on either channel."""

    def __init__(self, fleet: local_fleet.LocalFleet) -> None:
        keys = identity.Fleet.open(fleet.name, create=False)
        names = topics.Topics(fleet.name)
        self.acted: dict[messages.Order, set[str]] = collections.defaultdict(set)
        self.sent: dict[str, list[messages.Manifest]] = {topics.MAIN_CHANNEL: [], topics.CANARY_CHANNEL: []}
        self._macs = {name: signing.ActorMac(keys.bundle(name).mac_key) for name in ACTORS}
        self._names, self._verifier = names, signing.LearnerVerifier(keys.sealer.public_key)
        self.link = link.Link([fleet.address], "witness", username=identity.LEARNER_USER, password=keys.password)
        self.link.subscribe(names.every_actor("state"), self._on_state)
        self.link.subscribe(names.every_actor("experience"), self._on_experience)
        for channel in self.sent:
            self.link.subscribe(names.policy(channel), self._on_policy)
        self.link.start()
        self.link.wait_connected(10.0)

    def _on_state(self, topic: str, payload: bytes, retained: bool) -> None:
        actor = self._names.actor_id(topic)
        vitals = codec.decode(messages.ActorState, self._macs[actor].open(topic, payload)).vitals
        self.acted[messages.Order(vitals.policy_epoch, vitals.policy_version)].add(actor)

    def _on_experience(self, topic: str, payload: bytes, retained: bool) -> None:
        actor = self._names.actor_id(topic)
        sent = codec.decode(messages.Experience, self._macs[actor].open(topic, payload))
        self.acted[messages.Order(sent.epoch, sent.version)].add(actor)

    def _on_policy(self, topic: str, payload: bytes, retained: bool) -> None:
        if payload:
            manifest = codec.decode(messages.Policy, self._verifier.open(topic, payload)).manifest
            self.sent[manifest.channel].append(manifest)


HALVING = np.array([-1.5, 0.0, 4.0, 1.5])
"""Balances the pole, and drives off the track within about 200 of the 500 steps."""


def halving(path: Path) -> Path:
    """Returns a DQN that acts by HALVING."""
    return test_deploy._agent(path, np.stack([-HALVING, HALVING]))


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back what the command does to signals: it runs in this process, which has loaded TensorFlow once."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_policy_that_passes_the_gate_and_halves_the_return_reaches_one_of_three(
    start_fleet: Callable[..., local_fleet.LocalFleet],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fleet = start_fleet("mosquitto")
    monkeypatch.setenv("ACTORQ_HOME", str(fleet.directory / "home"))
    for name in ACTORS:
        fleet.start_actor(name, ["--env", "CartPole-v1", "--heartbeat-s", "0.2"])
    observations = tmp_path / "observations.npz"
    spread = np.array([1.0, 1.0, 0.1, 1.0])
    np.savez(observations, observations=np.random.default_rng(0).normal(size=(512, 4)).astype(np.float32) * spread)
    witness = Witness(fleet)

    def deploy(file: Path, *options: str, code: int = errors.EXIT_OK) -> tuple[dict[str, Any], str]:
        where = ["--fleet", fleet.name, "--broker", fleet.address, "--json", "--episodes", "3", "--wait-s", "60"]
        where += ["--actors", "3", "--calibration", str(observations)]
        ended = main.main(["deploy", str(file), *where, *options])
        said = capfd.readouterr()
        assert ended == code, said.err
        assert "Traceback" not in said.err
        return json.loads(said.out), said.err

    good, bad = test_deploy.balancer(tmp_path / "good.zip"), halving(tmp_path / "bad.zip")
    first, _ = deploy(good)
    assert set(first["acting"]) == set(ACTORS)

    worse, said = deploy(bad, "--canary", "0.34", code=errors.PolicyError.exit_code)
    trial = worse["canary"]
    with capfd.disabled():
        means = f"{worse['return_mean']:.0f} beside {worse['older']['return_mean']:.0f}"
        print(f"\nwithdrawn after {trial['pairs']} pairs in {trial['took_s']:.1f} s: {means}")
    assert worse["gate_passed"] and not worse["deployed"]
    assert trial["verdict"] == "withdrawn" and "is withdrawn: worse than the incumbent" in said
    assert worse["return_mean"] < 0.6 * worse["older"]["return_mean"]
    assert len(trial["actors"]) == 1
    candidate = messages.Order(worse["epoch"], 2)
    assert witness.acted[candidate] == set(trial["actors"]), "nobody else ever acted on it"
    assert (worse["version"], set(worse["acting"])) == (3, set(ACTORS)), "all act on the older one, as the newest"
    assert [one.sha256 for one in witness.sent["main"][-2:]] == [first["sha256"]] * 2
    assert [one.order for one in witness.sent["canary"]] == [candidate]
    assert not worse["experience_refused"] and not worse["experience_not_taken"]

    same, _ = deploy(good, "--canary", "0.34")
    assert same["deployed"] and same["canary"]["verdict"] == "promoted"
    assert set(same["acting"]) == set(ACTORS)
    assert len(witness.acted[messages.Order(same["epoch"], 2)]) == 1
    assert not fleet.ended()
    witness.link.close()


@pytest.mark.slow
def test_trials_in_training_and_a_learner_that_is_killed_in_one(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, run = start_fleet("embedded"), run_root / "run"
    monkeypatch.setenv("ACTORQ_HOME", str(fleet.directory / "home"))
    for name in ACTORS:
        fleet.start_actor(name, ["--env", "CartPole-v1", "--heartbeat-s", "0.2"])
    witness = Witness(fleet)
    flags = ["--canary", "0.34", "--actors", "3", "--evaluate-episodes", "0", "--max-env-steps", "100000000"]
    flags += ["--run-dir", str(run), "--checkpoint-period-s", "1", "--samples-per-insert", "4", "--algorithm", "dqn"]
    learner = fleet.start_learner([*QUICK, *flags])

    def rows() -> list[dict[str, Any]]:
        return conftest.rows_of(run / "metrics.jsonl")

    def goes_on() -> bool:
        found = rows()
        ended = found and found[-1]["canary_promoted"] + found[-1]["canary_withdrawn"] > 0
        return bool(ended and found[-1]["canary_actors"] == 1 and list(run.glob("checkpoints/*")))

    conftest.wait_until(goes_on, "one trial has ended, and another goes on", 60.0)
    learner.kill()
    learner.wait()
    proven = json.loads((run / run_directory.CANARY).read_text())["incumbent"]
    epoch = proven["epoch"]

    again = fleet.start_learner(["--resume", str(run), "--json"])
    main_sent, canary_sent = witness.sent["main"], witness.sent["canary"]
    conftest.wait_until(lambda: main_sent[-1].epoch > epoch, "it is back", 60.0)
    back = next(one for one in main_sent if one.epoch > epoch)
    assert back.sha256 == proven["sha256"], "what was proven goes out first"
    conftest.wait_until(lambda: canary_sent[-1].epoch > epoch, "trials begin anew", 60.0)
    assert main_sent[-1].epoch > epoch
    conftest.wait_until(lambda: sum(1 for one in main_sent if one.epoch > epoch) > 1, "one is decided", 60.0)
    again.terminate()
    again.communicate(timeout=240.0)
    assert again.returncode == errors.EXIT_INTERRUPTED
    tried = {one.order for one in canary_sent}
    reached = {order: len(witness.acted[order]) for order in tried}
    print(f"{len(tried)} candidates, {sum(reached.values())} of which an actor acted on")
    assert max(reached.values()) == 1, "one of three, each time"
    orders = [one.order for one in sorted([*main_sent, *canary_sent], key=lambda one: one.created_s)]
    assert orders == sorted(set(orders)), "versions only rise, over both channels"
    outcomes = json.loads((run / run_directory.CANARY).read_text())["trials"]
    summary = json.loads((run / "summary.json").read_text())["canary"]
    assert summary["trials"] == outcomes
    assert summary["promoted"] + summary["withdrawn"] >= 1
    assert {one["candidate"] for one in outcomes} <= {str(order) for order in tried}
    assert not fleet.ended()
    witness.link.close()
