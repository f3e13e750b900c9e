"""An enrolled client that subscribes without end: Mosquitto's memory is bounded, it is shut out, honest ones go on."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterator

import psutil
import pytest

from broker.fleet import identity
from broker.mqtt import link
from tests import conftest
from tests.fakes.connections import plain_client
from tests.fakes.connections.mqtt_packet import packet

MOST_BYTES = 30_000_000


def text(value: str) -> bytes:
    return struct.pack(">H", len(value)) + value.encode()


def subscribe(filters: list[str]) -> bytes:
    return packet(0x82, b"\0\1" + b"".join(text(one) + b"\1" for one in filters))


def enter(port: int, bundle: identity.Bundle, client_id: str) -> ssl.SSLSocket:
    """A connection below which no client library keeps to anything."""
    raw = bundle.tls().wrap_socket(socket.create_connection(("127.0.0.1", port), 20), server_hostname="127.0.0.1")
    user, password = text(bundle.actor_id), text(bundle.password)
    raw.sendall(packet(0x10, text("MQTT") + b"\4\xc2\0\x3c" + text(client_id) + user + password))
    assert raw.recv(4) == b"\x20\2\0\0"
    return raw


@pytest.fixture
def fleet() -> identity.Fleet:
    made = identity.Fleet.open("lab")
    for name in ("pi", "hog"):
        made.enroll(name)
    return made


@pytest.fixture
def broker(fleet: identity.Fleet, open_tmpdir: str) -> Iterator[conftest.BrokerProcess]:
    started = conftest.BrokerProcess("mosquitto", open_tmpdir, ["--tls", "--fleet", "lab"])
    yield started
    started.stop()


def rss_bytes(broker: conftest.BrokerProcess) -> int:
    """Returns the memory of the Mosquitto that serves now; 0 while there is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return sum(int(child.memory_info().rss) for child in psutil.Process(broker.process.pid).children())
    return 0


# Fifty levels each, as each is a node of Mosquitto's tree: 6 KB of its memory
MANY_PACKETS = [subscribe([f"{p}/{n}" + "/x" * 48 for n in range(300)]) for p in range(40)]
ONE_PACKET = [subscribe([f"{n}" + "/x" * 48 for n in range(12_000)])]


@pytest.mark.fault(16)
@pytest.mark.parametrize("packets", [MANY_PACKETS, ONE_PACKET], ids=["many packets", "one packet"])
def test_who_subscribes_without_end_is_shut_out(
    fleet: identity.Fleet, broker: conftest.BrokerProcess, packets: list[bytes]
) -> None:
    bundle = fleet.bundle("pi")
    where = f"mqtts://127.0.0.1:{broker.port}"
    honest = link.Link([where], "pi", username="pi", password=bundle.password, tls=bundle.tls())
    honest.start()
    try:
        honest.wait_connected(10)
        before = most = rss_bytes(broker)
        hog = enter(broker.port, fleet.bundle("hog"), "hog-1")
        with hog, contextlib.suppress(OSError):  # it is cut off
            for one in packets:
                hog.sendall(one)
                most = max(most, rss_bytes(broker))
                if not hog.recv(1):
                    break
                most = max(most, rss_bytes(broker))
        assert most < before + MOST_BYTES
        conftest.wait_until(lambda: honest.connected and honest.connections > 1, "the honest one is back")
        with plain_client.PlainClient(broker.port, "l", "learner", fleet.password, fleet.tls()) as learner:
            learner.subscribe("actorq/lab/actor/pi/experience")
            assert honest.publish("actorq/lab/actor/pi/experience", b"x", wait_s=10)
            assert learner.next()[1] == b"x"
        with plain_client.PlainClient(broker.port, "h", "hog", fleet.bundle("hog").password, fleet.tls()) as again:
            assert again.reason == "Not authorized"
        assert rss_bytes(broker) < before + MOST_BYTES
        new = fleet.enroll("hog")  # whoever has its keys now is someone else

        def let_in() -> bool:
            with plain_client.PlainClient(broker.port, "h", "hog", new.password, new.tls()) as client:
                return client.reason == "Success"

        conftest.wait_until(let_in, "the newly enrolled one is let in")
    finally:
        honest.close()


def test_an_actor_that_reconnects_often_stays(fleet: identity.Fleet, broker: conftest.BrokerProcess) -> None:
    """However its connections end: by goodbye, by none, by another with its id, by what is no MQTT."""
    bundle, pid = fleet.bundle("pi"), psutil.Process(broker.process.pid).children()[0].pid
    ends = (b"\xe0\0", b"", None, b"\x30\xff\xff\xff\xff")
    kept = []
    for n in range(64):
        raw = enter(broker.port, bundle, "pi-same" if ends[n % 4] is None else f"pi-{n}")
        raw.sendall(subscribe([f"actorq/lab/policy/main/{leaf}" for leaf in range(6)]))
        assert raw.recv(1) == b"\x90"
        end = ends[n % 4]
        if end is None:
            kept.append(raw)
            continue
        raw.sendall(end)
        raw.close()
    with enter(broker.port, bundle, "pi-last"):
        assert psutil.Process(broker.process.pid).children()[0].pid == pid, "Mosquitto was started anew"
    for raw in kept:
        raw.close()


def test_a_client_id_that_hides_whose_it_is(fleet: identity.Fleet, broker: conftest.BrokerProcess) -> None:
    """Mosquitto cuts its log line off before the name: nobody can be shut out, and it is started anew all the same."""
    before = psutil.Process(broker.process.pid).children()
    with contextlib.suppress(OSError, AssertionError):  # it may be gone before it has answered
        enter(broker.port, fleet.bundle("hog"), "x" * 2000).close()
    conftest.wait_until(lambda: psutil.Process(broker.process.pid).children() not in ([], before), "a new Mosquitto")
    conftest.wait_until(lambda: conftest.answers(broker.port), "it serves")
