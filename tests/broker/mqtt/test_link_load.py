"""A link under load: large beside small, many threads, brokers that stand still or die, handlers that fail."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from broker.mqtt import outbox
from broker.mqtt import paho_client as paho
from tests import conftest
from tests.broker.mqtt import conftest as links
from tests.fakes import log_reader


def test_a_failing_handler_does_not_end_the_connection(
    broker_address: str, make_link: links.MakeLink, log: log_reader.LogReader
) -> None:
    actor = make_link(broker_address, start=False)
    received = links.listen(actor, "actorq/t/good")

    def fail(topic: str, payload: bytes, retained: bool) -> None:
        raise ZeroDivisionError("boom")

    actor.subscribe("actorq/t/bad", fail)
    actor.start()
    actor.wait_connected(10)
    for _ in range(3):
        assert actor.publish("actorq/t/bad", b"x", wait_s=10)
    assert actor.publish("actorq/t/good", b"still here", wait_s=10)
    assert received.get(timeout=10)[1] == b"still here"
    assert actor.handler_errors == 3 and actor.connections == 1
    assert "actorq/t/bad failed: ZeroDivisionError: boom" in log.get()


def test_a_large_policy_passes_beside_a_stream_of_small_messages(
    broker_address: str, make_link: links.MakeLink
) -> None:
    learner = make_link(broker_address, name="learner")
    actor = make_link(broker_address, start=False)
    received = links.listen(actor, "actorq/t/#")
    actor.start()
    actor.wait_connected(10)
    policy = os.urandom(20_000_000)
    learner.retain("actorq/t/policy", policy)
    sent = 0
    deadline = time.monotonic() + 30
    while sent < 100:
        assert time.monotonic() < deadline
        if learner.publish("actorq/t/small", b"%d" % sent):
            sent += 1
        else:
            time.sleep(0.001)
    got = [received.get(timeout=20) for _ in range(101)]
    assert [m[1] for m in got if m[0] == "actorq/t/policy"] == [policy]
    assert [int(m[1]) for m in got if m[0] == "actorq/t/small"] == list(range(100))


def test_the_window_is_bounded_and_the_answer_is_no(
    start_broker: Callable[[str], conftest.BrokerProcess], make_link: links.MakeLink
) -> None:
    """A broker that stands still: publish neither blocks nor queues without end."""
    broker = start_broker("embedded")
    actor = make_link(broker.address)
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        taken = sum(actor.publish("actorq/t/x", bytes(100_000)) for _ in range(100))
        assert taken == outbox.IN_FLIGHT_LIMIT == actor.in_flight
        assert time.monotonic() - started < 2
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    conftest.wait_until(lambda: actor.in_flight == 0, "the rest is acknowledged")
    assert actor.publish("actorq/t/x", b"again", wait_s=10)


def test_of_what_is_retained_only_the_newest_waits_for_a_broker_that_stands_still(
    start_broker: Callable[[str], conftest.BrokerProcess], make_link: links.MakeLink
) -> None:
    broker = start_broker("mosquitto")
    watcher = make_link(broker.address, name="watcher", start=False)
    received = links.listen(watcher, "actorq/t/#")
    watcher.start()
    watcher.wait_connected(10)
    learner = make_link(broker.address, name="learner")
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        for n in range(1000):
            learner.retain("actorq/t/policy", b"%d" % n)
        learner.retain("actorq/t/end", b"end")
        assert learner.in_flight == outbox.IN_FLIGHT_LIMIT
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    got = [received.get(timeout=10)[1]]
    while got[-1] != b"end":
        got.append(received.get(timeout=10)[1])
    assert got == [*(b"%d" % n for n in range(outbox.IN_FLIGHT_LIMIT)), b"999", b"end"]


def test_what_does_not_fit_stays_in_the_socket(broker_address: str, make_link: links.MakeLink) -> None:
    """And keeps the connection, and comes when there is room."""
    room = threading.Event()
    receiver = make_link(broker_address, name="learner", start=False, has_room=room.is_set)
    received = links.listen(receiver, "actorq/t/x")
    receiver.start()
    receiver.wait_connected(10)
    sender = make_link(broker_address)
    for n in range(20):
        body = bytes([n]) * 100_000
        conftest.wait_until(functools.partial(sender.publish, "actorq/t/x", body), "the network thread lets us publish")
    conftest.wait_until(lambda: sender.in_flight == 0, "the broker has all of it")
    assert received.empty()
    room.set()
    assert [received.get(timeout=10)[1][0] for _ in range(20)] == list(range(20))
    assert receiver.connections == 1


def test_publishing_from_many_threads(broker_address: str, make_link: links.MakeLink) -> None:
    receiver = make_link(broker_address, name="learner", start=False)
    received = links.listen(receiver, "actorq/t/x")
    receiver.start()
    receiver.wait_connected(10)
    sender = make_link(broker_address)

    def send(start: int) -> None:
        for n in range(start, start + 100):
            while not sender.publish("actorq/t/x", b"%d" % n):
                time.sleep(0.001)

    threads = [threading.Thread(target=send, args=(100 * k,)) for k in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(received.get(timeout=10)[1]) for _ in range(500)) == list(range(500))
    assert sender.handler_errors == 0


def test_a_broker_that_dies_under_fire(
    real_broker: conftest.BrokerProcess, make_link: links.MakeLink, log: log_reader.LogReader
) -> None:
    """A loss may be noticed by the thread that publishes; that is a loss like any other, not an error."""
    actor = make_link(real_broker.address)
    stop = threading.Event()

    def fire() -> None:
        while not stop.is_set():
            if not actor.publish("actorq/t/x", bytes(20_000)):
                time.sleep(0.0005)

    threads = [threading.Thread(target=fire) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            actor.wait_connected(15)
            real_broker.restart()
            conftest.wait_until(lambda: actor.connected, "it is back", 15)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert actor.handler_errors == 0, log.lines


def test_what_is_retained_together_is_written_together(
    broker_address: str, make_link: links.MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write lets go of Python's lock, and a learner sends hundreds of receipts a second beside its updates."""
    learner = make_link(broker_address)
    client = learner._network.client
    assert client is not None
    written: list[int] = []
    send = client._sock_send

    def note(data: bytes | bytearray) -> int:
        written.append(len(data))
        return send(data)

    monkeypatch.setattr(client, "_sock_send", note)
    learner.retain_all([(f"actorq/t/{n}", bytes(100)) for n in range(10)])
    assert len(written) == 1 and written[0] > 10 * 100
    conftest.wait_until(lambda: learner.in_flight == 0, "all of it is acknowledged")


def test_what_comes_meanwhile_is_read_together(
    broker_address: str, make_link: links.MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read wakes a thread that takes Python's lock, and hundreds of actors send one by one."""
    learner = make_link(broker_address, name="learner", start=False)
    learner.gather_s = 0.1
    received = links.listen(learner, "actorq/t/#")
    learner.start()
    learner.wait_connected(10)
    reads: list[int] = []
    read = learner._loop._read

    def count(client: paho.Client) -> int:
        reads.append(received.qsize())
        return read(client)

    monkeypatch.setattr(learner._loop, "_read", count)
    sender = make_link(broker_address)
    for n in range(60):
        conftest.wait_until(functools.partial(sender.publish, "actorq/t/x", b"%d" % n), "there is room in flight")
    assert [int(received.get(timeout=10)[1]) for n in range(60)] == list(range(60))
    assert len(reads) < 12, "it was 24 to 55 where each was read as it came"
