"""What Home Assistant is told, against the format that it documents, over a real broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors, messages
from learner import __main__ as main
from learner.operate.watch import fleet_view, home_assistant
from tests import conftest
from tests.conftest import BrokerProcess
from tests.fakes import fleet_examples
from tests.fakes.connections import plain_client

RECORDED = Path(__file__).with_name("home_assistant.json")
"""The discovery message of the actor below. Its keys are those of the documentation of the MQTT integration (device
discovery; sensor; binary sensor), in November 2026."""
UNITS = {"temperature": {"°C", "°F", "K"}, "power": {"mW", "W", "kW"}, "duration": {"d", "h", "min", "s", "ms"}}
"""Units of the device classes, by the documentation of the sensor integration."""
ROOT = {"dev", "o", "cmps", "state_topic", "availability", "qos"}
COMPONENT = {"p", "name", "unique_id", "value_template", "unit_of_measurement", "device_class", "state_class"}
COMPONENT |= {"entity_category"}
VITALS = messages.Vitals(steps=500, temperature_c=61.5, power_w=4.5, latency_p50_us=123.4, delegate="XNNPACK")


class Site:
    """A view of a fleet, what tells of it, and who listens at Home Assistant's broker."""

    def __init__(self, port: int) -> None:
        self.now_s = 1000.0
        self.view = fleet_view.FleetView(clock=lambda: self.now_s)
        self.port = port
        self.told = self.opened()
        self.heartbeat = 0

    def opened(self) -> home_assistant.HomeAssistant:
        connection = home_assistant.open_link(f"127.0.0.1:{self.port}", "", None, "lab")
        found = home_assistant.HomeAssistant("lab", self.view, connection, lambda: self.now_s)
        found.start()
        return found

    def hear(self, name: str, vitals: messages.Vitals, *, online: bool = True) -> None:
        self.heartbeat += 1
        state = fleet_examples.state(online=online, heartbeat=self.heartbeat, vitals=vitals)
        self.view.hear_actor(name, state, retained=False)

    def retained(self, topic_filter: str) -> dict[str, bytes]:
        """Returns what the broker holds."""
        with plain_client.PlainClient(self.port, "home") as client:
            client.subscribe(topic_filter)
            client.subscribe("end")
            client.publish("end", b"")
            found: dict[str, bytes] = {}
            while (heard := client.next())[0] != "end":
                found[heard[0]] = heard[1]
            return found

    def await_retained(self, topic: str, payload_has: bytes, what: str) -> bytes:
        found: dict[str, bytes] = {}

        def is_there() -> bool:
            found.update(self.retained(topic))
            return payload_has in found.get(topic, b"")

        conftest.wait_until(is_there, what)
        return found[topic]


@pytest.fixture
def site(mosquitto: BrokerProcess) -> Iterator[Site]:
    made = Site(mosquitto.port)
    yield made
    made.told.close()


CONFIG, STATE = "homeassistant/device/actorq-lab/pi/config", "actorq-home-assistant/lab/pi/state"
STATUS = "actorq-home-assistant/lab/status"


def test_an_actor_is_a_device_with_its_sensors(site: Site) -> None:
    site.hear("pi", VITALS)
    site.told.follow({"pi": 0})
    said = json.loads(site.await_retained(CONFIG, b"cmps", "the device is told, and retained"))
    recorded: dict[str, Any] = json.loads(RECORDED.read_text())
    assert said == recorded
    assert said.keys() <= ROOT and {"name"} <= said["o"].keys(), "an origin is required"
    assert said["dev"]["ids"] and said["state_topic"] == STATE
    figures = json.loads(site.await_retained(STATE, b"steps", "its state"))
    for key, component in said["cmps"].items():
        assert component.keys() <= COMPONENT
        assert component["p"] in ("sensor", "binary_sensor")
        assert key in figures and component["value_template"] == f"{{{{ value_json.{key} }}}}"
        if (kind := component.get("device_class")) in UNITS:
            assert component["unit_of_measurement"] in UNITS[kind]
    unique = [component["unique_id"] for component in said["cmps"].values()]
    assert len(set(unique)) == len(unique)
    told = {key: figures[key] for key in ("temperature_c", "power_w", "latency_p50_us", "steps", "live", "alarm")}
    assert told == {
        "temperature_c": 61.5,
        "power_w": 4.5,
        "latency_p50_us": 0.1234,
        "steps": 500,
        "live": "ON",
        "alarm": "OFF",
    }
    assert figures["return_mean"] is None and "return_mean" not in said["cmps"], "nothing has told it yet"
    assert site.retained(STATUS) == {STATUS: b"online"}


