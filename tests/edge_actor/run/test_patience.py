"""An actor that is a service: whoever answers on its broker's port while it starts, it is there when the broker is."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from broker.contract import codec, errors, messages, signing
from broker.fleet import identity
from broker.serve.mosquitto import access, process
from tests import conftest
from tests.fakes.connections import plain_client, stranger

pytestmark = [pytest.mark.system, pytest.mark.mosquitto]


def command(fleet: identity.Fleet, tmp_path: Path, *arguments: str) -> list[str]:
    fleet.enroll("pi", [arguments[0]]).write(tmp_path / "pi.json")
    made = [sys.executable, "-m", "edge_actor", "run", "--bundle", str(tmp_path / "pi.json"), "--env", "CartPole-v1"]
    made += ["--state-dir", str(tmp_path / "state"), "--spool-dir", str(tmp_path / "spool")]
    return [*made, "--connect-timeout-s", "0.2", *arguments[1:]]


def read(pipe: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in pipe:
        lines.put(line)


@pytest.mark.fault(3)
def test_a_service_outlasts_every_stranger(tmp_path: Path) -> None:
    conftest.require("mosquitto")
    fleet = identity.Fleet.open("lab", tmp_path / "fleet")
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30.0)
        with stranger.Stranger(fleet, tmp_path, "self-signed") as other:
            actor = subprocess.Popen(
                command(fleet, tmp_path, other.address),
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")},
            )
            assert actor.stderr is not None
            reader = threading.Thread(target=read, args=(actor.stderr, lines), daemon=True)
            reader.start()
            try:
                assert systemd.recv(100) == b"READY=1", "it is watched from here on"
                for other.manner, said in (
                    ("self-signed", "not one of this fleet"),
                    ("alert", "does not let this user in"),
                    ("plain", "does not speak TLS"),
                    ("refuses the password", "Not authorized"),
                ):
                    assert said in lines.get(timeout=20)
                assert actor.poll() is None, "15 is for a bundle alone: systemd never starts that again"
                other.__exit__()
                admission = access.Admission(fleet.users(), fleet.authority.certificate, fleet.broker_credential())
                with (
                    process.Mosquitto("127.0.0.1", other.port, fleet="lab", admission=admission),
                    plain_client.PlainClient(other.port, "l", "learner", fleet.password, fleet.tls()) as learner,
                ):
                    topic = "actorq/lab/actor/pi/state"
                    learner.subscribe(topic)
                    _, payload, _ = learner.next(30.0)
                    mac = signing.ActorMac(fleet.bundle("pi").mac_key)
                    assert codec.decode(messages.ActorState, mac.open(topic, payload)).online
                actor.terminate()
                assert actor.wait(20.0) == errors.EXIT_OK
            finally:
                actor.kill()
                actor.wait()
                reader.join(10.0)


@pytest.mark.fault(3)
def test_one_that_is_run_by_hand_says_what_it_met(tmp_path: Path) -> None:
    fleet = identity.Fleet.open("lab", tmp_path / "fleet")
    with stranger.Stranger(fleet, tmp_path, "self-signed") as other:
        run = command(fleet, tmp_path, other.address)
        done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == errors.BrokerUnreachable.exit_code, done.stderr
    assert "not one of this fleet" in done.stderr and "Traceback" not in done.stderr
