"""TLS as an attacker on the network meets it: on a real Mosquitto, with Link and with bare sockets."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract import errors
from broker.fleet import certificates, client_tls, identity
from broker.mqtt import link
from broker.serve.mosquitto import access, process
from tests import conftest
from tests.fakes.connections import plain_client

SECRET = b"observations of a kitchen"


@pytest.fixture
def fleet() -> identity.Fleet:
    made = identity.Fleet.open("lab")
    for name in ("one", "two"):
        made.enroll(name)
    return made


@pytest.fixture
def port(fleet: identity.Fleet) -> Iterator[int]:
    conftest.require("mosquitto")
    admission = access.Admission(fleet.users(), fleet.authority.certificate, fleet.broker_credential())
    with process.Mosquitto("127.0.0.1", 0, fleet="lab", admission=admission) as mosquitto:
        yield mosquitto.port


@pytest.fixture
def links() -> Iterator[list[link.Link]]:
    made: list[link.Link] = []
    yield made
    for one in made:
        one.close()


def as_actor(bundle: identity.Bundle, port: int, links: list[link.Link]) -> link.Link:
    links.append(
        link.Link(
            [f"mqtts://127.0.0.1:{port}"],
            bundle.actor_id,
            username=bundle.actor_id,
            password=bundle.password,
            tls=bundle.tls(),
        )
    )
    return links[-1]


def as_learner(fleet: identity.Fleet, port: int) -> plain_client.PlainClient:
    return plain_client.PlainClient(port, "l", "learner", fleet.password, fleet.tls())


def test_a_large_policy_and_small_messages_pass_a_link(
    fleet: identity.Fleet, port: int, links: list[link.Link]
) -> None:
    arrived: queue.Queue[bytes] = queue.Queue()
    actor = as_actor(fleet.bundle("one"), port, links)
    actor.subscribe("actorq/lab/policy/main/whole", lambda topic, payload, retained: arrived.put(payload))
    actor.start()
    actor.wait_connected(10)
    payloads = [bytes([i]) * size for i, size in enumerate((10, 4_000_000, 16_384, *[100] * 50))]
    with as_learner(fleet, port) as learner:
        for payload in payloads:
            learner.publish("actorq/lab/policy/main/whole", payload, wait=False)
        assert [arrived.get(timeout=20) for _ in payloads] == payloads


def test_messages_that_share_a_tls_record(fleet: identity.Fleet, links: list[link.Link], tmp_path: Path) -> None:
    """Mosquitto sends one packet a record, others do not. The first read decrypts all; poll sees an empty socket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "broker.pem").write_bytes(fleet.broker_credential())
    context.load_cert_chain(tmp_path / "broker.pem")
    listening = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve() -> None:
        raw, _ = listening.accept()
        with context.wrap_socket(raw, server_side=True) as client:
            client.recv(4096)  # CONNECT
            client.sendall(b"\x20\x02\x00\x00")
            subscribe = client.recv(4096)
            publish = b"".join(b"\x30\x04\x00\x01t" + bytes([i]) for i in range(20))
            client.sendall(b"\x90\x03" + subscribe[2:4] + b"\x01" + publish)
            done.wait(20)

    server = threading.Thread(target=serve)
    server.start()
    arrived: queue.Queue[bytes] = queue.Queue()
    with listening:
        actor = as_actor(fleet.bundle("one"), listening.getsockname()[1], links)
        actor.subscribe("t", lambda topic, payload, retained: arrived.put(payload))
        actor.start()
        try:
            assert [arrived.get(timeout=3) for _ in range(20)] == [bytes([i]) for i in range(20)]
        finally:
            done.set()
            server.join()


