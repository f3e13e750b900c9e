"""The command actorq-broker: what it says, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker import __main__ as command
from broker.contract import address, errors
from broker.fleet import identity
from broker.program import children
from broker.serve import listener
from broker.serve.mosquitto import process
from tests import conftest
from tests.fakes.connections import plain_client


def run(*argv: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "broker", *argv], capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.parametrize("argv", [["--help"], ["up", "--help"], ["enroll", "--help"]])
def test_help_answers_at_once(argv: list[str]) -> None:
    started = time.monotonic()
    done = run(*argv)
    assert done.returncode == 0 and "usage: actorq-broker" in done.stdout
    assert time.monotonic() - started < 5  # one second on an idle machine; here others may be testing too


@pytest.mark.parametrize("argv", [[], ["down"], ["up", "--kind", "rabbit"], ["up", "--port", "x"], ["enroll"]])
def test_usage_errors(argv: list[str]) -> None:
    done = run(*argv)
    assert done.returncode == errors.EXIT_USAGE and "usage:" in done.stderr and not done.stdout


# -- up ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", conftest.KINDS)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_up_says_where_it_is_and_ends_cleanly(kind: str, signum: int) -> None:
    conftest.require(kind)
    up = subprocess.Popen(
        [sys.executable, "-m", "broker", "up", "--kind", kind, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert up.stdout is not None
    ready = json.loads(up.stdout.readline())
    assert ready["kind"] == kind and ready["host"] == "127.0.0.1" and conftest.answers(ready["port"])
    assert os.path.exists(f"/proc/{ready['pid']}") or sys.platform != "linux"
    started = time.monotonic()
    up.send_signal(signum)
    out, err = up.communicate(timeout=20)
    assert up.returncode == 0 and out == ""
    assert time.monotonic() - started < 5
    assert f"127.0.0.1:{ready['port']} (this machine only)" in err
    assert f"actorq-learner train --broker 127.0.0.1:{ready['port']}" in err
    assert err.endswith("broker stopped\n") and "Traceback" not in err
    assert not conftest.answers(ready["port"])


@pytest.mark.mosquitto
def test_several_brokers_of_one_command_and_one_that_ends_is_started_again() -> None:
    conftest.require("mosquitto")
    with subprocess.Popen(
        [sys.executable, "-m", "broker", "up", "--brokers", "3", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=children.die_with_parent(),  # noqa: PLW1509
    ) as up:
        assert up.stdout is not None and up.stderr is not None
        serving = [json.loads(up.stdout.readline()) for _ in range(3)]
        ports = [one["port"] for one in serving]
        assert len(set(ports)) == 3 and all(conftest.answers(port) for port in ports)
        os.kill(serving[1]["pid"], signal.SIGKILL)
        said = ""
        while "started it again" not in said:
            said += (line := up.stderr.readline())
            assert line, said
        assert all(conftest.answers(port) for port in ports)
        assert f"--broker {','.join(f'127.0.0.1:{port}' for port in ports)}" in said
        up.terminate()
        assert up.wait(20) == 0 and not any(conftest.answers(port) for port in ports)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--brokers", "0"], "start one at least"), (["--brokers", "2", "--kind", "embedded"], "leave out --brokers")],
)
def test_as_many_brokers_as_there_can_be(arguments: list[str], says: str) -> None:
    done = run("up", *arguments, "--port", "0")
    assert done.returncode == errors.ConfigError.exit_code and says in done.stderr


def test_without_json_stdout_stays_empty(start_broker: Callable[[str], conftest.BrokerProcess]) -> None:
    taken = start_broker("embedded")
    done = run("up", "--kind", "embedded", "--port", str(taken.port))
    assert done.returncode == errors.ConfigError.exit_code and done.stdout == ""
    assert f"error: port {taken.port} is in use" in done.stderr and "to do:" in done.stderr


def test_auto_takes_mosquitto_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(command, "_up_mosquitto", lambda args: chosen.append("mosquitto"))
    monkeypatch.setattr(process, "find", lambda: "/usr/sbin/mosquitto")
    assert command.main(["up"]) == 0
    assert chosen == ["mosquitto"]


def test_auto_falls_back_to_the_embedded_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    conftest.require("embedded")
    from broker.serve import embedded

    chosen: list[tuple[object, ...]] = []
    monkeypatch.setattr(embedded, "run", lambda *args: chosen.append(args[:2]))
    monkeypatch.setattr(process, "find", lambda: None)
    assert command.main(["up", "--port", "0"]) == 0
    assert chosen == [("127.0.0.1", 0)]


def test_a_network_address_without_mosquitto(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["init", "--address", "desk.local"]) == 0
    monkeypatch.setattr(process, "find", lambda: None)
    assert command.main(["up", "--bind", "0.0.0.0"]) == errors.RuntimeMissing.exit_code
    assert "sudo apt install mosquitto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bind", "made"), [("0.0.0.0", False), ("0.0.0.0", True), ("::", False), ("::", True), ("192.0.2.1", False)]
)
def test_a_network_address_needs_a_certificate(bind: str, made: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if made:
        identity.Fleet.open("lab")
    assert command.main(["up", "--bind", bind, "--kind", "mosquitto", "--fleet", "lab"]) == 15
    assert "actorq-broker init" in capsys.readouterr().err
    assert (identity.home() / "fleets" / "lab").exists() == made, "refusing must not make keys"


def test_the_embedded_broker_stays_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    conftest.require("embedded")
    assert command.main(["up", "--bind", "0.0.0.0", "--kind", "embedded"]) == errors.ConfigError.exit_code
    assert "serves one machine" in capsys.readouterr().err


@pytest.fixture
def closed() -> Iterator[int]:
    """Port of `actorq-broker up --tls` with one enrolled actor, `first`; on loopback, open to nobody else."""
    conftest.require("mosquitto")
    identity.Fleet.open("lab").enroll("first")
    up = subprocess.Popen(
        [sys.executable, "-m", "broker", "up", "--tls", "--port", "0", "--fleet", "lab", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=children.die_with_parent(),  # noqa: PLW1509  a killed test run leaves no broker
    )
    assert up.stdout is not None
    yield json.loads(up.stdout.readline())["port"]
    up.terminate()
    up.communicate(timeout=20)
    assert up.returncode == 0


def enter(port: int, bundle: identity.Bundle) -> plain_client.PlainClient:
    return plain_client.PlainClient(port, bundle.actor_id, bundle.actor_id, bundle.password, bundle.tls())


def test_who_is_enrolled_later_is_let_in(closed: int, tmp_path: Path) -> None:
    assert run("enroll", "second", "--fleet", "lab", "-o", str(tmp_path / "b.json")).returncode == 0
    bundle = identity.Bundle.read(tmp_path / "b.json")

    def let_in() -> bool:
        with enter(closed, bundle) as client:
            return client.reason == "Success"

    conftest.wait_until(let_in, "the actor enrolled later is let in")


def test_who_is_revoked_is_put_out_at_once_and_stays_out(closed: int) -> None:
    fleet = identity.Fleet.open("lab", create=False)
    bundle = fleet.bundle("first")
    topic, policy = "actorq/lab/actor/first/state", "actorq/lab/policy/main/whole"
    with (
        plain_client.PlainClient(closed, "l", "learner", fleet.password, fleet.tls()) as learner,
        enter(closed, bundle) as actor,
    ):
        learner.subscribe("actorq/lab/actor/+/state")
        actor.subscribe("actorq/lab/policy/+/whole")
        actor.publish(topic, b"before")
        learner.publish(policy, b"before")
        assert learner.next()[1] == actor.next()[1] == b"before"
        assert command.main(["revoke", "first", "--fleet", "lab"]) == 0
        assert actor.disconnected.wait(2), "connected still, two seconds after it was revoked"
        learner.publish(policy, b"after")
        with enter(closed, bundle) as again:
            assert again.reason == "Not authorized"
        assert actor.received.empty() and learner.received.empty()
        assert not learner.disconnected.is_set(), "only the revoked one is put out"


def test_keys_that_were_renewed_put_out_who_holds_the_old_ones(closed: int) -> None:
    fleet = identity.Fleet.open("lab", create=False)
    with enter(closed, fleet.bundle("first")) as thief:
        fleet.enroll("first")
        assert thief.disconnected.wait(2)


def test_rotated_keys_put_everyone_out_until_they_have_the_new_ones(closed: int, tmp_path: Path) -> None:
    fleet = identity.Fleet.open("lab", create=False)
    learner = plain_client.PlainClient(closed, "l", "learner", fleet.password, fleet.tls())
    with learner, enter(closed, fleet.bundle("first")) as actor:
        done = run("rotate", "--fleet", "lab", "-o", str(tmp_path / "bundles"))
        assert done.returncode == 0 and done.stdout == f"{tmp_path / 'bundles' / 'first.json'}\n"
        assert learner.disconnected.wait(2) and actor.disconnected.wait(2)
    bundle = identity.Bundle.read(tmp_path / "bundles" / "first.json")
    assert stat.S_IMODE((tmp_path / "bundles" / "first.json").stat().st_mode) == 0o600
    with plain_client.PlainClient(closed, "l", "learner", fleet.password, fleet.tls()) as renewed:
        assert renewed.reason == "Success"
        renewed.subscribe("actorq/lab/actor/+/state")
        with enter(closed, bundle) as actor:
            actor.publish("actorq/lab/actor/first/state", b"with the new keys")
            assert renewed.next()[1] == b"with the new keys"


def test_a_renewed_certificate_is_served_without_a_restart(closed: int) -> None:
    fleet = identity.Fleet.open("lab", create=False)

    def served() -> bytes:
        with (
            socket.create_connection(("127.0.0.1", closed)) as raw,
            fleet.tls().wrap_socket(raw, server_hostname="127.0.0.1") as tls,
        ):
            return tls.getpeercert(binary_form=True) or b""

    before = served()
    assert command.main(["init", "lab", "--renew"]) == 0
    conftest.wait_until(lambda: served() != before, "the new certificate is served")


def test_a_broken_bundle_takes_nothing_from_the_others(closed: int) -> None:
    fleet = identity.Fleet.open("lab", create=False)
    (fleet.directory / "actors" / "broken.json").write_text("{")
    late = fleet.enroll("late")

    def let_in() -> bool:
        with enter(closed, late) as client:
            return client.reason == "Success"

    conftest.wait_until(let_in, "one enrolled beside a broken file is let in")
    with enter(closed, fleet.bundle("first")) as client:
        assert client.reason == "Success"


def test_a_mosquitto_that_dies_ends_the_command(mosquitto: conftest.BrokerProcess) -> None:
    os.kill(mosquitto.pid, signal.SIGKILL)
    assert mosquitto.process.wait(20) == errors.BrokerUnreachable.exit_code


# -- init and revoke --------------------------------------------------------------------------------------------------


def test_init_makes_all_keys_and_enrolment_follows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["init", "lab", "--address", "desk.local", "--address", "10.0.0.2:1884"]) == 0
    out, err = capsys.readouterr()
    directory = identity.home() / "fleets" / "lab"
    assert out == f"{directory}\n" and "actorq-broker enroll NAME --fleet lab" in err
    for path in (directory, *directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert command.main(["enroll", "pi", "--fleet", "lab", "-o", str(tmp_path / "b.json")]) == 0
    assert identity.Bundle.read(tmp_path / "b.json").brokers in (
        ("desk.local:8883", "10.0.0.2:1884"),
        ("10.0.0.2:1884", "desk.local:8883"),
    ), "in an order of its own"


def test_init_again_keeps_what_is_enrolled() -> None:
    assert command.main(["init", "lab"]) == 0
    fleet = identity.Fleet.open("lab")
    bundle, broker = fleet.enroll("pi"), fleet.broker_credential()
    assert command.main(["init", "lab"]) == 0
    assert fleet.broker_credential() == broker
    assert command.main(["init", "lab", "--address", "desk"]) == 0
    again = identity.Fleet.open("lab")
    assert again.broker_credential() != broker, "another name needs another certificate"
    assert again.bundle("pi") == bundle and again.authority.certificate == fleet.authority.certificate


def test_revoking_whom_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    identity.Fleet.open("lab").enroll("pi")
    assert command.main(["revoke", "other", "--fleet", "lab"]) == errors.IdentityError.exit_code
    assert "enrolled are: pi" in capsys.readouterr().err


# -- enroll -----------------------------------------------------------------------------------------------------------


def test_enroll_writes_a_bundle_and_says_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["enroll", "pi-kitchen", "--broker", "desk.local", "--broker", "10.0.0.2:1884"]) == 0
    out, err = capsys.readouterr()
    assert out == "pi-kitchen.json\n"
    assert "scp pi-kitchen.json" in err and "actorq-actor run --bundle pi-kitchen.json" in err
    path = tmp_path / "pi-kitchen.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    bundle = identity.Bundle.read(path)
    assert bundle == identity.Fleet.open("default", create=False).bundle("pi-kitchen")
    assert bundle.brokers == ("desk.local:8883", "10.0.0.2:1884")
    assert bundle.password not in out + err


def test_enroll_overwrites_only_when_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.json"
    assert command.main(["enroll", "pi", "-o", str(path)]) == 0
    first = path.read_bytes()
    assert command.main(["enroll", "pi", "-o", str(path)]) == errors.IdentityError.exit_code
    assert "--force" in capsys.readouterr().err and path.read_bytes() == first
    assert identity.Fleet.open("default").bundle("pi") == identity.Bundle.read(path), "refusing must not renew the keys"
    assert command.main(["enroll", "pi", "-o", str(path), "--force"]) == 0
    assert path.read_bytes() != first


@pytest.mark.parametrize(
    "argv",
    [["Pi"], ["learner"], ["pi", "--broker", "http://desk:1883"], ["pi", "--broker", ":1"], ["pi", "--fleet", "A"]],
)
def test_enroll_refuses_bad_names(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["enroll", *argv]) == errors.ConfigError.exit_code
    assert not list(tmp_path.glob("*.json"))


# -- listener ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_loopback(host: str, local: bool) -> None:
    assert address.is_loopback(host) is local


def test_reserve_finds_a_free_port() -> None:
    port = listener.reserve("127.0.0.1", 0)
    assert 1024 < port < 65536 and listener.reserve("127.0.0.1", port) == port


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1"])
def test_reserve_refuses_addresses_of_others(host: str) -> None:
    with pytest.raises(errors.ConfigError, match="cannot listen there"):
        listener.reserve(host, 0)


@pytest.mark.parametrize("port", [65536, -1, 70000])
def test_reserve_refuses_what_is_no_port(port: int) -> None:
    with pytest.raises(errors.ConfigError, match=f"{port} is not a port"):
        listener.reserve("127.0.0.1", port)
