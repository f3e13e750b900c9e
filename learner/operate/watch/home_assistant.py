"""Shows each actor as a device in Home Assistant, by the discovery format of its MQTT integration.

https://www.home-assistant.io/integrations/mqtt/#mqtt-discovery (device discovery, of 2024.11 or newer). To the broker
of Home Assistant, which need not be the fleet's: that one lets those who watch say nothing.

    homeassistant/device/actorq-FLEET/ACTOR/config   retained: the device and its sensors; empty once it is not enrolled
    actorq-home-assistant/FLEET/ACTOR/state          retained: JSON of its figures; null where a board cannot tell
    actorq-home-assistant/FLEET/status               retained: `online`; `offline` is this side's will

Nothing is read from there but what was said by an earlier process of this side, to take back who has left since.
"""

from __future__ import annotations

import collections
import json
import math
import os
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import broker
from broker.contract import address, errors
from broker.mqtt import link
from learner.operate.watch import fleet_view

PREFIX = "homeassistant"
PASSWORD = "ACTORQ_HOME_ASSISTANT_PASSWORD"
"""The environment variable: arguments of a command are anybody's to read."""
PERIOD_S = 5.0
"""Between two states of an actor, at least: Home Assistant keeps each change in its database."""
_CONNECT_S = 10.0
_LEFT_OVER_MAX = 10_000
"""Devices of before that are looked at: what a broker holds there may be anybody's."""
ONLINE, OFFLINE = b"online", b"offline"


class Sensor(NamedTuple):
    """A figure of a row, as Home Assistant has it.

    `scale` brings it to `unit`; `always` is false of what some boards cannot tell, and which is then left out.
    """

    key: str
    name: str
    unit: str | None = None
    device_class: str | None = None
    state_class: str | None = "measurement"
    scale: float = 1.0
    always: bool = False


SENSORS = (
    Sensor("steps_per_s", "Steps per second", "steps/s", always=True),
    Sensor("steps", "Steps", "steps", state_class="total_increasing", always=True),
    Sensor("episodes", "Episodes", "episodes", state_class="total_increasing", always=True),
    Sensor("return_mean", "Return"),
    Sensor("policy_lag", "Policy lag", "versions"),
    Sensor("latency_p50_us", "Latency, median", "ms", "duration", scale=1e-3),
    Sensor("latency_p99_us", "Latency, 99th percentile", "ms", "duration", scale=1e-3),
    Sensor("deadlines_missed", "Missed deadlines", "steps", state_class="total_increasing"),
    Sensor("temperature_c", "Temperature", "°C", "temperature"),
    Sensor("power_w", "Power", "W", "power"),
    Sensor("step_energy_j", "Energy per step", "J"),
    Sensor("cpu_percent", "CPU", "%"),
    Sensor("spool_share", "Spool", "%", scale=100.0),
    Sensor("messages_held", "Messages without a receipt", "messages", always=True),
    Sensor("steps_dropped", "Dropped steps", "steps", state_class="total_increasing", always=True),
    Sensor("env_failures", "Failures of the environment", "failures", state_class="total_increasing", always=True),
)
_DEVICE = {"board": "mdl", "release": "sw"}


def open_link(where: str, user: str, authority: Path | None, fleet: str) -> link.Link:
    """Returns a connection to Home Assistant's broker, which is not made yet.

    Args:
        where: `host[:port]`; TLS, unless that is this machine.
        user: Empty for a broker that asks for none; its password is in the environment variable PASSWORD.
        authority: A file with the certificate that the broker's is to be signed by; None: any that this system trusts.
        fleet: Its name.

    Raises:
        ConfigError: The address or the file cannot be used, or there is a user without a password.
    """
    if user and not os.environ.get(PASSWORD):
        raise errors.ConfigError(
            "the password of Home Assistant's broker is missing",
            where=f"--home-assistant-user {user}",
            todo=f"set {PASSWORD}, which is not shown to others as arguments are",
        )
    tls = None
    if address.Address.parse(where).tls:
        try:
            tls = ssl.create_default_context(cafile=str(authority) if authority else None)
        except (OSError, ssl.SSLError) as error:
            raise errors.ConfigError(
                f"the authority of Home Assistant's broker cannot be read: {error}",
                where=f"--home-assistant-ca {authority}",
                todo="name a PEM file with its certificate",
            ) from error
    return link.Link(
        [where],
        f"actorq-{fleet}-home-assistant",
        username=user,
        password=os.environ.get(PASSWORD, "") if user else "",
        tls=tls,
        will=(f"actorq-home-assistant/{fleet}/status", OFFLINE),
    )


