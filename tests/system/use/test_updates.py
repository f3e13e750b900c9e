"""`actorq-learner fleet update` and two real actors on Mosquitto: what works is kept, all else refused or undone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors, messages
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.edge_actor.policies.models import files
from tests.fakes import fake_learner, releases
from tests.system.conftest import command

pytestmark = [pytest.mark.system, pytest.mark.mosquitto, pytest.mark.slow]
SYSTEMD = 'while :; do "$@"; sleep 0.1; done'
"""What `Restart=always` makes of a service."""
ACTOR = ["--env", "CartPole-v1", "--rate-hz", "100", "--heartbeat-s", "0.2", "--allow", "pause,update"]
CRASHES = {"edge_actor/run/service.py": ("    lines = log_lines.LogLines.attached()\n", "    raise SystemExit(10)\n")}
UNHEARD = {
    "edge_actor/run/fleet_connection.py": (
        "return self._mac.seal(self.experience_topic, body)",
        'return b"x" + self._mac.seal(self.experience_topic, body)',
    )
}
"""It connects, acts and sends, and nothing that it sends is understood."""


class Learner(fake_learner.FakeLearner):
    """Lets every boot of an actor act without end."""

    assigned = 0

    def _on_state(self, topic: str, payload: bytes, retained: bool) -> None:
        super()._on_state(topic, payload, retained)
        state = self.states[-1]
        if state.online and state.boot != self.assigned:
            self.assigned = state.boot
            self.assign(fake_learner.assignment(state.boot, steps_granted=1 << 40))


class Site:
    """A broker, two actors as services, a learner, and the command."""

    def __init__(self, fleet: local_fleet.LocalFleet, directory: Path) -> None:
        self.fleet, self.directory = fleet, directory
        self.home = fleet.directory / "home"
        self.key = directory / "release.pem"
        self.keys = identity.Fleet.open(fleet.name, self.home / "fleets" / fleet.name, create=False)
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.learners: dict[str, Learner] = {}

    def make_key(self, file: Path, *options: str) -> None:
        done = command("broker", "release-key", "--fleet", self.fleet.name, "-o", str(file), *options, home=self.home)
        assert done.returncode == 0, done.stderr
        assert file.stat().st_mode & 0o777 == 0o600

    def start(self, name: str, *flags: str) -> None:
        """Starts an actor as systemd would, over and over."""
        bundle = self.home / f"{name}.json"
        if name not in self.learners:
            self.keys.enroll(name, self.fleet.addresses).write(bundle)
            self.learners[name] = Learner(self.fleet.address, self.keys, name)
        places = ["--state-dir", str(self.home / name), "--spool-dir", str(self.fleet.spool(name))]
        launch = [sys.executable, "-P", "-m", "edge_actor.updates.launcher", "run", "--bundle", str(bundle), *places]
        home = {"ACTORQ_HOME": str(self.home), "ACTORQ_RELEASES": str(self.directory / name)}
        with (self.directory / f"{name}.log").open("a") as log:
            self.services[name] = subprocess.Popen(
                ["sh", "-c", SYSTEMD, "sh", *launch, *ACTOR, *flags],
                env=releases.environment(releases.ROOT, **home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, name: str) -> None:
        os.killpg(self.services[name].pid, signal.SIGKILL)
        self.services.pop(name).wait()

    def birth(self, name: str) -> messages.Birth:
        state = self.learners[name].state
        assert state is not None and state.birth is not None
        return state.birth

    def await_acting(self, name: str) -> None:
        before = self.learners[name].steps
        conftest.wait_until(lambda: self.learners[name].steps > before, f"{name} acts", 30.0)

    def publish(self, name: str) -> None:
        """Has an actor act by a policy."""
        learner, spec = self.learners[name], self.birth(name).spec
        assert spec is not None
        learner.publish(fake_learner.policy(files.INT8.read_bytes(), spec.fingerprint))

        def acts() -> bool:
            return learner.state is not None and learner.state.vitals.policy_version == 1

        conftest.wait_until(acts, f"{name} hears policies", 30.0)

    def update(self, wheel: Path, *words: str, code: int = errors.EXIT_OK) -> tuple[dict[str, Any], str]:
        """What `fleet update` says of each actor, and on stderr."""
        where = ["--fleet", self.fleet.name, "--broker", self.fleet.address, "--key", str(self.key), "--json"]
        done = command("learner", "fleet", "update", str(wheel), *words, *where, home=self.home, timeout_s=150.0)
        logs = "\n".join((self.directory / f"{name}.log").read_text()[-3000:] for name in self.services)
        assert done.returncode == code, f"{done.stderr}\n{logs}"
        assert "Traceback" not in done.stderr
        return {one["actor"]: one for one in map(json.loads, done.stdout.splitlines())}, done.stderr

    def close(self) -> None:
        for name in list(self.services):
            self.stop(name)
        for learner in self.learners.values():
            learner.close()


@pytest.fixture
def site(start_fleet: Callable[..., local_fleet.LocalFleet], tmp_path: Path) -> Iterator[Site]:
    made = Site(start_fleet("mosquitto"), tmp_path)
    yield made
    made.close()


def test_updates_of_two_actors(site: Site, tmp_path: Path) -> None:
    wheel = releases.built(tmp_path / "built")
    refused = errors.OrderRefused.exit_code
    good = releases.changed(wheel, tmp_path / "good", "9.1")

    site.keys.enroll("a")
    _, said = site.update(good, "a", code=errors.IdentityError.exit_code)
    assert "has no release key" in said and "actorq-broker release-key" in said
    site.make_key(site.key)
    site.start("a")
    site.start("b", "--update-reserve-bytes", str(1 << 60))
    for name in ("a", "b"):
        site.await_acting(name)

    told, _ = site.update(good, "b", code=refused)
    assert told["b"]["outcome"] == "refused" and "the disk is too full" in told["b"]["text"]
    site.publish("b")
    site.stop("b")
    site.start("b")
    site.await_acting("b")

    signed = tmp_path / "good.release"
    made = command("broker", "release", str(good), "--key", str(site.key), "-o", str(signed), home=site.home)
    assert made.returncode == 0, made.stderr
    wrong = {
        "--downgrade": "is signed",
        "--first-label=room": "KEY=VALUE",
        "--first-label=room=lab": "nobody would begin",
    }
    for option, text in wrong.items():
        _, said = site.update(signed, "--all", option, code=errors.ConfigError.exit_code)
        assert text in said
    told, said = site.update(signed, "--all", "--first", "2", "--trial-s", "60")
    assert [told[name]["outcome"] for name in ("a", "b")] == ["done", "done"], told
    assert "stage 1 of 1: 2 of 2 act as 9.1-" in said
    for name in ("a", "b"):
        assert site.birth(name).release == "9.1"
        site.await_acting(name)
    boots = {name: site.learners[name].assigned for name in ("a", "b")}

    told, said = site.update(releases.changed(wheel, tmp_path / "bad", "9.2", CRASHES), "--all", code=refused)
    assert told["a"]["outcome"] == "undone" and "it ended with 10 before" in told["a"]["text"], told
    assert told["b"] == {"actor": "b", "outcome": "untouched"}
    site.await_acting("a")
    assert site.birth("a").release == "9.1"

    unheard = releases.changed(wheel, tmp_path / "unheard", "9.3", UNHEARD)
    told, _ = site.update(unheard, "a", "--trial-s", "5", code=refused)
    assert told["a"]["outcome"] == "undone" and "within 5 s it did not say" in told["a"]["text"], told
    site.await_acting("a")
    assert site.birth("a").release == "9.1"

    (site.keys.directory / "release.pub").write_text("damaged")
    site.key = tmp_path / "other.pem"
    site.make_key(site.key, "--force")
    told, _ = site.update(good, "--all", code=refused)
    assert told["a"]["outcome"] == "refused" and "not signed by this fleet's release key" in told["a"]["text"]
    assert site.learners["b"].assigned == boots["b"], "b was never started again"
    assert not [reason for reason in site.learners["b"].states[-1].vitals.refused if "release" in reason]
