"""A fleet shows nothing to others without being asked: no open port, no readable file."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from broker import __main__ as command
from broker.contract import address as addresses
from learner.run import local_fleet
from tests import conftest as brokers
from tests.system import conftest
from tests.system.conftest import QUICK

pytestmark = pytest.mark.system


@pytest.fixture
def careless() -> Iterator[None]:
    """The most generous umask there is, as some service managers have it."""
    before = os.umask(0)
    yield
    os.umask(before)


def listening(pid: int) -> list[str]:
    """Addresses on which a process or a child of it takes connections."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = [one for process in family for one in process.net_connections("inet")]
    return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN or one.type.name == "SOCK_DGRAM"]


def open_to_others(root: Path) -> list[str]:
    """Returns what anyone but its owner may read, write or look into."""
    return [str(path) for path in (root, *root.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077]


@pytest.mark.parametrize("kind", brokers.KINDS)
def test_only_the_broker_listens_and_only_on_this_machine(
    kind: str, start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path, careless: None
) -> None:
    fleet = start_fleet(kind)
    fleet.start_actor("pi", ["--env", "CartPole-v1", "--spool-dir", "disk"])
    endless = ["--max-env-steps", "10000000", "--solved-return", "inf"]
    fleet.start_learner([*QUICK, "--run-dir", str(run_root / "run"), *endless])
    brokers.wait_until(lambda: list((run_root / "run").glob("policies/*.tflite")), "training began", 60.0)
    state = fleet.directory / "home" / "actors" / "pi"
    brokers.wait_until((state / "newest.json").exists, "the actor stored a policy", 20.0)

    found = [
        where for name, child in fleet.children.items() if name.startswith("broker") for where in listening(child.pid)
    ]
    assert found and all(ipaddress.ip_address(address).is_loopback for address in found)
    assert listening(fleet.children["learner"].pid) == []
    assert listening(fleet.children["pi"].pid) == []

    assert open_to_others(fleet.directory / "home") == []
    spool = list((state / "spool").iterdir())
    assert spool and {path.name for path in state.iterdir()} >= {"boot", "newest.json", "keyframe.sealed"}


def test_init_enroll_and_rotate_leave_nothing_open(tmp_path: Path, careless: None) -> None:
    home = tmp_path / "not" / "yet" / "there"
    for arguments in (["init"], ["enroll", "pi", "-o", str(home / "pi.json")], ["rotate", "-o", str(home / "new")]):
        done = conftest.command("broker", *arguments, home=home)
        assert done.returncode == 0, done.stderr
    assert (home / "new" / "pi.json").exists()
    assert open_to_others(tmp_path / "not") == []


def test_where_nothing_is_said_the_address_is_this_machines() -> None:
    """Conditions under which `up` takes another one are in tests/broker/test_broker_main.py."""
    assert addresses.is_loopback(command._parser().parse_args(["up"]).bind)
