"""Mosquitto: the rendered files, who is let in and may say what, and a process that is never left behind."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from broker.contract import errors
from broker.fleet import certificates, client_tls, identity
from broker.serve.mosquitto import access, config, process
from tests import conftest
from tests.fakes.connections import plain_client

USERS = {"learner": "secret-l", "pi-one": "secret-1", "pi-two": "secret-2"}
AUTHORITY = certificates.Authority(certificates.Authority.create("lab"))


def admission(users: dict[str, str]) -> access.Admission:
    return access.Admission(users, AUTHORITY.certificate, AUTHORITY.broker("lab", ["127.0.0.1"]))


def enter(port: int, user: str, secret: str = "") -> plain_client.PlainClient:
    """A client with a certificate of the fleet's."""
    credential = AUTHORITY.client("lab", user or "nobody", 1)
    tls = client_tls.client_context(AUTHORITY.certificate, credential)
    return plain_client.PlainClient(port, f"try-{user}", user, secret or USERS.get(user, ""), tls)


PARENT = """
import sys, time
from broker.serve.mosquitto import process
mosquitto = process.Mosquitto("127.0.0.1", 0, fleet="lab").start()
print(mosquitto.pid, mosquitto.port, flush=True)
time.sleep(60)
"""


def settings_of(text: str) -> dict[str, list[str]]:
    lines = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {key: [value for other, value in lines if other == key] for key, _ in lines}


# -- rendered files ---------------------------------------------------------------------------------------------------


def test_configuration_on_loopback() -> None:
    found = settings_of(config.render("127.0.0.1", 1883))
    assert found["listener"] == ["1883 127.0.0.1"]
    assert found["allow_anonymous"] == ["true"]
    assert int(found["max_packet_size"][0]) > 40_000_000 + 64 * 1024
    assert int(found["max_queued_messages"][0]) > 100_000
    assert found["persistence"] == ["false"]
    assert "message_size_limit" not in found, "it discards in silence what it acknowledged"
    assert not found.keys() & {"password_file", "acl_file", "cafile", "certfile"}


def test_configuration_on_the_network() -> None:
    found = settings_of(config.render("0.0.0.0", 8883, directory=Path("/x")))
    assert found["listener"] == ["8883 0.0.0.0"]
    assert found["allow_anonymous"] == ["false"]
    assert found["password_file"] == ["/x/passwords"] and found["acl_file"] == ["/x/access"]
    assert found["require_certificate"] == ["true"] and found["tls_version"] == ["tlsv1.2"]
    assert found["cafile"] == ["/x/authority.pem"] and found["certfile"] == found["keyfile"] == ["/x/broker.pem"]
    assert "use_identity_as_username" not in found, "with it, a revoked client stays connected and comes back"


def test_passwords_are_hashed_as_mosquitto_does_it() -> None:
    lines = access.Passwords().render(USERS).splitlines()
    assert [line.split(":")[0] for line in lines] == ["learner", "pi-one", "pi-two"]
    _, scheme, iterations, salt, digest = lines[1].split(":")[1].split("$")
    assert scheme == "7" and len(base64.b64decode(salt)) == 12
    expected = hashlib.pbkdf2_hmac("sha512", b"secret-1", base64.b64decode(salt), int(iterations))
    assert base64.b64decode(digest) == expected
    assert not any(secret in line for line in lines for secret in USERS.values())


def test_a_password_is_hashed_once_and_forgotten_with_its_user() -> None:
    passwords = access.Passwords()
    first = passwords.render(USERS).splitlines()
    changed = USERS | {"pi-two": "another"}
    second = passwords.render(changed).splitlines()
    assert second[:2] == first[:2] and second[2] != first[2]
    assert passwords.render({}) == ""
    assert not set(passwords.render(USERS).splitlines()) & {*first, *second}, "each has another salt"


def test_the_acl_says_what_all_actors_may_and_does_not_grow_with_them() -> None:
    assert access.render_acl("lab").splitlines() == [
        "user learner",
        "topic readwrite actorq/lab/#",
        "",
        "user _watch",
        "topic deny actorq/lab/actor/_watch/#",
        "topic deny actorq/lab/ingest/+/_watch",
        "topic read actorq/lab/actor/+/state",
        "topic read actorq/lab/actor/+/assignment",
        "",
        "pattern read actorq/lab/learner/state",
        "pattern read actorq/lab/policy/#",
        "pattern read actorq/lab/release/#",
        "pattern write actorq/lab/actor/%u/state",
        "pattern write actorq/lab/actor/%u/experience",
        "pattern write actorq/lab/actor/%u/report",
        "pattern write actorq/lab/actor/%u/answer",
        "pattern read actorq/lab/actor/%u/assignment",
        "pattern read actorq/lab/actor/%u/receipt",
        "pattern read actorq/lab/actor/%u/command",
        "pattern read actorq/lab/actor/%u/orders",
        "pattern write actorq/lab/ingest/+/%u",
    ]


