"""The actor tells systemd how it is, on a socket like systemd's."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract import errors
from broker.fleet import identity
from edge_actor.board import watchdog
from tests import conftest
from tests.fakes import fake_learner


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """The other end of NOTIFY_SOCKET."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address)
        listening.settimeout(20.0)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        yield listening


def _listen(listening: socket.socket, words: int) -> None:
    for _ in range(words):
        listening.recv(100)


def _heard(listening: socket.socket) -> list[bytes]:
    """All that was said so far."""
    words = []
    while select.select([listening], [], [], 0)[0]:
        words.append(listening.recv(100))
    return words


def test_ready_once_then_alive_four_times_in_each_limit(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "8000000")
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    dog = watchdog.Watchdog.open()
    for now in (100.0, 101.9, 102.0, 103.9, 104.1, 104.2, 106.2):  # noqa: B007  the clock reads it
        dog.alive()
    assert _heard(systemd) == [b"READY=1", *[b"WATCHDOG=1"] * 3]
    assert "NOTIFY_SOCKET" not in os.environ  # environments start processes too


@pytest.mark.parametrize("variable", [("WATCHDOG_USEC", ""), ("WATCHDOG_PID", str(os.getpid() + 1))])
def test_without_a_limit_for_this_process_it_is_only_ready(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    monkeypatch.setenv(*variable)
    dog = watchdog.Watchdog.open()
    for _ in range(3):
        dog.alive()
    assert _heard(systemd) == [b"READY=1"]


def test_a_systemd_that_is_gone_ends_nobody(systemd: socket.socket) -> None:
    dog = watchdog.Watchdog.open()
    Path(systemd.getsockname()).unlink()
    dog.alive()


_STICKS = """
import time
import gymnasium
class Sticks(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observation_space.sample(), {}
    def step(self, action):
        self.steps += 1
        time.sleep(0.01 if self.steps < 100 else 3600)
        return self.observation_space.sample(), 0.0, False, False, {}
"""


@pytest.mark.mosquitto
@pytest.mark.system
def test_an_actor_is_alive_until_its_environment_hangs(
    systemd: socket.socket, mosquitto: conftest.BrokerProcess, tmp_path: Path
) -> None:
    fleet = identity.Fleet.open("lab", tmp_path / "fleet")
    fleet.enroll("pi", [mosquitto.address]).write(tmp_path / "pi.json")
    (tmp_path / "sticks.py").write_text(_STICKS)
    learner = fake_learner.FakeLearner(mosquitto.address, fleet, "pi")
    command = [sys.executable, "-m", "edge_actor", "run", "--bundle", str(tmp_path / "pi.json")]
    command += [
        "--env",
        f"{tmp_path / 'sticks.py'}:Sticks",
        "--state-dir",
        str(tmp_path),
        "--spool-dir",
        str(tmp_path / "s"),
    ]
    actor = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"WATCHDOG_USEC": "400000"})
    try:
        assert systemd.recv(100) == b"READY=1"
        learner.assign(fake_learner.assignment(learner.await_birth().boot, steps_granted=50, message_steps=10))
        learner.await_steps(50)
        _heard(systemd)
        assert {systemd.recv(100) for _ in range(3)} == {b"WATCHDOG=1"}  # idle, without a grant, and alive
        learner.assign(fake_learner.assignment(learner.await_birth().boot, steps_granted=1000, message_steps=10))
        systemd.settimeout(1.0)
        with pytest.raises(TimeoutError):
            _listen(systemd, 100)
        beats = len(learner.states)
        conftest.wait_until(lambda: len(learner.states) > beats, "its heartbeat still looks well")
    finally:
        actor.send_signal(signal.SIGKILL)
        actor.wait()
        learner.close()
    assert actor.returncode != errors.EXIT_OK
