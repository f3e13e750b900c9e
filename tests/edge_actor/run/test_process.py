"""The actor as a process: memory, what it loads, and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from broker.contract import errors
from broker.fleet import identity
from tests import conftest
from tests.edge_actor.policies.models import files
from tests.fakes import fake_learner

pytestmark = [pytest.mark.mosquitto, pytest.mark.system]


def test_it_stays_small_never_holds_tensorflow_and_ends_well(mosquitto: conftest.BrokerProcess, tmp_path: Path) -> None:
    fleet = identity.Fleet.open("lab", tmp_path / "fleet")
    bundle = tmp_path / "pi.json"
    fleet.enroll("pi", [mosquitto.address]).write(bundle)
    learner = fake_learner.FakeLearner(mosquitto.address, fleet, "pi")
    command = [sys.executable, "-m", "edge_actor", "run", "--bundle", str(bundle), "--env", "CartPole-v1"]
    command += ["--state-dir", str(tmp_path / "state"), "--spool-dir", str(tmp_path / "spool")]
    actor = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        born = learner.await_birth()
        assert born.birth is not None
        learner.publish(fake_learner.policy(files.INT8.read_bytes(), born.birth.spec.fingerprint))
        learner.assign(fake_learner.assignment(born.boot, steps_granted=1 << 40, message_steps=1024))
        learner.await_steps(100_000, timeout_s=60.0)
        rss = psutil.Process(actor.pid).memory_info().rss
        mapped = {Path(m.path).name for m in psutil.Process(actor.pid).memory_maps()}
        assert not [name for name in mapped if re.search("tensorflow|keras", name)]
        assert rss <= 80e6, f"{rss / 1e6:.1f} MB"
        conftest.wait_until(lambda: learner.state is not None and learner.state.vitals.rss_bytes, "told")
        began = time.monotonic()
        actor.send_signal(signal.SIGTERM)
        assert actor.wait(10.0) == errors.EXIT_OK
        assert time.monotonic() - began < 2.0
        conftest.wait_until(lambda: not learner.states[-1].online, "it said goodbye")
        assert learner.states[-1].session == born.session
    finally:
        actor.kill()
        learner.close()


def test_a_killed_actor_is_seen(mosquitto: conftest.BrokerProcess, tmp_path: Path) -> None:
    fleet = identity.Fleet.open("lab", tmp_path / "fleet")
    bundle = tmp_path / "pi.json"
    fleet.enroll("pi", [mosquitto.address]).write(bundle)
    learner = fake_learner.FakeLearner(mosquitto.address, fleet, "pi")
    command = [sys.executable, "-m", "edge_actor", "run", "--bundle", str(bundle), "--env", "CartPole-v1"]
    command += ["--state-dir", str(tmp_path / "state"), "--spool-dir", "disk"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        born = learner.await_birth()
        first.kill()
        conftest.wait_until(lambda: not learner.states[-1].online, "the will speaks")
        second = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            conftest.wait_until(lambda: learner.states[-1].online, "born again", 20.0)
            assert learner.states[-1].boot > born.boot
            assert learner.states[-1].session != born.session
            second.send_signal(signal.SIGINT)
            assert second.wait(10.0) == errors.EXIT_OK
        finally:
            second.kill()
    finally:
        first.kill()
        learner.close()


def test_no_broker_is_a_named_exit_code(tmp_path: Path) -> None:
    bundle = tmp_path / "pi.json"
    identity.Fleet.open("lab", tmp_path / "fleet").enroll("pi", ["127.0.0.1:1"]).write(bundle)
    command = [sys.executable, "-m", "edge_actor", "run", "--bundle", str(bundle), "--env", "CartPole-v1"]
    done = subprocess.run(
        [*command, "--connect-timeout-s", "0.5", "--state-dir", str(tmp_path / "state")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == errors.BrokerUnreachable.exit_code
    assert "no broker answered" in done.stderr
    assert "Traceback" not in done.stderr