def test_a_listener_on_the_wire_reads_nothing(fleet: identity.Fleet, port: int, links: list[link.Link]) -> None:
    """All bytes between a link and its broker, taken down by a relay between them."""
    wire = bytearray()
    listening = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                wire.extend(data)
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()

    def relay() -> None:
        near, _ = listening.accept()
        far = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=pump, args=(far, near), daemon=True).start()
        pump(near, far)

    threading.Thread(target=relay, daemon=True).start()
    bundle = fleet.bundle("one")
    with as_learner(fleet, port) as learner, listening:
        learner.subscribe("actorq/lab/actor/one/experience")
        actor = as_actor(bundle, listening.getsockname()[1], links)
        actor.start()
        actor.wait_connected(10)
        assert actor.publish("actorq/lab/actor/one/experience", SECRET, wait_s=10)
        assert learner.next()[1] == SECRET
    assert len(wire) > 1000, "the relay was not used"
    for text in (SECRET, bundle.password.encode(), b"actorq/lab", bundle.mac_key):
        assert text not in wire


def test_a_client_without_a_certificate(fleet: identity.Fleet, port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=fleet.authority.certificate.decode())
    bundle = fleet.bundle("one")
    with plain_client.PlainClient(port, "x", "one", bundle.password, context) as client:
        assert client.reason == "" and client.disconnected.wait(5)


def test_a_client_without_tls(fleet: identity.Fleet, port: int) -> None:
    with plain_client.PlainClient(port, "x", "one", fleet.bundle("one").password) as client:
        assert client.reason == "" and client.disconnected.wait(5)


def test_a_certificate_of_another_fleet(
    fleet: identity.Fleet, port: int, links: list[link.Link], tmp_path: Path
) -> None:
    """Even with the right password, and even though the other authority bears the same name.

    The refusal comes after the handshake, as an alert and a closed socket: the alert is read, or the client's CONNECT
    meets the closed socket first. Which of them happens first is chance; what is said of both must be right.
    """
    other = identity.Fleet.open("lab", tmp_path / "other").enroll("one")
    context = client_tls.client_context(fleet.authority.certificate, other.credential.encode())
    links.append(
        link.Link(
            [f"mqtts://127.0.0.1:{port}"], "x", username="one", password=fleet.bundle("one").password, tls=context
        )
    )
    links[-1].start()
    with pytest.raises(errors.BrokerUnreachable, match="does not let this user in"):
        links[-1].wait_connected(3)


