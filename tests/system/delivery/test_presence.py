"""A thousand reconnects at random: at the end everybody knows who is there, and nobody is stuck."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.contract import codec, messages, signing, topics
from broker.fleet import identity
from broker.mqtt import link
from edge_actor.fleet import heartbeat, state_sequence
from learner import config
from learner.fleet import roster, session
from tests import conftest
from tests.fakes import fleet_examples
from tests.fakes.connections import plain_client
from tests.system import network

pytestmark = [pytest.mark.system, pytest.mark.slow]
NAMES = topics.Topics("lab")
RECONNECTS = 1000
SIMULATED, REAL = 24, 3
BEAT_S = 0.5


class Site:
    """Two brokers of one fleet, and a network in front of them."""

    def __init__(self, start_broker: Callable[[str], conftest.BrokerProcess]) -> None:
        self.fleet = identity.Fleet.open("lab")
        self.brokers = [start_broker("mosquitto") for _ in range(2)]
        self.network = network.Network()

    def relays(self) -> list[network.Relay]:
        return [self.network.relay(one.port) for one in self.brokers]


class Actor:
    """An actor as this test treats it; it lives or does not, in one boot after the other.

    Attributes:
        lives: Whether it should be online.
        reconnects: Connections that followed another one, of this boot or an earlier one.
    """

    def __init__(self, name: str, site: Site, rng: random.Random) -> None:
        self.name = name
        self._rng = rng
        self.relays = site.relays()
        rng.shuffle(self.relays)
        addresses = [f"127.0.0.1:{relay.port}" for relay in self.relays]
        self.bundle = site.fleet.enroll(name, addresses)
        self.lives = False
        self.reconnects = 0

    def cut(self) -> None:
        """The network fails; the broker hears of it at once, or much later than the actor."""
        late_s = self._late_s()
        for relay in self.relays:
            relay.cut(far_side_after_s=late_s)

    def _late_s(self) -> float:
        return self._rng.choice([0.0, 0.0, 0.3, 1.5])


class Simulated(Actor):
    """The real link, presence and heartbeat, without an environment."""

    _boot = 0

    def start(self) -> None:
        self._boot += 1
        topic, mac = NAMES.actor_state(self.name), signing.ActorMac(self.bundle.mac_key)
        self._presence = state_sequence.StateSequence(self._boot, lambda state: mac.seal(topic, codec.encode(state)))
        self._link = link.Link(self.bundle.brokers, self.name, will=(topic, self._presence.will))
        born = fleet_examples.birth()

        def state() -> bytes:
            return self._presence.online(born, messages.Vitals())

        self._link.retain(topic, state)
        self._heartbeat = heartbeat.Heartbeat(lambda: self._link.retain(topic, state), BEAT_S)
        for relay in self.relays:
            relay.mend()
        self._link.start()
        self._heartbeat.start()
        self.lives = True

    def kill(self) -> None:
        """Ends it as kill -9 does: not a word more, and the connection is reset."""
        self._link.mute()
        late_s = self._late_s()
        for relay in self.relays:
            relay.block(far_side_after_s=late_s)
        self._end(None)

    def leave(self) -> None:
        self._end((NAMES.actor_state(self.name), self._presence.farewell))

    def _end(self, farewell: tuple[str, Callable[[], bytes]] | None) -> None:
        self.lives = False
        self._heartbeat.close()
        self._link.close(farewell, timeout_s=0.5)
        self.reconnects += self._link.connections

    @property
    def seen(self) -> int:
        """Reconnects so far."""
        return self.reconnects + (self._link.connections if self.lives else 0)


class Real(Actor):
    """`actorq-actor run`."""

    def __init__(self, name: str, site: Site, rng: random.Random, directory: Path) -> None:
        super().__init__(name, site, rng)
        bundle = directory / f"{name}.json"
        self.bundle.write(bundle)
        self._log = directory / f"{name}.log"
        self._command = [sys.executable, "-m", "edge_actor", "run", "--bundle", str(bundle), "--env", "CartPole-v1"]
        self._command += ["--state-dir", str(directory / name), "--spool-dir", str(directory / name / "spool")]
        self._command += ["--heartbeat-s", str(BEAT_S)]

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stderr=log)
        self.lives = True
        self.reconnects += 1

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.lives = False

    def leave(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(120.0) in (0, -signal.SIGTERM), "the latter before it could say hello"
        self.lives = False

    @property
    def seen(self) -> int:
        """Processes, and connections that were found again."""
        return self.reconnects + (self._log.read_text().count(" again") if self._log.exists() else 0)


@pytest.fixture
def site(start_broker: Callable[[str], conftest.BrokerProcess], actorq_home: Path) -> Iterator[Site]:
    made = Site(start_broker)
    yield made
    made.network.close()


def retained(broker: conftest.BrokerProcess, actors: list[Simulated | Real]) -> dict[str, bool]:
    """Who is online by what a broker has retained."""
    macs = {actor.name: signing.ActorMac(actor.bundle.mac_key) for actor in actors}
    found: dict[str, bool] = {}
    with plain_client.PlainClient(broker.port, "reader") as client:
        client.subscribe(NAMES.every_actor("state"))
        client.subscribe("end")
        client.publish("end", b"")
        while (received := client.next())[0] != "end":
            topic, payload, is_retained = received
            if is_retained:
                name = NAMES.actor_id(topic)
                found[name] = codec.decode(messages.ActorState, macs[name].open(topic, payload)).online
    return found


def test_nobody_is_stuck_after_a_thousand_reconnects(site: Site, tmp_path: Path) -> None:
    rng = random.Random(4)
    simulated = [Simulated(f"sim-{n}", site, rng) for n in range(SIMULATED)]
    real = [Real(f"real-{n}", site, rng, tmp_path) for n in range(REAL)]
    actors: list[Simulated | Real] = [*simulated, *real]
    own = site.relays()
    settings = config.TrainConfig(fleet="lab", broker=tuple(f"127.0.0.1:{relay.port}" for relay in own))
    here = session.Session.open(settings)
    found = roster.Roster(here.id, here.epoch, "")

    def listen(wait_s: float) -> None:
        for arrival in here.drain(wait_s):
            if isinstance(arrival.message, messages.ActorState):
                found.observe(arrival.actor_id, arrival.message, retained=arrival.retained, now_s=time.monotonic())
        here.beat()
        found.expire(time.monotonic())

    def truth() -> set[str]:
        return {actor.name for actor in actors if actor.lives}

    def known() -> set[str]:
        return {actor.actor_id for actor in found.working()}

    def agree(timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while known() != truth() and time.monotonic() < deadline:
            listen(0.02)
        assert known() == truth(), known() ^ truth()

    try:
        here.join()
        for actor in actors:
            actor.start()
        agree(20.0)
        turns = broker_kills = 0
        while sum(actor.seen - 1 for actor in actors) < RECONNECTS or sum(actor.seen - 1 for actor in real) < 20:
            turns += 1
            actor = rng.choice(actors if turns % 8 else real)
            act = rng.choice([*[actor.cut] * 6, actor.kill, actor.leave])
            (act if actor.lives else actor.start)()
            if turns % 80 == 0:
                rng.choice(site.brokers).restart()
                broker_kills += 1
            if turns % 50 == 25:
                rng.choice(own).cut()
            listen(0.005)
        for actor in actors[::4]:
            if actor.lives:
                actor.kill()
        agree(roster.SILENCE_S + 2.0)  # the last resort: of an actor and a broker that die together nobody tells
        print(
            f"{sum(actor.seen - 1 for actor in actors)} reconnects, {sum(actor.seen - 1 for actor in real)} of real "
            f"actors, {broker_kills} brokers killed"
        )
        until = time.monotonic() + 4 * BEAT_S
        while time.monotonic() < until:
            listen(0.1)
            assert known() == truth(), "it stays true"
        by_broker = [retained(broker, actors) for broker in site.brokers]
        assert {name for states in by_broker for name, online in states.items() if online} == truth()
    finally:
        for actor in actors:
            if actor.lives:
                actor.kill()
        here.close()