# -- the program ------------------------------------------------------------------------------------------------------


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[process.Mosquitto]:
    """A Mosquitto as on the network, but on loopback so that no test opens a port to others."""
    conftest.require("mosquitto")
    with process.Mosquitto("127.0.0.1", 0, fleet="lab", admission=admission(USERS)) as mosquitto:
        yield mosquitto


def test_only_the_enrolled_are_let_in(closed: process.Mosquitto) -> None:
    for name, secret, reason in (
        ("pi-one", "secret-1", "Success"),
        ("pi-one", "secret-2", "Not authorized"),
        ("stranger", "secret-1", "Not authorized"),
        ("", "", "Not authorized"),
    ):
        with enter(closed.port, name, secret) as client:
            assert client.reason == reason, name


def test_an_actor_speaks_at_its_own_topics_alone(closed: process.Mosquitto) -> None:
    mine = [f"actorq/lab/actor/pi-one/{leaf}" for leaf in ("state", "experience", "report")]
    others = [
        "actorq/lab/actor/pi-two/state",
        "actorq/lab/actor/pi-one/receipt",
        "actorq/lab/actor/pi-one/assignment",
        "actorq/lab/actor/pi-one/command",
        "actorq/lab/learner/state",
        "actorq/lab/policy/main/whole",
        "actorq/lab/release/list",
        "actorq/lab/release/piece/0",
        "actorq/other/actor/pi-one/state",
    ]
    with enter(closed.port, "learner") as learner:
        learner.subscribe("actorq/lab/#")
        with enter(closed.port, "pi-one") as actor:
            for topic in (*others, *mine):
                actor.publish(topic, b"x")  # refused ones are acknowledged too: MQTT 3.1.1 has no other answer
        assert [learner.next()[0] for _ in mine] == mine
        assert learner.received.empty()


def test_an_actor_hears_what_is_meant_for_it_alone(closed: process.Mosquitto) -> None:
    mine = [
        "actorq/lab/learner/state",
        "actorq/lab/policy/main/whole",
        "actorq/lab/release/piece/0",
        "actorq/lab/actor/pi-one/assignment",
        "actorq/lab/actor/pi-one/receipt",
        "actorq/lab/actor/pi-one/command",
    ]
    with enter(closed.port, "pi-one") as actor:
        actor.subscribe("actorq/#")
        with enter(closed.port, "learner") as learner:
            for topic in ("actorq/lab/actor/pi-two/command", "actorq/lab/actor/pi-two/state", *mine):
                learner.publish(topic, b"x")
        assert [actor.next()[0] for _ in mine] == mine
        assert actor.received.empty()


def test_reload_lets_in_who_was_enrolled_later(closed: process.Mosquitto) -> None:
    closed.reload(admission(USERS | {"pi-new": "secret-n"}))

    def let_in() -> bool:
        with enter(closed.port, "pi-new", "secret-n") as client:
            return client.reason == "Success"

    conftest.wait_until(let_in, "the new actor is let in")


