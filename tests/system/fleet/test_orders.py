"""`actorq-learner fleet` and two real actors: each order is done once, answered, or told as undelivered."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors, messages
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.fakes import fake_learner
from tests.system.conftest import command

pytestmark = [pytest.mark.system, pytest.mark.mosquitto]
FAST = ["--env", "CartPole-v1", "--heartbeat-s", "0.2", "--trial-s", "30"]
STEADY = ["--env", "Pendulum-v1", "--rate-hz", "50", "--safe-action", "[0]", "--heartbeat-s", "0.2"]


class Site:
    """A broker, two actors that a learner lets act, and the command."""

    def __init__(self, fleet: local_fleet.LocalFleet) -> None:
        self.fleet = fleet
        self.home = fleet.directory / "home"
        self.fast = fleet.start_actor("fast", [*FAST, "--allow", "pause,resume,logs,set,restart"])
        self.steady = fleet.start_actor("steady", [*STEADY, "--allow-env-kwargs", "g,wings"])
        keys = identity.Fleet.open(fleet.name, self.home / "fleets" / fleet.name, create=False)
        self.learners = {name: fake_learner.FakeLearner(fleet.address, keys, name) for name in ("fast", "steady")}
        for name in self.learners:
            self.grant(name)

    def grant(self, name: str) -> int:
        """Lets the newest boot of an actor act without end."""
        learner = self.learners[name]
        boot = learner.await_birth(60.0).boot
        learner.assign(fake_learner.assignment(boot, steps_granted=1 << 40))
        return boot

    def state(self, name: str) -> messages.ActorState:
        state = self.learners[name].state
        assert state is not None
        return state

    def vitals(self, name: str) -> messages.Vitals:
        return self.state(name).vitals

    def await_steps(self, name: str, steps: int) -> None:
        conftest.wait_until(lambda: self.learners[name].steps > steps, f"{name} acts", 30.0)

    def check_pause(self, name: str) -> None:
        """It says that it is paused, has handed on each step, and takes no more."""
        conftest.wait_until(lambda: self.vitals(name).paused, f"{name} is paused", 20.0)
        said = self.state(name).heartbeat  # it may say so before it hands on what it had recorded
        conftest.wait_until(lambda: self.state(name).heartbeat > said + 1, "it beats on", 20.0)
        recorded, beat = self.vitals(name).steps_recorded, self.state(name).heartbeat
        conftest.wait_until(lambda: self.learners[name].steps == recorded, f"{name} lost no step", 20.0)
        conftest.wait_until(lambda: self.state(name).heartbeat > beat + 2, "it beats on", 20.0)
        assert self.vitals(name).steps_recorded == recorded == self.learners[name].steps, "and takes none"

    def run(self, *words: str, code: int = errors.EXIT_OK) -> list[dict[str, Any]]:
        """The objects that `actorq-learner fleet ... --json` prints."""
        where = ["--fleet", self.fleet.name, "--broker", self.fleet.address, "--json"]
        done = command("learner", "fleet", *words, *where, home=self.home, timeout_s=150.0)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def log(self, name: str) -> str:
        return (self.fleet.directory / "logs" / f"{name}.log").read_text()

    def close(self) -> None:
        for learner in self.learners.values():
            learner.close()


@pytest.fixture
def site(start_fleet: Callable[..., local_fleet.LocalFleet]) -> Iterator[Site]:
    made = Site(start_fleet("mosquitto"))
    yield made
    made.close()


def test_pause_and_resume_and_an_order_to_one_that_is_away(site: Site) -> None:
    for name in site.learners:
        site.await_steps(name, 0)
    assert {row["actor"]: row["state"] for row in site.run("ls")} == {"fast": "here", "steady": "here"}

    answers = site.run("pause", "--all")
    assert [(one["actor"], one["outcome"]) for one in answers] == [("fast", "done"), ("steady", "done")]
    for name in site.learners:
        site.check_pause(name)
    recorded = site.learners["fast"].steps
    assert {row["state"] for row in site.run("ls")} == {"paused"}

    (answer,) = site.run("resume", "fast")
    assert answer["outcome"] == "done"
    site.await_steps("fast", recorded)

    site.steady.send_signal(signal.SIGKILL)
    site.steady.wait()
    (late,) = site.run("resume", "steady", "--wait-s", "3", code=errors.Undelivered.exit_code)
    assert late["outcome"] == "waiting"
    assert [row["orders_waiting"] for row in site.run("ls") if row["actor"] == "steady"] == [1]
    boot = site.state("steady").boot
    site.fleet.start_actor("steady", STEADY)
    conftest.wait_until(lambda: site.state("steady").boot > boot, "it is back", 60.0)
    site.grant("steady")
    conftest.wait_until(lambda: not site.vitals("steady").paused, "it was paused, and got the order", 20.0)
    conftest.wait_until(lambda: not site.run("show", "steady")[0]["orders_waiting"], "it has answered", 60.0)
    (row,) = site.run("show", "steady")
    assert [(one["kind"], one["outcome"]) for one in row["orders"]] == [("resume", "done"), ("pause", "done")]
    assert row["orders_waiting"] == 0
    assert site.log("steady").count("ordered: resume") == 1
    assert not [reason for reason in site.vitals("steady").refused if "order" in reason]


def test_settings_are_kept_or_undone(site: Site) -> None:
    (answer,) = site.run("set", "fast", "envs=4", "seed=3")
    assert (answer["outcome"], answer["text"]) == ("done", "in force")
    (row,) = site.run("ls", "fast")
    assert (row["envs"], row["set"]) == (4, {"envs": "4", "seed": "3"})
    (answer,) = site.run("restart", "fast")
    assert (answer["outcome"], answer["text"]) == ("done", "started again")
    assert site.run("ls", "fast")[0]["envs"] == 4
    assert site.fast.poll() is None, "all that was one process"

    (answer,) = site.run("set", "steady", "env_kwargs.wings=2", code=errors.OrderRefused.exit_code)
    assert answer["outcome"] == "undone" and "wings" in answer["text"]
    assert site.run("ls", "steady")[0]["set"] == {}
    for words, text in (
        (["set", "steady", "env_kwargs.max_speed=1"], "not from the network: env_kwargs.max_speed"),
        (["set", "steady", "rate_hz=fast"], "rate_hz must be a number"),
        (["set", "fast", "envs=0"], "envs must be above 0"),
        (["restart", "steady"], "do not allow it"),
        (["reboot", "fast"], "do not allow it"),
    ):
        (answer,) = site.run(*words, code=errors.OrderRefused.exit_code)
        assert answer["outcome"] == "refused" and text in answer["text"]

    site.run("label", "steady", "room=lab")
    lines = [one["line"] for one in site.run("logs", "--label", "room=lab", "-n", "50")]
    assert any("ordered settings are undone" in line or "actor steady boot" in line for line in lines)


def test_who_is_meant(site: Site, tmp_path: Path) -> None:
    site.run("pause", "nobody", code=errors.IdentityError.exit_code)
    site.run("pause", code=errors.ConfigError.exit_code)
    site.run("set", "fast", "bundle=x", code=errors.ConfigError.exit_code)
    site.run("pause", "--label", "room=lab", code=errors.ConfigError.exit_code)
    assert site.run("label", "fast", "room=lab", "row=1") == [{"actor": "fast", "labels": {"room": "lab", "row": "1"}}]
    site.run("label", "fast", "row=")
    assert [row["actor"] for row in site.run("ls", "--label", "room=lab")] == ["fast"]