class HomeAssistant:
    """Says what a view knows of a fleet's actors.

    Args:
        fleet: Its name.
        view: The fleet.
        connection: To Home Assistant's broker, as `open_link` makes it.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        fleet: str,
        view: fleet_view.FleetView,
        connection: link.Link,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._view, self._link, self._clock = fleet, view, connection, clock
        self._revision = -1
        self._rows: dict[str, dict[str, Any]] = {}  # that changed and are not said yet
        self._said_s: dict[str, float] = {}
        self._configs: dict[str, bytes] = {}
        self._known: dict[str, set[str]] = {}  # keys of figures that were ever told
        self._left_over: set[str] = set()  # names that an earlier process has said, and this one has not
        self._heard: collections.deque[str] = collections.deque()  # the same, as they come
        self._heard_count = 0
        self._base = f"actorq-home-assistant/{fleet}"

    def start(self) -> None:
        """Connects.

        Raises:
            BrokerUnreachable: The broker does not answer, or lets us not in.
        """
        self._link.subscribe(self._config_topic("+"), self._hear)
        self._link.retain(f"{self._base}/status", ONLINE)
        self._link.start()
        try:
            self._link.wait_connected(_CONNECT_S)
        except errors.BrokerUnreachable as error:
            self._link.close()
            raise errors.BrokerUnreachable(
                f"Home Assistant's broker: {error.what}",
                where=error.where,
                todo=f"look at --home-assistant, --home-assistant-user, {PASSWORD} and --home-assistant-ca",
            ) from error

    def follow(self, enrolled: Mapping[str, object]) -> None:
        """Says what is new, and takes back who is not enrolled any longer; to be called every half second or so."""
        self._revision, changed, _ = self._view.rows(self._revision)
        self._rows |= {row["actor"]: row for row in changed}
        now_s = self._clock()
        for name in list(self._rows):
            if name not in enrolled:
                del self._rows[name]
            elif now_s - self._said_s.get(name, -math.inf) >= PERIOD_S:
                self._said_s[name] = now_s
                self._say(name, self._rows.pop(name))
        while self._heard:
            self._left_over.add(self._heard.popleft())
        self._left_over -= self._configs.keys()
        for name in [one for one in (*self._configs, *self._left_over) if one not in enrolled]:
            self._withdraw(name)

    def close(self) -> None:
        """Says that nobody watches any longer, and disconnects; the devices stay, unavailable."""
        self._link.close((f"{self._base}/status", OFFLINE))

    def _say(self, name: str, row: Mapping[str, Any]) -> None:
        state = {sensor.key: _scaled(row.get(sensor.key), sensor.scale) for sensor in SENSORS}
        known = self._known.setdefault(name, set())
        known |= {key for key, value in state.items() if value is not None}
        config = json.dumps(self._config(name, row, known), ensure_ascii=False).encode()
        if config != self._configs.get(name):
            self._configs[name] = config
            self._link.retain(self._config_topic(name), config)
        words = ", ".join(sorted(row["alarms"])) or "none"
        told = {**state, "live": "ON" if row["live"] else "OFF", "alarms": words}
        told["alarm"] = "ON" if row["alarms"] else "OFF"
        self._link.retain(f"{self._base}/{name}/state", json.dumps(told).encode())

    def _withdraw(self, name: str) -> None:
        for topic in (self._config_topic(name), f"{self._base}/{name}/state"):
            self._link.retain(topic, b"")
        self._left_over.discard(name)
        for kept in (self._configs, self._known, self._said_s):
            kept.pop(name, None)

    def _hear(self, topic: str, payload: bytes, retained: bool) -> None:
        """Takes note of what is retained from before, on the network thread."""
        if retained and payload and self._heard_count < _LEFT_OVER_MAX:
            self._heard_count += 1
            self._heard.append(topic.split("/")[3])

    def _config_topic(self, name: str) -> str:
        return f"{PREFIX}/device/actorq-{self._fleet}/{name}/config"

    def _config(self, name: str, row: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
        """Returns the discovery message of an actor."""
        unique = f"actorq_{self._fleet}_{name}"
        device = {"ids": [unique], "name": name, "mf": "actorq-fleet"}
        device |= {short: str(row[key]) for key, short in _DEVICE.items() if row.get(key)}
        components: dict[str, dict[str, Any]] = {}
        for sensor in SENSORS:
            if sensor.always or sensor.key in known:
                found = {
                    "p": "sensor",
                    "name": sensor.name,
                    "unit_of_measurement": sensor.unit,
                    "device_class": sensor.device_class,
                    "state_class": sensor.state_class,
                }
                components[sensor.key] = {key: value for key, value in found.items() if value is not None}
        # Of an actor that is gone they say that it is; figures are then of the past
        components["live"] = {"p": "binary_sensor", "name": "Heard", "device_class": "connectivity"}
        components["alarm"] = {"p": "binary_sensor", "name": "Alarm", "device_class": "problem"}
        components["alarms"] = {"p": "sensor", "name": "Alarms", "entity_category": "diagnostic"}
        for key, component in components.items():
            component["unique_id"] = f"{unique}_{key}"
            component["value_template"] = f"{{{{ value_json.{key} }}}}"
        return {
            "dev": device,
            "o": {"name": "actorq-fleet", "sw": broker.__version__},
            "cmps": components,
            "state_topic": f"{self._base}/{name}/state",
            "availability": [{"topic": f"{self._base}/status"}],
            "qos": 1,
        }


def _scaled(value: Any, scale: float) -> float | int | None:
    """Returns a figure in its unit; None where there is none, or no number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if scale == 1.0 and isinstance(value, int) else float(f"{value * scale:.6g}")
