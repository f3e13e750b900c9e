"""`actorq-learner fleet update` and two real actors on Mosquitto: what works is kept, all else refused or undone.

One of them comes from the schema before ours.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.contract import codec, errors, messages, previous, release
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.edge_actor.policies.models import files
from tests.fakes import fake_learner, previous_release, releases
from tests.system import network
from tests.system.conftest import command, started

pytestmark = [pytest.mark.system, pytest.mark.mosquitto, pytest.mark.slow]
SYSTEMD = 'while :; do "$@"; sleep 0.1; done'
"""What `Restart=always` makes of a service."""
ACTOR = ["--env", "CartPole-v1", "--rate-hz", "100", "--heartbeat-s", "0.2", "--allow", "pause,update"]
NOISE = random.Random(7).randbytes(8 * release.PIECE_BYTES)
"""Packs to nothing smaller."""


class Learner(fake_learner.FakeLearner):
    """Lets every boot of an actor act without end; `schema` is that of the newest state."""

    assigned = schema = 0

    def _on_state(self, topic: str, payload: bytes, retained: bool) -> None:
        super()._on_state(topic, payload, retained)
        self.schema = int(codec.metadata(self._mac.open(topic, payload))["schema"])
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

    def start(self, name: str, *flags: str, addresses: Sequence[str] = (), program: Path = releases.ROOT) -> None:
        """Starts an actor as systemd would, over and over; by these addresses, if there are any.

        `program` is what was set up on its board.
        """
        bundle = self.home / f"{name}.json"
        if name not in self.learners:
            self.keys.enroll(name, addresses or self.fleet.addresses).write(bundle)
            self.learners[name] = Learner(self.fleet.address, self.keys, name)
        places = ["--state-dir", str(self.home / name), "--spool-dir", str(self.fleet.spool(name))]
        launch = [sys.executable, "-P", "-m", "edge_actor.updates.launcher", "run", "--bundle", str(bundle), *places]
        home = {"ACTORQ_HOME": str(self.home), "ACTORQ_RELEASES": str(self.directory / name)}
        with (self.directory / f"{name}.log").open("a") as log:
            self.services[name] = subprocess.Popen(
                ["sh", "-c", SYSTEMD, "sh", *launch, *ACTOR, *flags],
                env=releases.environment(program, **home),
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

    def words(self, wheel: Path, *words: str) -> list[str]:
        """`fleet update` with a wheel."""
        where = ["--fleet", self.fleet.name, "--broker", self.fleet.address, "--key", str(self.key), "--json"]
        return ["fleet", "update", str(wheel), *words, *where]

    def update(self, wheel: Path, *words: str, code: int = errors.EXIT_OK) -> tuple[dict[str, Any], str]:
        """What `fleet update` says of each actor, and on stderr."""
        done = command("learner", *self.words(wheel, *words), home=self.home, timeout_s=150.0)
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this source."""
    return releases.built(tmp_path_factory.mktemp("built"))


def test_updates_of_two_actors(site: Site, tmp_path: Path, wheel: Path) -> None:
    refused = errors.OrderRefused.exit_code
    good = releases.changed(wheel, tmp_path / "good", "9.1")

    site.keys.enroll("a")
    _, said = site.update(good, "a", code=errors.IdentityError.exit_code)
    assert "has no release key" in said and "actorq-broker release-key" in said
    site.make_key(site.key)
    site.start("a", program=previous_release.PreviousRelease(tmp_path / "before").directory)
    site.start("b", "--update-reserve-bytes", str(1 << 60))
    for name, schema in (("a", previous.VERSION), ("b", messages.SCHEMA_VERSION)):
        site.await_acting(name)
        assert site.learners[name].schema == schema

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
        assert site.learners[name].schema == messages.SCHEMA_VERSION
        site.await_acting(name)
    boots = {name: site.learners[name].assigned for name in ("a", "b")}

    told, said = site.update(releases.changed(wheel, tmp_path / "bad", "9.2", releases.CRASHES), "--all", code=refused)
    assert told["a"]["outcome"] == "undone" and "it ended with 10 before" in told["a"]["text"], told
    assert told["b"] == {"actor": "b", "outcome": "untouched"}
    site.await_acting("a")
    assert site.birth("a").release == "9.1"

    unheard = releases.changed(wheel, tmp_path / "unheard", "9.3", releases.UNHEARD)
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


def test_a_connection_that_is_cut_in_the_middle_of_the_pieces(site: Site, tmp_path: Path, wheel: Path) -> None:
    """What is here is not sent again, by the same process over its next connection."""
    large = releases.changed(wheel, tmp_path / "large", "9.1", more={"edge_actor/noise.bin": NOISE})
    size = large.stat().st_size
    assert size > 8 * release.PIECE_BYTES
    site.make_key(site.key)
    with network.Network() as made:
        relay = made.relay(int(site.fleet.broker["port"]))
        site.start("a", addresses=[f"127.0.0.1:{relay.port}"])
        site.await_acting("a")
        boot, before = site.learners["a"].assigned, relay.passed_bytes
        relay.block_after(size // 2)
        words = [sys.executable, "-m", "learner", *site.words(large, "a")]
        home = os.environ | {"ACTORQ_HOME": str(site.home)}
        with started(words, env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as updating:
            assert relay.blocked.wait(120.0), f"half of it never came; the command ended with {updating.poll()}"
            conftest.wait_until(lambda: not site.learners["a"].states[-1].online, "the broker misses the actor", 30.0)
            relay.mend()
            output, said = updating.communicate(timeout=240.0)
        assert updating.returncode == errors.EXIT_OK, f"{said}\n{(tmp_path / 'a.log').read_text()[-3000:]}"
        assert json.loads(output)["outcome"] == "done"
        assert site.birth("a").release == "9.1"
        sent = relay.passed_bytes - before
    again = 3 * release.PIECE_BYTES  # the two that were on their way, and all else that a broker says
    assert size < sent < size + again, f"{sent / 1e6:.1f} MB were sent of {size / 1e6:.1f}"
    states = [state for state in site.learners["a"].states if state.boot >= boot]
    assert len({state.boot for state in states}) == 2, "one process took all of it, and the next one is it"
    assert not [reason for state in states for reason in state.vitals.refused if "release" in reason]
