"""The link, against real brokers of both kinds: birth, will, coming back, failing over, and saying goodbye."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from broker.contract import errors
from broker.fleet import identity
from broker.mqtt import link, network_thread, paho_client
from broker.serve.mosquitto import access, process
from tests import conftest
from tests.broker.mqtt import conftest as links
from tests.fakes import log_reader
from tests.fakes.connections import plain_client

STATE = "actorq/t/actor/pi/state"
ACTOR = """
import sys, time
from broker.mqtt import link
actor = link.Link(sys.argv[1:], "pi", will=("actorq/t/actor/pi/state", b"offline"))
actor.retain("actorq/t/actor/pi/state", b"online")
actor.start()
actor.wait_connected(10)
print("connected", flush=True)
time.sleep(60)
"""


# -- connecting -------------------------------------------------------------------------------------------------------


def test_birth_comes_after_the_subscriptions(broker_address: str, make_link: links.MakeLink) -> None:
    """Whoever answers a birth at once must be heard, so nothing may be sent before the SUBACK."""
    answerer = make_link(broker_address, name="learner", start=False)

    def answer(topic: str, payload: bytes, retained: bool) -> None:
        answerer.publish("actorq/t/actor/pi/assignment", b"go")

    answerer.subscribe(STATE, answer)
    answerer.start()
    answerer.wait_connected(10)
    for n in range(5):
        actor = make_link(broker_address, name=f"pi-{n}", start=False)
        received = links.listen(actor, "actorq/t/actor/pi/assignment")
        actor.retain(STATE, b"online")
        actor.start()
        assert received.get(timeout=10) == ("actorq/t/actor/pi/assignment", b"go", False)


@pytest.mark.fault(16)
def test_topics_are_followed_and_no_longer(broker_address: str, make_link: links.MakeLink) -> None:
    """Named before it connects and while it is; and after a change nothing that is retained is said again."""
    reader = make_link(broker_address, name="reader", start=False)
    received: queue.Queue[tuple[str, bytes]] = queue.Queue()
    reader.route("actorq/t/actor/+/state", lambda topic, payload, _: received.put((topic.split("/")[3], payload)))
    reader.follow(["actorq/t/actor/a/state", "actorq/t/actor/last/state"])
    reader.start()
    reader.wait_connected(10)
    writer = make_link(broker_address, name="writer")
    writer.wait_connected(10)
    rounds = iter(range(1000))

    def heard() -> set[str]:
        """Returns which of a and b are heard of in what is sent now."""
        mark = str(next(rounds)).encode()
        for name in ("a", "b", "last"):
            topic = f"actorq/t/actor/{name}/state"
            conftest.wait_until(lambda: writer.publish(topic, mark), "sent")  # noqa: B023  called at once
        found = set[str]()
        while "last" not in found:
            name, payload = received.get(timeout=10)
            found |= {name} if payload == mark else set()
        return found - {"last"}

    assert heard() == {"a"}
    reader.follow(["actorq/t/other"], "other")
    reader.follow((), "other")
    assert heard() == {"a"}, "what another group follows is its own"
    reader.follow(["actorq/t/actor/b/state", "actorq/t/actor/last/state"])
    conftest.wait_until(lambda: heard() == {"b"}, "b is followed, and a no longer")
    assert reader.connections == 1


def test_a_filter_that_is_given_up_is_heard_no_more_and_others_are(
    broker_address: str, make_link: links.MakeLink
) -> None:
    """Nor again after a new connection, nor on its way: what is published does not come to this side."""
    reader = make_link(broker_address, name="reader", start=False)
    received: queue.Queue[str] = queue.Queue()
    for name in ("a", "b"):
        reader.subscribe(f"actorq/t/{name}", lambda topic, *_: received.put(topic[-1]))
    reader.start()
    reader.wait_connected(10)
    writer = make_link(broker_address, name="writer")
    writer.wait_connected(10)

    def heard() -> str:
        """Returns what is heard of an a and a b that are sent now."""
        for name in ("a", "b"):
            conftest.wait_until(lambda: writer.publish(f"actorq/t/{name}", b"x" * 1000), "sent")  # noqa: B023
        found = ""
        while not found.endswith("b"):
            found += received.get(timeout=10)
        return found

    assert heard() == "ab"
    reader.unsubscribe("actorq/t/a")
    conftest.wait_until(lambda: heard() == "b", "a is heard no more")
    before = reader.bytes_received
    assert heard() == "b"
    assert reader.bytes_received == before + 1000, "it is not even sent"


def test_the_state_is_sent_last(broker_address: str, make_link: links.MakeLink) -> None:
    watcher = make_link(broker_address, name="watcher", start=False)
    received = links.listen(watcher, "actorq/t/#")
    watcher.start()
    watcher.wait_connected(10)
    actor = make_link(broker_address, start=False, will=(STATE, b"offline"))
    actor.retain(STATE, b"online")
    actor.retain("actorq/t/policy", b"policy")
    actor.retain("actorq/t/receipt", lambda: b"made anew")
    actor.start()
    assert [received.get(timeout=10)[1] for _ in range(3)] == [b"policy", b"made anew", b"online"]


def test_a_message_waits_for_the_network_thread_as_long_as_it_is_told(
    broker_address: str, make_link: links.MakeLink
) -> None:
    one = make_link(broker_address, start=False)
    inside, leave = threading.Event(), threading.Event()

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        inside.set()  # its thread has the link's lock, as when it writes megabytes
        leave.wait(10)

    one.subscribe("actorq/t/busy", handle)
    one.start()
    one.wait_connected(10)
    assert one.publish("actorq/t/busy", b"go", wait_s=10)
    assert inside.wait(10)
    assert not one.publish("actorq/t/part", b"at once, or not at all")
    threading.Timer(0.05, leave.set).start()
    assert one.publish("actorq/t/part", b"later", wait_s=10)


def test_everything_is_said_to_be_ready_before_on_connect(broker_address: str, make_link: links.MakeLink) -> None:
    order: queue.Queue[bool] = queue.Queue()
    actor: link.Link = make_link(broker_address, start=False, on_connect=lambda: order.put(actor.connected))
    actor.start()
    assert order.get(timeout=10) is True
    assert actor.address == broker_address and actor.connections == 1


def test_the_will_is_the_births_twin(broker_address: str, make_link: links.MakeLink) -> None:
    """Killed -9: the broker says offline at the same topic, retained, to those listening and those who come later."""
    watcher = make_link(broker_address, name="watcher", start=False)
    received = links.listen(watcher, STATE)
    watcher.start()
    watcher.wait_connected(10)
    with subprocess.Popen([sys.executable, "-c", ACTOR, broker_address], stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None and actor.stdout.readline() == "connected\n"
        assert received.get(timeout=10) == (STATE, b"online", False)
        actor.kill()
    assert received.get(timeout=10) == (STATE, b"offline", False)
    late = make_link(broker_address, name="late", start=False)
    received = links.listen(late, STATE)
    late.start()
    assert received.get(timeout=10) == (STATE, b"offline", True)


def test_subscribing_and_retaining_while_connected(broker_address: str, make_link: links.MakeLink) -> None:
    actor = make_link(broker_address)
    received = links.listen(actor, "actorq/t/command")
    actor.retain("actorq/t/command", b"x" * 100_000)
    assert received.get(timeout=10)[1] == b"x" * 100_000
    assert actor.bytes_received >= 100_000 and actor.bytes_sent >= 100_000


def test_listens_before_it_says_anything(broker_address: str, make_link: links.MakeLink) -> None:
    """Who must not overwrite what is retained hears it first."""
    first = make_link(broker_address)
    first.retain("actorq/t/a", b"first")
    conftest.wait_until(lambda: first.in_flight == 0, "it is retained")
    second = make_link(broker_address, name="second", start=False, listens_first=True)
    heard: links.Messages = queue.Queue()

    def mute(*message: Any) -> None:
        heard.put(message)
        second.mute()

    second.subscribe("actorq/t/a", mute)
    second.retain("actorq/t/a", b"second")
    second.start()
    second.wait_connected(10)
    assert heard.get(timeout=10) == ("actorq/t/a", b"first", True)
    late = make_link(broker_address, name="late", start=False)
    received = links.listen(late, "actorq/t/a")
    late.start()
    assert received.get(timeout=10)[1] == b"first"


def test_an_empty_list_of_brokers() -> None:
    with pytest.raises(errors.ConfigError, match="--broker HOST"):
        link.Link([], "pi")


# -- coming back ------------------------------------------------------------------------------------------------------


def test_everything_retained_is_sent_again_to_a_broker_that_forgot(
    real_broker: conftest.BrokerProcess, make_link: links.MakeLink, log: log_reader.LogReader
) -> None:
    actor = make_link(real_broker.address, start=False, will=(STATE, b"offline"))
    actor.retain("actorq/t/policy", b"policy")
    actor.retain(STATE, b"online")
    heard = links.listen(actor, "actorq/t/ping")
    actor.start()
    actor.wait_connected(10)
    real_broker.kill()
    conftest.wait_until(lambda: not actor.connected, "the loss is noticed")
    assert not actor.publish("actorq/t/x", b"lost?"), "publish must say no while there is no broker"
    real_broker.restart()
    actor.wait_connected(15)
    with plain_client.PlainClient(real_broker.port, "late") as late:
        late.subscribe("actorq/#")
        found = dict(late.next()[:2] for _ in range(2))
        late.publish("actorq/t/ping", b"ping")
        assert heard.get(timeout=10)[1] == b"ping", "subscriptions stand again"
    assert found == {"actorq/t/policy": b"policy", STATE: b"online"}
    assert actor.connections == 2 and actor.handler_errors == 0
    lines = log.lines
    assert len(lines) == 2 and "lost" in lines[0] and "again" in lines[1], lines


def test_fails_over_to_the_next_broker_and_back(
    start_broker: Callable[[str], conftest.BrokerProcess], make_link: links.MakeLink
) -> None:
    first, second = start_broker("embedded"), start_broker("embedded")
    actor = make_link(first.address, second.address, will=(STATE, b"offline"))
    actor.retain(STATE, b"online")
    assert actor.address == first.address
    first.kill()
    conftest.wait_until(lambda: actor.connected and actor.address == second.address, "it moved to the second")
    with plain_client.PlainClient(second.port, "late") as late:
        late.subscribe(STATE)
        assert late.next() == (STATE, b"online", True)
    first.restart()
    second.kill()
    conftest.wait_until(lambda: actor.connected and actor.address == first.address, "it moved back")


def test_a_broker_that_is_not_there_yet(
    start_broker: Callable[[str], conftest.BrokerProcess], make_link: links.MakeLink
) -> None:
    broker = start_broker("embedded")
    broker.kill()
    actor = make_link(broker.address, start=False)
    actor.start()
    with pytest.raises(
        errors.BrokerUnreachable, match=f"no broker answered.*\n.*{broker.address}.*\n.*actorq-broker up"
    ):
        actor.wait_connected(0.5)
    broker.restart()
    actor.wait_connected(15)


def test_a_port_that_accepts_and_says_nothing(make_link: links.MakeLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_thread, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        actor = make_link(f"127.0.0.1:{mute.getsockname()[1]}", start=False)
        actor.start()
        first, _ = mute.accept()
        second, _ = mute.accept()  # it gave up the first connection and tried again
        with first, second:
            first.settimeout(10)
            while first.recv(4096):
                pass  # reads CONNECT, then the end: the abandoned socket was closed
        assert not actor.connected and actor.handler_errors == 0


def test_refused_by_name_says_so(make_link: links.MakeLink, log: log_reader.LogReader) -> None:
    conftest.require("mosquitto")
    fleet = identity.Fleet.open("t")
    admission = access.Admission(fleet.users(), fleet.authority.certificate, fleet.broker_credential())
    with process.Mosquitto("127.0.0.1", 0, fleet="t", admission=admission) as mosquitto:
        address, tls = f"mqtts://127.0.0.1:{mosquitto.port}", fleet.tls()
        make_link(address, start=False, username="learner", password="wrong", tls=tls).start()
        assert "Not authorized" in log.get()
        assert make_link(address, username="learner", password=fleet.password, tls=tls).connected


def test_a_network_thread_that_died_is_replaced(
    broker_address: str, make_link: links.MakeLink, monkeypatch: pytest.MonkeyPatch, log: log_reader.LogReader
) -> None:
    monkeypatch.setattr(network_thread, "WATCHDOG_S", 0.6)
    actor = make_link(broker_address, start=False)
    with monkeypatch.context() as broken:
        broken.setattr(threading, "excepthook", lambda *_: None)
        broken.setattr(actor._network, "_run", lambda generation: None)
        actor.start()
    assert "stopped turning" in log.get()
    actor.wait_connected(10)
    assert actor.publish("actorq/t/x", b"alive", wait_s=10)


def test_a_network_thread_that_stood_still_leaves_the_connection_to_the_one_that_replaced_it(
    broker_address: str, make_link: links.MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_thread, "WATCHDOG_S", 0.6)
    connect, standing, go_on = paho_client.Client.connect, threading.Event(), threading.Event()

    def hang(client: paho_client.Client, *args: Any, **options: Any) -> Any:
        if not standing.is_set():  # the first one alone, as if it looked the broker's name up
            standing.set()
            assert go_on.wait(30)
        return connect(client, *args, **options)

    monkeypatch.setattr(paho_client.Client, "connect", hang)
    actor = make_link(broker_address, start=False)
    received = links.listen(actor, "actorq/t/x")
    actor.start()
    assert standing.wait(10)
    first = actor._network._thread
    assert first is not None
    actor.wait_connected(10)
    client = actor._network.client
    go_on.set()
    first.join(10)
    assert actor._network.client is client and actor.connected and actor.connections == 1
    assert actor.publish("actorq/t/x", b"alive", wait_s=10)
    assert received.get(timeout=10)[1] == b"alive"


# -- goodbye ----------------------------------------------------------------------------------------------------------


def test_close_says_farewell_and_withdraws_the_will(
    real_broker: conftest.BrokerProcess, make_link: links.MakeLink
) -> None:
    watcher = make_link(real_broker.address, name="watcher", start=False)
    received = links.listen(watcher, STATE)
    watcher.start()
    watcher.wait_connected(10)
    actor = link.Link([real_broker.address], "pi", will=(STATE, b"vanished"))
    actor.retain(STATE, b"online")
    actor.start()
    actor.wait_connected(10)
    assert received.get(timeout=10)[1] == b"online"  # else a farewell may take its place before it was sent
    started = time.monotonic()
    actor.close((STATE, b"farewell"), timeout_s=30)
    assert time.monotonic() - started < 15, "it waited until its time was up"
    assert watcher.publish(STATE, b"end", wait_s=10)
    assert [received.get(timeout=10)[1] for _ in range(2)] == [b"farewell", b"end"]
    with plain_client.PlainClient(real_broker.port, "late") as late:
        late.subscribe(STATE)
        assert late.next() == (STATE, b"farewell", True)


def test_close_without_a_broker_is_quick() -> None:
    actor = link.Link(["127.0.0.1:1"], "pi")  # nobody listens there
    actor.start()
    started = time.monotonic()
    actor.close((STATE, b"farewell"))
    assert time.monotonic() - started < 3
    assert not actor._network.is_alive
