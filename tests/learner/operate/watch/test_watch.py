"""`actorq-learner watch` as a process on a real broker: what it shows, to whom, and that it can say nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.contract import codec, messages, signing, topics
from broker.fleet import identity
from broker.serve.mosquitto import access, process
from learner.operate.watch import fleet_view, watcher
from tests import conftest
from tests.fakes import fake_learner, simulated_actor, webdriver
from tests.fakes.connections import plain_client

BIRTH = messages.Birth("Arm-v0", simulated_actor.SPEC, 1, "Raspberry Pi 5", "3.11", "litert", "", 50.0, release="0.1.0")


@pytest.fixture
def fleet() -> identity.Fleet:
    made = identity.Fleet.open("lab")
    made.enroll("pi")
    return made


@pytest.fixture
def port(fleet: identity.Fleet) -> Iterator[int]:
    conftest.require("mosquitto")
    admission = access.Admission(fleet.users(), fleet.authority.certificate, fleet.broker_credential())
    with process.Mosquitto("127.0.0.1", 0, fleet="lab", admission=admission) as mosquitto:
        yield mosquitto.port


@contextlib.contextmanager
def watching(*arguments: str) -> Iterator[str]:
    """Starts the command; yields the page's address."""
    command = [sys.executable, "-m", "learner", "watch", "--json", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield json.loads(child.stdout.readline())["url"]
        finally:
            child.terminate()
            assert child.wait(30.0) == 0


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30.0) as answer:
        return str(answer.read().decode())


def first_event(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}events", timeout=30.0) as answer:
        event: dict[str, Any] = json.loads(answer.readline().removeprefix(b"data: "))
        return event


def say(port: int, fleet: identity.Fleet, heartbeat: int, key: bytes = b"") -> None:
    """The actor `pi` tells its state, over TLS."""
    bundle, topic = fleet.bundle("pi"), topics.Topics("lab").actor_state("pi")
    state = messages.ActorState(True, "s", 1, heartbeat, BIRTH, messages.Vitals(steps=10 * heartbeat, power_w=4.5))
    with plain_client.PlainClient(port, "pi", "pi", bundle.password, bundle.tls()) as client:
        client.publish(topic, signing.ActorMac(key or bundle.mac_key).seal(topic, codec.encode(state)))


@pytest.mark.mosquitto
@pytest.mark.system
def test_shows_what_an_actor_says_and_counts_what_it_cannot_have_said(fleet: identity.Fleet, port: int) -> None:
    with watching("--fleet", "lab", "--broker", f"mqtts://127.0.0.1:{port}") as url:
        say(port, fleet, 1)
        say(port, fleet, 2, key=bytes(32))
        conftest.wait_until(lambda: 'reason="signature"' in get(f"{url}metrics"), "the forged state is counted")
        found = get(f"{url}metrics")
        assert 'actorq_actor_steps_total{actor="pi"} 10.0' in found and "actorq_actor_up" in found
        event = first_event(url)
        assert event["names"] == ["pi"] and event["rows"][0]["board"] == "Raspberry Pi 5"
        assert json.loads(get(f"{url}actors/pi/history.json"))["power_w"] == [4.5]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{url}actors/nobody/history.json")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            get(url, Host="evil.example")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(urllib.request.Request(url, method="POST"))
        page = get(url) + get(f"{url}page.js") + get(f"{url}page.css")
        assert "http://" not in page and "https://" not in page, "it loads nothing from a network"


