"""Both brokers do what the contract asks of any: retained, wills, QoS 1, 40 MB, and stopping in time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from broker.contract import messages
from tests import conftest
from tests.fakes.connections import plain_client

WILLED = """
import sys, time
import paho.mqtt.client as mqtt
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="willed")
client.will_set("actorq/t/state", b"gone", 1, True)
client.on_connect = lambda *_: print("connected", flush=True)
client.connect("127.0.0.1", int(sys.argv[1]))
client.loop_forever()
"""


def test_a_40_mb_policy_is_kept_for_a_late_subscriber(real_broker: conftest.BrokerProcess) -> None:
    policy = os.urandom(messages.MAX_POLICY_BYTES) + bytes(70_000)  # as it travels: with header and seal
    with plain_client.PlainClient(real_broker.port, "learner") as learner:
        learner.publish("actorq/t/policy", policy, retain=True)
    with plain_client.PlainClient(real_broker.port, "late") as late:
        late.subscribe("actorq/t/policy")
        topic, payload, retained = late.next(60)
    assert retained and topic == "actorq/t/policy"
    assert hashlib.sha256(payload).digest() == hashlib.sha256(policy).digest()


def test_the_newest_retained_message_replaces_and_an_empty_one_clears(real_broker: conftest.BrokerProcess) -> None:
    with plain_client.PlainClient(real_broker.port, "a") as one:
        for payload in (b"old", b"new"):
            one.publish("actorq/t/kept", payload, retain=True)
        one.publish("actorq/t/cleared", b"x", retain=True)
        one.publish("actorq/t/cleared", b"", retain=True)
        one.publish("actorq/t/live", b"y")
    with plain_client.PlainClient(real_broker.port, "b") as two:
        two.subscribe("actorq/#")
        assert two.next() == ("actorq/t/kept", b"new", True)
        two.publish("actorq/t/end", b"")
        assert two.next() == ("actorq/t/end", b"", False)


def test_nobody_is_sent_what_he_did_not_subscribe_to(real_broker: conftest.BrokerProcess) -> None:
    """Left alone, amqtt sends a new client the retained messages that others subscribed to."""
    with plain_client.PlainClient(real_broker.port, "watcher") as watcher:
        watcher.subscribe("actorq/#")
        watcher.publish("actorq/t/policy", b"large", retain=True)
        assert watcher.next()[1] == b"large"
        with plain_client.PlainClient(real_broker.port, "actor") as actor:
            actor.subscribe("actorq/t/mine")
            actor.publish("actorq/t/mine", b"ping")
            assert actor.next() == ("actorq/t/mine", b"ping", False)
            assert actor.received.empty()


def test_many_connects_while_others_subscribe(real_broker: conftest.BrokerProcess) -> None:
    with plain_client.PlainClient(real_broker.port, "keeper") as keeper:
        keeper.subscribe("actorq/#")
        for n in range(20):
            keeper.publish(f"actorq/t/{n}", bytes(1000), retain=True)

        def use(name: str) -> None:
            for n in range(5):
                with plain_client.PlainClient(real_broker.port, f"{name}-{n}") as client:
                    client.subscribe(f"actorq/own/{name}/{n}")
                    client.publish(f"actorq/own/{name}/{n}", b"echo")
                    served.put(client.next(10)[1])

        served: queue.Queue[bytes] = queue.Queue()
        threads = [threading.Thread(target=use, args=(f"c{n}",)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert served.qsize() == 30


def test_the_will_of_a_killed_process_is_sent_and_kept(real_broker: conftest.BrokerProcess) -> None:
    with plain_client.PlainClient(real_broker.port, "watcher") as watcher:
        watcher.subscribe("actorq/t/#")
        with subprocess.Popen(
            [sys.executable, "-c", WILLED, str(real_broker.port)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == "connected\n"
            child.kill()
        assert watcher.next() == ("actorq/t/state", b"gone", False)
    with plain_client.PlainClient(real_broker.port, "late") as late:
        late.subscribe("actorq/t/state")
        assert late.next() == ("actorq/t/state", b"gone", True)


def test_qos_1_delivers_everything_in_order(real_broker: conftest.BrokerProcess) -> None:
    """More than the 1000 that Mosquitto queues by default, to a subscriber that starts reading late."""
    count = 3000
    with plain_client.PlainClient(real_broker.port, "learner") as learner:
        learner.subscribe("actorq/t/experience")
        with plain_client.PlainClient(real_broker.port, "actor") as actor:
            for n in range(count):
                actor.publish("actorq/t/experience", b"%d" % n, wait=n == count - 1)
        got = [int(learner.next()[1]) for _ in range(count)]
    assert got == list(range(count))


def test_too_large_is_refused_in_the_open(mosquitto: conftest.BrokerProcess) -> None:
    """Mosquitto cuts the connection; it does not acknowledge and forget."""
    with socket.create_connection(("127.0.0.1", mosquitto.port), 10) as raw:
        raw.sendall(bytes.fromhex("100f00044d5154540402003c0003" + b"big".hex()))
        assert raw.recv(4) == b"\x20\x02\x00\x00"
        size = messages.MAX_PACKET_BYTES + 1
        length = bytes((size >> 7 * n & 127) | (128 if n < 3 else 0) for n in range(4))
        raw.sendall(b"\x32" + length)
        assert raw.recv(4) == b""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stops_in_time_although_a_client_does_not_read(real_broker: conftest.BrokerProcess, signum: int) -> None:
    with (
        plain_client.PlainClient(real_broker.port, "sender") as sender,
        socket.create_connection(("127.0.0.1", real_broker.port), 10) as deaf,
    ):
        deaf.sendall(bytes.fromhex("101000044d5154540402003c0004") + b"deaf")
        assert deaf.recv(4) == b"\x20\x02\x00\x00"
        deaf.sendall(bytes.fromhex("820800010003") + b"t/#" + b"\x00")
        assert deaf.recv(5)[:1] == b"\x90"
        for _ in range(3):
            sender.publish("t/x", bytes(5_000_000))
        started = time.monotonic()
        assert real_broker.stop(signum) == 0
        assert time.monotonic() - started < 4.0
    assert not conftest.answers(real_broker.port)


def test_a_killed_broker_comes_back_on_its_port(real_broker: conftest.BrokerProcess) -> None:
    port = real_broker.port
    real_broker.restart()
    assert real_broker.port == port and conftest.answers(port)


@pytest.mark.parametrize("kind", conftest.KINDS)
def test_garbage_does_not_end_it(kind: str, start_broker: Callable[[str], conftest.BrokerProcess]) -> None:
    broker = start_broker(kind)
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x10\xff\xff\xff\xff", b"\x10\x02\x00\x04", os.urandom(2000)):
        # It may hang up on us at once.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", broker.port), 10) as raw:
            raw.sendall(junk)
            raw.shutdown(socket.SHUT_WR)
    with plain_client.PlainClient(broker.port, "after") as client:
        client.subscribe("actorq/t/x")
        client.publish("actorq/t/x", b"still here")
        assert client.next()[1] == b"still here"