def test_a_broker_that_hangs_up_after_the_handshake(
    fleet: identity.Fleet, links: list[link.Link], tmp_path: Path
) -> None:
    """A refused certificate whose alert is never seen: the connection ends without CONNACK."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "broker.pem").write_bytes(fleet.broker_credential())
    context.load_cert_chain(tmp_path / "broker.pem")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):  # until the test closes it
                while True:
                    raw, _ = listening.accept()
                    context.wrap_socket(raw, server_side=True).close()

        threading.Thread(target=serve, daemon=True).start()
        actor = as_actor(fleet.bundle("one"), listening.getsockname()[1], links)
        actor.start()
        with pytest.raises(errors.BrokerUnreachable, match="does not let this user in .*hung up"):
            actor.wait_connected(1)
        listening.shutdown(socket.SHUT_RDWR)


def test_a_certificate_without_the_password(fleet: identity.Fleet, port: int) -> None:
    bundle = fleet.bundle("one")
    for password in ("", "wrong", fleet.bundle("two").password):
        with plain_client.PlainClient(port, "x", "one", password, bundle.tls()) as client:
            assert client.reason == "Not authorized"


def test_an_enrolled_actor_at_the_topics_of_others(fleet: identity.Fleet, port: int) -> None:
    bundle = fleet.bundle("one")
    foreign = [
        "actorq/lab/actor/two/state",
        "actorq/lab/actor/two/experience",
        "actorq/lab/actor/one/receipt",
        "actorq/lab/policy/main/whole",
        "actorq/lab/learner/state",
    ]
    with as_learner(fleet, port) as learner:
        learner.subscribe("actorq/lab/#")
        with plain_client.PlainClient(port, "one", "one", bundle.password, bundle.tls()) as actor:
            actor.subscribe("actorq/lab/#")
            for topic in (*foreign, "actorq/lab/actor/one/experience"):
                actor.publish(topic, b"x")
            assert learner.next()[0] == "actorq/lab/actor/one/experience"
            learner.publish("actorq/lab/actor/two/command", b"not for one")
            learner.publish("actorq/lab/actor/one/command", b"for one")
            assert actor.next()[1] == b"for one"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.*:DeprecationWarning")
def test_old_versions_of_tls(fleet: identity.Fleet, port: int, version: ssl.TLSVersion) -> None:
    context = fleet.tls()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    with socket.create_connection(("127.0.0.1", port)) as raw, pytest.raises(ssl.SSLError, match="(?i)version"):
        context.wrap_socket(raw, server_hostname="127.0.0.1")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_current_versions_of_tls(fleet: identity.Fleet, port: int, version: ssl.TLSVersion) -> None:
    context = fleet.tls()
    context.minimum_version = context.maximum_version = version
    with plain_client.PlainClient(port, "l", "learner", fleet.password, context) as client:
        assert client.reason == "Success"


@pytest.mark.parametrize("pretender", ["an enrolled actor", "another fleet", "another name"])
def test_a_broker_that_is_none_of_the_fleets(
    fleet: identity.Fleet, links: list[link.Link], tmp_path: Path, pretender: str
) -> None:
    """Who stands between an actor and its broker learns neither password nor observation: the handshake fails."""
    conftest.require("mosquitto")
    credential = {
        "an enrolled actor": fleet.bundle("two").credential.encode(),
        "another fleet": identity.Fleet.open("lab", tmp_path / "other").broker_credential(),
        "another name": fleet.authority.broker("lab", ["desk.local", "10.0.0.1"]),
    }[pretender]
    admission = access.Admission(fleet.users(), fleet.authority.certificate, credential)
    with process.Mosquitto("127.0.0.1", 0, fleet="lab", admission=admission) as mosquitto:
        actor = as_actor(fleet.bundle("one"), mosquitto.port, links)
        actor.start()
        with pytest.raises(errors.BrokerUnreachable, match="not one of this fleet, or not under this name"):
            actor.wait_connected(3)


def test_tls_without_a_certificate_is_refused_before_connecting() -> None:
    with pytest.raises(errors.IdentityError, match="asks for a certificate"):
        link.Link(["desk.local"], "pi", username="pi", password="secret")


# -- certificates -----------------------------------------------------------------------------------------------------


def test_a_pi_without_a_clock_is_not_refused(fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography import x509

    pems = [fleet.authority.certificate, fleet.broker_credential(renew=True), fleet.learner_credential(renew=True)]
    for pem in (*pems, fleet.bundle("one").credential.encode()):
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc.year == 2020
        assert certificate.not_valid_after_utc.year < 2050


def test_certificates_are_renewed_before_they_end(fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, learner = fleet.broker_credential(), fleet.learner_credential()
    assert (fleet.broker_credential(), fleet.learner_credential()) == (broker, learner)
    monkeypatch.setattr(certificates, "ends_soon", lambda pem: pem in (broker, learner))
    assert fleet.broker_credential() != broker and fleet.learner_credential() != learner


@pytest.mark.parametrize(("days", "soon"), [(1, True), (200, True), (300, False)])
def test_what_ends_soon(fleet: identity.Fleet, days: int, soon: bool) -> None:
    assert certificates.ends_soon(fleet.authority.client("lab", "pi", days)) is soon


def test_a_bundle_with_a_broken_certificate(fleet: identity.Fleet) -> None:
    with pytest.raises(errors.IdentityError, match="cannot be used"):
        client_tls.client_context(fleet.authority.certificate, b"nothing")


@pytest.mark.parametrize("host", ["b\u00fcro", "desk local\u2603"])
def test_names_that_no_certificate_can_carry(fleet: identity.Fleet, host: str) -> None:
    with pytest.raises(errors.ConfigError, match="neither a host name nor an address"):
        fleet.broker_credential([host])