def test_of_what_an_actor_said_meanwhile_the_newest_is_shown(
    fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, topic = fleet_view.FleetView(), topics.Topics("lab").actor_state("pi")
    following = watcher.Watcher(fleet, ("mqtts://127.0.0.1:1",), view, fleet.watch_tls())
    following._enrolment.read()

    def say_all() -> None:
        for heartbeat, key in ((1, b""), (2, b""), (3, b""), (4, bytes(32))):
            state = messages.ActorState(True, "s", 1, heartbeat, BIRTH, messages.Vitals(steps=10 * heartbeat))
            sealed = signing.ActorMac(key or fleet.bundle("pi").mac_key).seal(topic, codec.encode(state))
            following._hear_state(topic, sealed, False)

    monkeypatch.setattr(following.brokers, "poll", say_all)
    assert not following.read(), "nothing came by the socket"
    revision, [row], _ = view.rows()
    assert (revision, row["steps"]) == (1, 30), "one change, of the newest genuine one"
    assert view.refused == {"signature": 1}


@pytest.mark.mosquitto
@pytest.mark.system
def test_asks_again_whether_an_actor_is_refused(fleet: identity.Fleet, port: int) -> None:
    fleet.enroll("attic")  # two, so that neither's assignment is followed all the time
    topic = topics.Topics("lab").assignment("pi")

    def is_refused(url: str) -> bool:
        return any(row["actor"] == "pi" and "refused" in row["alarms"] for row in first_event(url)["rows"])

    def assign(refused: str) -> None:
        assigned = dataclasses.replace(fake_learner.assignment(1), refused=refused)
        learner.publish(topic, fleet.sealer.seal(topic, codec.encode(assigned)), retain=True)

    with (
        plain_client.PlainClient(port, "learner", "learner", fleet.password, fleet.tls()) as learner,
        watching("--fleet", "lab", "--broker", f"mqtts://127.0.0.1:{port}") as url,
    ):
        say(port, fleet, 1)
        assign("another spec")
        conftest.wait_until(lambda: is_refused(url), "the page says that it is refused")
        assign("")
        conftest.wait_until(lambda: not is_refused(url), "and that it no longer is")


@pytest.mark.mosquitto
def test_the_broker_lets_a_watcher_read_alone(fleet: identity.Fleet, port: int) -> None:
    names, bundle = topics.Topics("lab"), fleet.bundle("pi")
    with (
        plain_client.PlainClient(port, "pi", "pi", bundle.password, bundle.tls()) as actor,
        plain_client.PlainClient(port, "learner", "learner", fleet.password, fleet.tls()) as learner,
        plain_client.PlainClient(
            port, "watch", identity.WATCH_USER, fleet.watch_password, fleet.watch_tls()
        ) as watcher,
    ):
        learner.subscribe("actorq/lab/#")
        watcher.subscribe("actorq/lab/#")
        written = [
            names.learner_state,
            names.policy("main"),
            *(names.actor("pi", leaf) for leaf in ("state", "command")),
        ]
        for topic in [*written, names.actor(identity.WATCH_USER, "state")]:
            watcher.publish(topic, b"forged")
        actor.publish(names.experience("pi"), b"experience")
        actor.publish(names.actor_state("pi"), b"state")
        assert [learner.next()[1] for _ in range(2)] == [b"experience", b"state"], "nothing that the watcher said"
        assert watcher.next()[1] == b"state", "and it hears no experience"


@pytest.mark.system
def test_off_this_machine_it_takes_tls_and_a_token(fleet: identity.Fleet, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"wall_s": 1.0, "env_steps": 10, "return_mean": 5.0}\n')
    (tmp_path / "details.json").write_text('{"fleet": [{"actor_id": "pi", "steps": 7, "refused": ""}]}')
    trusted = ssl.create_default_context(cadata=fleet.authority.certificate.decode())
    with watching("--fleet", "lab", "--bind", "0.0.0.0", "--host", "localhost", str(tmp_path)) as url:
        port, token = url.partition("/?")[0].rpartition(":")[2], url.rpartition("token=")[2]
        base = f"https://localhost:{port}/"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{base}metrics", context=trusted)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{base}metrics?token=wrong", context=trusted)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(f"http://localhost:{port}/metrics")
        allowed = urllib.request.Request(f"{base}metrics", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(allowed, context=trusted) as answer:
            assert b"actorq_learner_env_steps_total 10.0" in answer.read()
        opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=trusted), urllib.request.HTTPCookieProcessor()
        )
        with opener.open(f"{base}?token={token}") as answer:
            assert "token" not in answer.url and b"<title>" in answer.read()
        assert token == fleet.watch_token and token not in socket.gethostname()


@pytest.mark.system
def test_replays_a_run_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"wall_s": 1.0, "env_steps": 10, "return_mean": 5.0}\n')
    (tmp_path / "details.json").write_text('{"fleet": [{"actor_id": "pi", "delegate": "XNNPACK", "steps": 7}]}')
    hour = {"at_s": 1e9, "keys": ["power_w"], "actors": {"pi": [4.5]}}
    (tmp_path / "actors.jsonl").write_text(json.dumps(hour) + "\n")
    with watching(str(tmp_path)) as url:
        event = first_event(url)
        last_hour = json.loads(get(f"{url}actors/pi/history.json"))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{url}actors/nobody/history.json")
    assert last_hour["at_s"] == [1e9] and last_hour["power_w"] == [4.5] and last_hour["return_mean"] == [None]
    assert event["curve"] == [{"wall_s": 1.0, "env_steps": 10.0, "return_mean": 5.0}]
    assert event["rows"] == [{"actor": "pi", "steps": 7, "kernels": "XNNPACK", "alarms": {}}]
    assert event["fleet"]["replay"]


@pytest.mark.system
@pytest.mark.skipif(not webdriver.is_installed(), reason="sudo apt install chromium chromium-driver")
def test_works_from_the_keyboard(tmp_path: Path) -> None:
    tab, enter, escape = "\ue004", "\ue007", "\ue00c"
    (tmp_path / "metrics.jsonl").write_text('{"wall_s": 1.0, "env_steps": 10, "return_mean": 5.0}\n')
    rows = [{"actor_id": name} for name in ("hall", "kitchen", "lab")]
    (tmp_path / "details.json").write_text(json.dumps({"fleet": rows}))
    shown = "return [...document.querySelectorAll('#rows tr:not([hidden])')].map((row) => row.children[0].textContent)"
    with watching(str(tmp_path)) as url, webdriver.browser() as page:

        def go_to(what: str) -> None:
            for _ in range(60):
                page.press(tab)
                if page.run("return document.activeElement.textContent") == what:
                    return
            raise AssertionError(f"no key leads to {what}")

        page.open(url)
        page.wait("return document.querySelectorAll('#rows tr').length == 3", 10.0)
        page.press("/lab")
        assert page.run(shown) == ["lab"]
        page.press(escape)
        assert page.run(shown) == ["hall", "kitchen", "lab"]
        go_to("Actor")
        page.press(enter)
        assert page.run(shown) == ["lab", "kitchen", "hall"], "the other way round"
        go_to("kitchen")
        page.press(enter)
        page.wait("return location.hash.includes('kitchen')", 10.0)
        page.press(escape)
        page.wait("return !location.hash", 10.0)


def test_a_taken_port_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from learner.__main__ import main
    from learner.operate.watch import command

    monkeypatch.setattr(command, "_wait_for_others", lambda: None)  # this process goes on
    (tmp_path / "metrics.jsonl").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["watch", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 10
    assert "--port" in capsys.readouterr().err
