"""The brokers of this machine that can be asked: ours, and others where they are installed, as they come."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from broker.contract import address
from broker.fleet import identity
from broker.program import children
from broker.serve import listener
from broker.serve.mosquitto import process
from tests.broker.conformance import client

Start = Callable[[Path], contextlib.AbstractContextManager[client.Site]]
FLEET = "ask"
_START_S = 90.0


def installed() -> dict[str, Start]:
    """Returns how each broker that is installed is started, by its name, in a directory of its own."""
    found: dict[str, Start] = {}
    if process.find():
        found["mosquitto, as up --tls starts it"] = lambda home: _ours(home, "--kind", "mosquitto", "--tls")
        found["mosquitto, as up starts it"] = lambda home: _ours(home, "--kind", "mosquitto")
    if importlib.util.find_spec("amqtt"):
        found["embedded"] = lambda home: _ours(home, "--kind", "embedded")
    if program := process.find():
        found["mosquitto, its defaults"] = lambda home: _mosquitto(home, program)
    if nats := shutil.which("nats-server"):
        found["nats, its defaults"] = lambda home: _nats(home, nats, "")
        found["nats, max_payload 64MB"] = lambda home: _nats(home, nats, "max_payload: 64MB\n")
    if rabbit := shutil.which("rabbitmq-server") or shutil.which("rabbitmq-server", path="/usr/lib/rabbitmq/bin"):
        found["rabbitmq, its defaults"] = lambda home: _rabbit(home, rabbit)
    return found


def open_site(where: str, home: Path) -> client.Site:
    """A broker that lets in all."""
    return client.Site(address.Address.parse(where), identity.Fleet.open(FLEET, home / "fleets" / FLEET))


@contextlib.contextmanager
def _ours(home: Path, *arguments: str) -> Iterator[client.Site]:
    fleet = identity.Fleet.open(FLEET, home / "fleets" / FLEET)
    actors = [fleet.enroll(name) for name in ("pi-one", "pi-two")]
    command = [sys.executable, "-m", "broker", "up", *arguments, "--fleet", FLEET, "--port", "0", "--json"]
    with _running(command, {"ACTORQ_HOME": str(home)}) as up:
        assert up.stdout is not None
        where = json.loads(up.stdout.readline())
        yield client.Site(
            address.Address(where["host"], where["port"], where["tls"]), fleet, actors if where["tls"] else []
        )


@contextlib.contextmanager
def _mosquitto(home: Path, program: str) -> Iterator[client.Site]:
    port = listener.reserve("127.0.0.1", 0)
    file = _written(home / "mosquitto.conf", f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    with _running([program, "-c", str(file)], {}), _answering(port, home) as site:
        yield site


@contextlib.contextmanager
def _nats(home: Path, program: str, more: str) -> Iterator[client.Site]:
    port, other = (listener.reserve("127.0.0.1", 0) for _ in range(2))
    text = f'listen: "127.0.0.1:{other}"\nserver_name: ask\n{more}jetstream {{ store_dir: "{home}/store" }}\n'
    file = _written(home / "nats.conf", f'{text}mqtt {{ host: "127.0.0.1", port: {port} }}\n')
    with _running([program, "-c", str(file)], {}), _answering(port, home) as site:
        yield site


@contextlib.contextmanager
def _rabbit(home: Path, program: str) -> Iterator[client.Site]:
    port, other, distribution = (listener.reserve("127.0.0.1", 0) for _ in range(3))
    plugins = _written(home / "plugins", "[rabbitmq_mqtt].\n")
    listeners = f"listeners.tcp.default = 127.0.0.1:{other}\nmqtt.listeners.tcp.default = 127.0.0.1:{port}\n"
    file = _written(home / "rabbitmq.conf", f"{listeners}mqtt.allow_anonymous = true\n")
    environment = {
        "RABBITMQ_NODENAME": f"ask-{os.getpid()}@localhost",
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_CONFIG_FILE": str(file.with_suffix("")),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_MNESIA_BASE": str(home / "store"),
        "RABBITMQ_LOG_BASE": str(home / "logs"),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "HOME": str(home),
    }
    with _running([program], environment), _answering(port, home) as site:
        yield site


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@contextlib.contextmanager
def _running(command: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | environment,
            preexec_fn=children.die_with_parent(),  # noqa: PLW1509  one thread
        )
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(20.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            assert child.stdout is not None
            child.stdout.close()


@contextlib.contextmanager
def _answering(port: int, home: Path) -> Iterator[client.Site]:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            break
        if time.monotonic() > deadline:
            raise client.Unmet(f"it does not serve within {_START_S:g} s")
        time.sleep(0.1)
    yield open_site(f"127.0.0.1:{port}", home)