def test_a_state_is_said_every_few_seconds_and_one_that_is_gone_shows(site: Site) -> None:
    site.hear("pi", VITALS)
    site.told.follow({"pi": 0})
    site.await_retained(STATE, b'"steps": 500', "its state")
    sent = site.told._link.bytes_sent
    site.hear("pi", messages.Vitals(steps=600, return_mean=9.0))
    site.now_s += home_assistant.PERIOD_S / 2
    site.told.follow({"pi": 0})
    assert site.told._link.bytes_sent == sent, "too soon"
    site.hear("pi", messages.Vitals(steps=700, return_mean=9.0), online=False)
    site.now_s += home_assistant.PERIOD_S
    site.told.follow({"pi": 0})
    figures = json.loads(site.await_retained(STATE, b'"steps": 700', "the newest"))
    assert (figures["live"], figures["alarm"], figures["alarms"]) == ("OFF", "ON", "silent")
    site.await_retained(CONFIG, b'"return_mean"', "a figure that is new has its sensor")


def test_who_is_not_enrolled_any_longer_is_taken_back_even_from_a_process_before(site: Site) -> None:
    for name in ("pi", "old"):
        site.hear(name, VITALS)
    site.told.follow({"pi": 0, "old": 0})
    old = "homeassistant/device/actorq-lab/old/config"
    site.await_retained(old, b"cmps", "both are told")
    site.view.keep({"pi"})
    site.told.follow({"pi": 0})
    conftest.wait_until(lambda: set(site.retained("homeassistant/#")) == {CONFIG}, "one is taken back")
    assert set(site.retained("actorq-home-assistant/#")) == {STATE, STATUS}
    site.told.close()
    conftest.wait_until(lambda: site.retained(STATUS) == {STATUS: b"offline"}, "nobody watches")
    assert set(site.retained("homeassistant/#")) == {CONFIG}, "the device stays"

    site.view = fleet_view.FleetView(clock=lambda: site.now_s)
    site.told = site.opened()  # `pi` was revoked meanwhile, and is never heard again

    def is_gone() -> bool:
        site.told.follow({})
        return not site.retained("homeassistant/#")

    conftest.wait_until(is_gone, "it is taken back")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--home-assistant", "127.0.0.1:1", "RUN"], errors.ConfigError.exit_code, "a live fleet alone"),
        (["--home-assistant", "127.0.0.1:PORT", "--home-assistant-user", "ha"], 10, "the password of Home Assistant"),
        (["--home-assistant", "mqtt://ha.local"], errors.ConfigError.exit_code, "without TLS over a network"),
        (["--home-assistant", "ha.local", "--home-assistant-ca", "/nowhere"], 10, "cannot be read"),
    ],
)
def test_what_cannot_be_has_a_clear_error(
    flags: list[str],
    code: int,
    words: str,
    mosquitto: BrokerProcess,
    actorq_home: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from broker.fleet import identity
    from learner.operate.watch import command as watch

    monkeypatch.setattr(watch, "_wait_for_others", lambda: None)  # this process goes on
    monkeypatch.delenv(home_assistant.PASSWORD, raising=False)
    identity.Fleet.open("lab")
    (tmp_path / "metrics.jsonl").write_text("")
    filled = [str(tmp_path) if word == "RUN" else word.replace("PORT", str(mosquitto.port)) for word in flags]
    command = ["watch", "--fleet", "lab", "--broker", mosquitto.address, "--port", "0", *filled]
    assert main.main(command) == code
    assert words in capfd.readouterr().err


def test_a_broker_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_assistant, "_CONNECT_S", 0.2)
    silent = home_assistant.open_link("127.0.0.1:1", "", None, "lab")
    with pytest.raises(errors.BrokerUnreachable, match="Home Assistant's broker"):
        home_assistant.HomeAssistant("lab", fleet_view.FleetView(), silent).start()
