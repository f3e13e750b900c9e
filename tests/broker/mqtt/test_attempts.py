"""Which broker a link tries, and the way back to the one whose share it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from broker.contract import address
from broker.mqtt import attempts, backoff, link, network_thread
from tests import conftest
from tests.broker.mqtt import conftest as links
from tests.fakes import log_reader

HOME, SECOND, THIRD = (address.Address("127.0.0.1", port) for port in (1, 2, 3))


@pytest.fixture
def tries() -> attempts.Attempts:
    return attempts.Attempts([HOME, SECOND, THIRD], None)


def fail(tries: attempts.Attempts, *, was_connected: bool = False) -> address.Address:
    where = tries.next()
    if was_connected:
        tries.made(where)
    tries.ended(where, "gone", was_connected=was_connected, is_wanted=True)
    return where


def _is_due(tries: attempts.Attempts) -> bool:
    return tries.home == HOME


def test_each_has_its_turn(tries: attempts.Attempts) -> None:
    assert [fail(tries) for _ in range(4)] == [HOME, SECOND, THIRD, HOME]


def test_who_is_at_home_stays(tries: attempts.Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "RETURN_S", 0.0)
    tries.made(tries.next())
    assert tries.home is None


def test_the_way_back_is_tried_once_and_then_later_each_time(
    tries: attempts.Attempts, monkeypatch: pytest.MonkeyPatch, log: log_reader.LogReader
) -> None:
    asked: list[int] = []

    def return_s(failures: int) -> float:
        asked.append(failures)
        return 0.0

    monkeypatch.setattr(backoff, "return_s", return_s)
    assert fail(tries, was_connected=True) == HOME
    assert tries.next() == SECOND and not _is_due(tries)
    tries.made(SECOND)
    assert _is_due(tries) and not tries.go_home(is_there=False)
    assert _is_due(tries) and tries.go_home(is_there=True)
    told = len(log.lines)
    tries.ended(SECOND, "", was_connected=True, is_wanted=True)
    assert fail(tries) == HOME, "it listens, and lets nobody in"
    assert [fail(tries) for _ in range(3)] == [SECOND, THIRD, HOME], "all have their turn again"
    assert not any("connection to 127.0.0.1:2 lost" in line for line in log.lines[told:]), "nobody lost it"
    tries.made(tries.next())
    assert tries.go_home(is_there=True) and asked == [0, 0, 1, 2]
    tries.ended(SECOND, "", was_connected=True, is_wanted=True)
    tries.made(tries.next())
    assert not _is_due(tries), "at home"
    assert fail(tries) == SECOND
    tries.made(tries.next())
    assert asked[4:] == [0], "who was at home again begins anew"


def test_a_broker_that_came_back_gets_its_share_little_by_little() -> None:
    waits = [backoff.return_s(0) for _ in range(1000)]
    assert min(waits) >= 30 and max(waits) <= 60 and max(waits) - min(waits) > 25
    assert backoff.return_s(50) <= 2 * backoff.RETURN_LIMIT_S < math.inf


@pytest.mark.mosquitto
def test_goes_back_by_itself_and_nobody_hears_a_will(
    make_link: links.MakeLink,
    start_broker: Callable[[str], conftest.BrokerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff, "RETURN_S", 0.05)
    monkeypatch.setattr(network_thread, "LOOK_S", 0.05)
    home, other = start_broker("mosquitto"), start_broker("mosquitto")
    home.kill()
    actor: link.Link = make_link(home.address, other.address, will=("t/state", b"gone"), start=False)
    actor.retain("t/state", b"here")
    actor.start()
    actor.wait_connected(20.0)
    assert actor.address == other.address
    watcher = make_link(other.address, name="watcher", start=False)
    states = links.listen(watcher, "t/state")
    watcher.start()
    assert states.get(timeout=20.0)[1] == b"here"
    home.start()
    conftest.wait_until(lambda: actor.address == home.address and actor.connected, "it is back", 30.0)
    assert actor.connections == 2 and not actor.handler_errors
    assert watcher.publish("t/state", b"after", wait_s=10)
    assert states.get(timeout=20.0)[1] == b"after", "it said goodbye"
