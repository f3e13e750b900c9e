"""`actorq-actor check`, on recorded boards and against a real broker."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from broker.contract import errors
from broker.fleet import identity
from broker.serve.mosquitto import access, process
from edge_actor import config
from edge_actor.experience import journal
from edge_actor.policies import interpreter
from edge_actor.run import check
from tests import conftest, runtimes
from tests.edge_actor.board.boards import trees
from tests.edge_actor.policies import plugins
from tests.fakes.connections import stranger


def found(settings: config.ActorConfig, root: Path) -> dict[str, check.Finding]:
    return {finding.name: finding for finding in check.run(settings, root)}


def settings(tmp_path: Path, **changes: str) -> config.ActorConfig:
    return config.ActorConfig(
        **{"state_dir": str(tmp_path / "state"), "spool_dir": str(tmp_path / "spool")} | changes  # type: ignore[arg-type]
    )


def test_a_board_without_a_bundle(tmp_path: Path) -> None:
    runtimes.python("ai-edge-litert")
    root = trees.plant("4b", tmp_path / "root")
    trees.put(root, "proc/meminfo", "MemTotal: 3883348 kB\nMemFree: 1 kB\nMemAvailable:    3407460 kB\n")
    report = found(settings(tmp_path), root)
    assert report["board"].what.startswith("Raspberry Pi 4 Model B Rev 1.4, Cortex-A72")
    assert report["delegate"].what == "int8 runs on XNNPACK kernels"
    assert "and right to" in report["inference"].what
    assert report["heat"] == check.Finding("heat", "ok", "42 °C")
    assert report["memory"].what == "3489 MB available"
    assert report["memory cgroup"].state == "warn" and "cmdline.txt" in report["memory cgroup"].todo
    assert report["bundle"].state == "warn" and "enroll" in report["bundle"].todo
    kind = "in memory" if journal.in_memory(tmp_path) else "on disk"
    assert report["spool"].state == "ok" and kind in report["spool"].what
    assert report["power"].what.startswith("INA226 hwmon2: ")
    assert "broker" not in report
    assert check.exit_code(list(report.values())) == errors.EXIT_OK


def test_a_board_in_trouble(tmp_path: Path) -> None:
    root = trees.plant("3b", tmp_path / "root")
    trees.put(root, "proc/meminfo", "MemAvailable: 99000 kB\n")
    trees.put(root, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n")
    report = found(settings(tmp_path), root)
    assert report["heat"].state == "warn" and "power supply" in report["heat"].todo
    assert report["heat"].what == "55 °C; now: under-voltage, throttled; since boot: under-voltage, throttled"
    assert report["memory"].state == "warn"
    assert report["memory cgroup"].state == "ok"
    assert report["power"].state == "warn" and "ratio of times" in report["power"].what
    (root / "proc/cpuinfo").unlink()  # as systemd's ProcSubset=pid does
    assert found(settings(tmp_path), root)["board"].state == "warn"


def test_kernels_that_miscompute_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(interpreter.Interpreter):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            invoke = self.invoke

            def wrong() -> None:
                invoke()
                self.output[...] = np.roll(self.output, 1)

            self.invoke = wrong

    monkeypatch.setattr(interpreter, "Interpreter", Wrong)
    report = found(settings(tmp_path), tmp_path)
    assert report["inference"].state == "fail"
    assert check.exit_code(list(report.values())) == errors.PolicyError.exit_code


def test_a_runtime_of_the_users_own(tmp_path: Path) -> None:
    report = found(settings(tmp_path, runtime=f"{plugins.__name__}:Float32Only"), tmp_path)
    assert (report["runtime"].state, report["runtime"].what) == ("ok", "float32-only 2")
    assert report["delegate"].what.startswith("float32 runs on ")
    assert report["inference"].state == "ok" and "and right to" in report["inference"].what


def test_a_runtime_of_the_users_own_that_is_not_there(tmp_path: Path) -> None:
    report = found(settings(tmp_path, runtime="nowhere:Runtime"), tmp_path)
    assert report["runtime"].state == "fail" and "PYTHONPATH" in report["runtime"].todo
    assert check.exit_code(list(report.values())) == errors.RuntimeMissing.exit_code


def test_a_clock_from_before_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 86400.0)
    report = found(settings(tmp_path), tmp_path)
    assert report["clock"].state == "fail" and "time-sync.target" in report["clock"].todo


def test_a_spool_that_cannot_be_written(tmp_path: Path) -> None:
    report = found(settings(tmp_path, spool_dir="/proc/actorq"), tmp_path)
    assert report["spool"].state == "fail" and "--spool-dir" in report["spool"].todo
    assert check.exit_code(list(report.values())) == errors.ConfigError.exit_code


def test_a_bundle_that_is_none_or_not_closed(tmp_path: Path) -> None:
    bundle = tmp_path / "pi.json"
    bundle.write_text("{}")
    assert found(settings(tmp_path, bundle=str(bundle)), tmp_path)["bundle"].code == errors.IdentityError.exit_code
    identity.Fleet.open("lab", tmp_path / "fleet").enroll("pi", ["127.0.0.1:1"]).write(bundle)
    bundle.chmod(0o644)
    report = found(settings(tmp_path, bundle=str(bundle)), tmp_path)
    assert report["bundle"].state == "warn" and report["bundle"].todo == f"chmod 600 {bundle}"
    assert report["broker"].code == errors.BrokerUnreachable.exit_code


@pytest.mark.mosquitto
def test_a_broker_over_tls(tmp_path: Path) -> None:
    conftest.require("mosquitto")
    fleet, bundle = identity.Fleet.open("lab", tmp_path / "fleet"), tmp_path / "pi.json"
    fleet.enroll("pi")
    other = identity.Fleet.open("other", tmp_path / "other")
    admission = access.Admission(fleet.users(), fleet.authority.certificate, fleet.broker_credential())
    with process.Mosquitto("127.0.0.1", 0, fleet="lab", admission=admission) as mosquitto:
        where = f"mqtts://127.0.0.1:{mosquitto.port}"
        dataclasses.replace(fleet.bundle("pi"), brokers=(where,)).write(bundle)
        report = found(settings(tmp_path, bundle=str(bundle)), tmp_path)
        assert "let pi in over TLS, with its certificate" in report["broker"].what
        assert report["bundle"].state == "ok"
        other.enroll("pi", [where]).write(bundle)  # of an authority that this broker does not have
        assert found(settings(tmp_path, bundle=str(bundle)), tmp_path)["broker"].state == "fail"


@pytest.mark.fault(3)
def test_strangers_are_told_apart_and_none_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_BROKER_S", 0.5)
    fleet, bundle = identity.Fleet.open("lab", tmp_path / "fleet"), tmp_path / "pi.json"
    with stranger.Stranger(fleet, tmp_path, "self-signed") as other:
        fleet.enroll("pi", [other.address]).write(bundle)
        said = {}
        for other.manner in ("self-signed", "alert", "plain"):
            found = next(iter(check._broker(settings(tmp_path), identity.Bundle.read(bundle))))
            assert (found.state, found.code) == ("fail", errors.BrokerUnreachable.exit_code)
            said[found.todo] = found.what
    assert len(said) == 3, "each with what to do about it"
    assert other.address in next(iter(said.values()))


@pytest.mark.mosquitto
@pytest.mark.system
def test_the_command_against_a_broker(mosquitto: conftest.BrokerProcess, tmp_path: Path) -> None:
    bundle = tmp_path / "pi.json"
    identity.Fleet.open("lab", tmp_path / "fleet").enroll("pi", [mosquitto.address]).write(bundle)
    command = [sys.executable, "-m", "edge_actor", "check", "--bundle", str(bundle), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    report = json.loads(done.stdout)
    lines = {finding["name"]: finding for finding in report["findings"]}
    assert lines["broker"]["what"].startswith(f"{mosquitto.address} let pi in without TLS, on this machine"), lines
    assert lines["bundle"]["state"] == "ok"
    assert done.returncode == 0 and report["ok"] is True
    mosquitto.kill()
    done = subprocess.run(command[:-1], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == errors.BrokerUnreachable.exit_code
    assert "fail  broker" in done.stdout and "to do: " in done.stdout


def test_offline_no_broker_is_looked_for(tmp_path: Path) -> None:
    bundle = tmp_path / "pi.json"
    identity.Fleet.open("lab", tmp_path / "fleet").enroll("pi", ["127.0.0.1:1"]).write(bundle)
    report = {one.name: one for one in check.run(settings(tmp_path, bundle=str(bundle)), tmp_path, offline=True)}
    assert report["bundle"].state == "ok" and "broker" not in report
