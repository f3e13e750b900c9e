"""--take-over: the newcomer has the fleet, whatever the learner before it does, and each keeps what it receipted."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.fakes.connections import plain_client
from tests.system import books, network
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.system, pytest.mark.slow]
FLAGS = [
    *QUICK,
    "--keep-experience",
    "--evaluate-episodes",
    "0",
    "--message-steps",
    "100",
    "--max-env-steps",
    "10000000",
]


class Listener:
    """Hears what learners say, told apart by the epoch under their signature."""

    def __init__(self, fleet: local_fleet.LocalFleet) -> None:
        self._names = topics.Topics(fleet.name)
        keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
        self._verifier = signing.LearnerVerifier(keys.sealer.public_key)
        self._client = plain_client.PlainClient(int(fleet.broker["port"]), "listener")
        for topic in (self._names.learner_state, self._names.policy("main"), self._names.assignment("pi")):
            self._client.subscribe(topic)

    def close(self) -> None:
        self._client.__exit__(None, None, None)

    def retained(self) -> dict[str, int]:
        """Epoch of what is retained at each topic; call it first."""
        self._client.subscribe("end")
        self._client.publish("end", b"")
        found: dict[str, int] = {}
        while (received := self._client.next())[0] != "end":
            topic, payload, is_retained = received
            if is_retained:
                found |= dict(self._read(topic, payload))
        return found

    def epochs(self) -> set[int]:
        """Returns the epochs of all that came since the last call, but for goodbyes."""
        found = []
        while not self._client.received.empty():
            topic, payload, _ = self._client.next()
            found += self._read(topic, payload)
        return {epoch for _, epoch in found}

    def _read(self, topic: str, payload: bytes) -> list[tuple[str, int]]:
        leaf, body = topic.rpartition("/")[2], self._verifier.open(topic, payload)
        if leaf == "state":
            state = codec.decode(messages.LearnerState, body)
            return [(leaf, state.epoch)] if state.online else []
        if leaf == "whole":
            return [(leaf, codec.decode(messages.Policy, body).manifest.epoch)]
        return [(leaf, codec.decode(messages.Assignment, body).epoch)]


@pytest.fixture
def net() -> Iterator[network.Network]:
    with network.Network() as made:
        yield made


def rows(kept: books.Books, where: str = "") -> Counter[tuple[int, int]]:
    return Counter(kept.ask(f"SELECT boot, seq FROM messages {where}"))


@pytest.mark.parametrize("first_is", ["live", "cut off", "standing still"])
def test_the_newcomer_has_the_fleet_and_the_first_ends(
    first_is: str,
    start_fleet: Callable[..., local_fleet.LocalFleet],
    run_root: Path,
    net: network.Network,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fleet = start_fleet("mosquitto")
    relay = net.relay(int(fleet.broker["port"]))
    one, two = (books.Books(run_root / "books", run_root / run) for run in ("one", "two"))
    fleet.start_actor("pi", one.environment("pi"))
    first = fleet.start_learner([*FLAGS, "--run-dir", str(run_root / "one")], brokers=[f"127.0.0.1:{relay.port}"])
    one.await_rows(50)
    if first_is == "cut off":
        relay.block()
    elif first_is == "standing still":
        first.send_signal(signal.SIGSTOP)
    second = fleet.start_learner([*FLAGS, "--run-dir", str(run_root / "two"), "--take-over"], "learner-2")
    conftest.wait_until(lambda: rows(two, "WHERE verdict = 'ok'"), "the actor follows the newcomer", 60.0)

    listener = Listener(fleet)
    newest = max(listener.retained().values())
    if first_is != "live":
        assert first.poll() is None
        first.send_signal(signal.SIGCONT)
        relay.mend()
    assert first.wait(120.0) == errors.FleetBusy.exit_code
    assert "another learner has taken this fleet over" in capfd.readouterr().err
    two.await_rows(20)
    assert second.poll() is None
    said = listener.epochs()
    listener.close()
    if first_is == "cut off":
        assert said == {newest}, "back again, the first one heard before it spoke"
    late = Listener(fleet)
    assert late.retained() == {"state": newest, "whole": newest, "assignment": newest}
    late.close()

    fleet.children["pi"].send_signal(signal.SIGTERM)
    assert fleet.children["pi"].wait(120.0) == errors.EXIT_OK
    newest_seq = max(seq for _, seq in rows(two))
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=240.0)
    life = ("pi", 0)
    found = np.concatenate([one.in_ledger()[life], two.in_ledger()[life]])
    assert len(found) == len(np.unique(found)), "in one of the two replays at most"
    together = {seq for _, seq in rows(one)} | {seq for _, seq in rows(two)}
    assert together >= set(range(1, newest_seq + 1)), "what has no row with the newcomer was receipted by the first"
    others = rows(two, "WHERE verdict != 'ok'")
    assert rows(two, "WHERE verdict = 'epoch'") == others, "what the first had not receipted belongs to its run"
    assert not len(np.setdiff1d(found, one.accepted(life)[life]))
    assert (run_root / "one" / "checkpoints").exists() and list((run_root / "one" / "checkpoints").glob("*.npz"))