def test_secrets_are_readable_by_mosquitto_alone_and_removed(open_tmpdir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    conftest.require("mosquitto")
    monkeypatch.setattr(tempfile, "tempdir", open_tmpdir)
    with process.Mosquitto("127.0.0.1", 0, fleet="lab", admission=admission(USERS)) as mosquitto:
        (directory,) = Path(open_tmpdir).iterdir()
        assert {path.name for path in directory.iterdir()} == {
            "mosquitto.conf",
            "passwords",
            "access",
            "authority.pem",
            "broker.pem",
        }
        group_of_its_own = psutil.Process(mosquitto.pid).gids().real
        for path in (directory, *directory.iterdir()):
            found = path.stat()
            assert found.st_uid == os.geteuid(), f"{path} is not ours alone to write"
            assert stat.S_IMODE(found.st_mode) & 0o027 == 0, path
            assert stat.S_IMODE(found.st_mode) & 0o070 == 0 or found.st_gid == group_of_its_own, path
    assert not list(Path(open_tmpdir).iterdir())


@pytest.mark.fault(1)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives Mosquitto another user")
def test_root_follows_nothing_that_mosquittos_user_planted(open_tmpdir: str, tmp_path: Path) -> None:
    """Whoever took Mosquitto over puts a link where `up` writes next; the next enrolment must not follow it."""
    conftest.require("mosquitto")
    fleet = identity.Fleet.open("lab")
    victim = tmp_path / "of-root-alone"
    victim.write_text("as it was")
    victim.chmod(0o600)
    broker = conftest.BrokerProcess("mosquitto", open_tmpdir, ["--tls", "--fleet", "lab"])
    try:
        (directory,) = Path(open_tmpdir).iterdir()
        user = pwd.getpwuid(psutil.Process(broker.pid).uids().real)
        plant = ["ln", "-s", str(victim), str(directory / ".passwords")]
        planted = subprocess.run(plant, user=user.pw_uid, group=user.pw_gid, extra_groups=(), check=False)
        fleet.enroll("pi-new")
        conftest.wait_until(
            lambda: "pi-new" in (directory / "passwords").read_text() or victim.read_text() != "as it was", "a reload"
        )
        assert victim.read_text() == "as it was"
        assert (victim.stat().st_uid, stat.S_IMODE(victim.stat().st_mode)) == (0, 0o600)
        assert user.pw_uid != 0 and planted.returncode != 0
    finally:
        broker.stop()


@pytest.mark.fault(1)
@pytest.mark.skipif(
    sys.platform != "linux" or ctypes.CDLL(None).syscall(444, None, 0, 1) < 1, reason="this kernel has no Landlock"
)
def test_mosquitto_touches_no_file_but_its_own(open_tmpdir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by a normal user it runs as that user, who can read the fleet's keys and write anywhere at home.

    The program is another one, which tries it, on files that anyone may read and write.
    """
    conftest.require("mosquitto")
    program, key, new = (Path(open_tmpdir) / name for name in ("bin/mosquitto", "home/authority.pem", "home/new"))
    for path in (program, key):
        path.parent.mkdir()
        path.parent.chmod(0o777)
    key.write_text("the authority's key")
    program.write_text(f"#!/bin/sh\nhead -n 1 $2 >&2\ncat {key} >&2\necho x > {new}\necho x >> {key}\n")
    program.chmod(0o755)
    key.chmod(0o666)
    monkeypatch.setattr(process, "find", lambda: str(program))
    monkeypatch.setattr(tempfile, "tempdir", open_tmpdir)
    with pytest.raises(errors.ConfigError, match="did not start: # Rendered by actorq-broker") as ended:
        process.Mosquitto("127.0.0.1", 0, fleet="lab").start()
    assert "the authority's key" not in str(ended.value)
    assert key.read_text() == "the authority's key" and not new.exists()


def test_it_ends_when_its_parent_is_killed(open_tmpdir: str) -> None:
    conftest.require("mosquitto")
    env = {**os.environ, "TMPDIR": open_tmpdir}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        _, port = map(int, parent.stdout.readline().split())
        assert conftest.answers(port)
        parent.send_signal(signal.SIGKILL)
    conftest.wait_until(lambda: not conftest.answers(port), "Mosquitto is gone")


def test_a_mosquitto_that_ends_by_itself_is_noticed() -> None:
    conftest.require("mosquitto")
    with process.Mosquitto("127.0.0.1", 0, fleet="lab") as mosquitto:
        mosquitto.check()
        os.kill(mosquitto.pid, signal.SIGKILL)
        conftest.wait_until(lambda: not conftest.answers(mosquitto.port), "it is gone")

        def noticed() -> bool:
            try:
                mosquitto.check()
            except errors.BrokerUnreachable as error:
                return "ended with -9" in str(error)
            return False

        conftest.wait_until(noticed, "its end is noticed")


def test_an_open_address_needs_an_admission() -> None:
    conftest.require("mosquitto")
    with pytest.raises(errors.IdentityError, match="actorq-broker init"):
        process.Mosquitto("0.0.0.0", 0, fleet="lab").start()


def test_a_taken_port(mosquitto: conftest.BrokerProcess) -> None:
    with pytest.raises(errors.ConfigError, match=f"port {mosquitto.port} is in use.*\n.*\n.*systemctl disable"):
        process.Mosquitto("127.0.0.1", mosquitto.port, fleet="lab").start()


def test_an_address_of_another_machine() -> None:
    conftest.require("mosquitto")
    with pytest.raises(errors.ConfigError, match="cannot listen there.*\n.*203.0.113.1"):
        process.Mosquitto("203.0.113.1", 0, fleet="lab", admission=admission(USERS)).start()


def test_what_mosquitto_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    conftest.require("mosquitto")
    monkeypatch.setattr(config, "render", lambda *args, **kwargs: "no_such_option true\n")
    with pytest.raises(errors.ConfigError, match="did not start.*no_such_option"):
        process.Mosquitto("127.0.0.1", 0, fleet="lab").start()
    assert any("no_such_option" in line for line in caplog.messages)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "find", lambda: None)
    with pytest.raises(errors.RuntimeMissing, match="sudo apt install mosquitto"):
        process.Mosquitto("127.0.0.1", 0, fleet="lab").start()


def test_it_is_found_beside_a_users_path(monkeypatch: pytest.MonkeyPatch) -> None:
    conftest.require("mosquitto")
    found = process.find()
    monkeypatch.setenv("PATH", "/nonexistent")
    if found in ("/usr/sbin/mosquitto", "/usr/local/sbin/mosquitto"):
        assert process.find() == found


def test_users_of_a_fleet_are_those_it_is_rendered_from() -> None:
    fleet = identity.Fleet.open("lab")
    fleet.enroll("pi-one")
    lines = access.Passwords().render(fleet.users()).splitlines()
    assert [line.split(":")[0] for line in lines] == ["_watch", "learner", "pi-one"]
