"""Who answers on a broker's port is not always a broker of the fleet: that is said, tried again, and never final."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract import errors
from broker.fleet import certificates, identity
from broker.mqtt import link
from broker.serve.mosquitto import access, process
from tests import conftest
from tests.fakes import log_reader
from tests.fakes.connections import stranger

SAID = {
    "self-signed": "not one of this fleet",
    "alert": "does not let this user in",
    "plain": "does not speak TLS",
    "refuses the password": "does not let this user in .*Not authorized",
}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> log_reader.LogReader:
    """Returns what links log."""
    return log_reader.LogReader(caplog, "broker.mqtt")


@pytest.fixture
def fleet() -> identity.Fleet:
    made = identity.Fleet.open("lab")
    made.enroll("pi")
    return made


@pytest.fixture
def links() -> Iterator[list[link.Link]]:
    made: list[link.Link] = []
    yield made
    for one in made:
        one.close()


def start(fleet: identity.Fleet, links: list[link.Link], *addresses: str) -> link.Link:
    bundle = fleet.bundle("pi")
    links.append(link.Link(addresses, "pi", username="pi", password=bundle.password, tls=bundle.tls()))
    links[-1].start()
    return links[-1]


@pytest.mark.fault(3)
@pytest.mark.parametrize("manner", SAID)
def test_a_stranger_is_no_reason_to_end_for_good(
    fleet: identity.Fleet, links: list[link.Link], tmp_path: Path, log: log_reader.LogReader, manner: str
) -> None:
    """Code 13 is the only one with which a service manager starts it again (firmware_notes/setup_pi.sh)."""
    with stranger.Stranger(fleet, tmp_path, manner) as other:
        actor = start(fleet, links, other.address)
        line = log.get(20)
        assert other.address in line and line.endswith("trying again")
        with pytest.raises(errors.BrokerUnreachable, match=SAID[manner]) as caught:
            actor.wait_connected(0.0)
        assert caught.value.where == other.address and caught.value.todo


@pytest.mark.fault(3)
@pytest.mark.parametrize("wrong", ["clock", "certificate"])
def test_a_wrong_date_is_said(
    fleet: identity.Fleet,
    links: list[link.Link],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: log_reader.LogReader,
    wrong: str,
) -> None:
    """A clock that is behind all certificates, as these here are ahead of the clock; and a certificate that ended."""
    now = datetime.datetime.now(datetime.UTC)
    if wrong == "clock":
        monkeypatch.setattr(certificates, "NOT_BEFORE", now + datetime.timedelta(days=3))
        fleet = identity.Fleet.open("ahead")
        fleet.enroll("pi")
    else:
        monkeypatch.setattr(certificates, "RENEWED_DAYS", -2)
    with stranger.Stranger(fleet, tmp_path, "own") as broker:
        start(fleet, links, broker.address)
        line = log.get(20)
    if wrong == "clock":
        assert re.search(r"the clock says \d{4}-\d\d-\d\d, .* valid from ", line)
        assert f"valid from {now + datetime.timedelta(days=3):%Y-%m-%d} to" in line
    else:
        assert "certificate is out of date, or the clock, which says" in line


@pytest.mark.fault(3)
def test_each_change_is_said_once(
    fleet: identity.Fleet, links: list[link.Link], tmp_path: Path, log: log_reader.LogReader
) -> None:
    with stranger.Stranger(fleet, tmp_path, "self-signed") as other:
        start(fleet, links, other.address)
        for manner in ("alert", "plain", "self-signed"):
            log.get(20)
            other.manner = manner
        assert "not one of this fleet" in log.get(20), "again, as it was something else meanwhile"
        assert log.empty()


def test_behind_strangers_the_next_of_the_list_is_found(
    fleet: identity.Fleet, links: list[link.Link], tmp_path: Path, log: log_reader.LogReader
) -> None:
    conftest.require("mosquitto")
    admission = access.Admission(fleet.users(), fleet.authority.certificate, fleet.broker_credential())
    (tmp_path / "second").mkdir()
    with (
        stranger.Stranger(fleet, tmp_path, "self-signed") as one,
        stranger.Stranger(fleet, tmp_path / "second", "alert") as two,
        process.Mosquitto("127.0.0.1", 0, fleet="lab", admission=admission) as mosquitto,
    ):
        own = f"mqtts://127.0.0.1:{mosquitto.port}"
        actor = start(fleet, links, one.address, two.address, own)
        actor.wait_connected(20)
        assert actor.address == own
        assert one.address in log.get() and two.address in log.get()


@pytest.mark.fault(3)
def test_several_are_each_told(
    fleet: identity.Fleet, links: list[link.Link], tmp_path: Path, log: log_reader.LogReader
) -> None:
    with stranger.Stranger(fleet, tmp_path, "self-signed") as other:
        actor = start(fleet, links, "mqtts://127.0.0.1:1", other.address)
        for _ in range(2):
            log.get(20)
        with pytest.raises(errors.BrokerUnreachable, match="no broker of 2 let us in") as caught:
            actor.wait_connected(0.0)
    assert "127.0.0.1:1: [Errno 111]" in caught.value.where and "not one of this fleet" in caught.value.where


@pytest.mark.fault(3)
def test_a_full_disk_is_no_bad_bundle(fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    bundle = fleet.bundle("pi")
    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    monkeypatch.setattr("os.memfd_create", full)
    with pytest.raises(errors.ActorqError, match="the disk is full") as caught:
        bundle.tls()
    assert caught.value.exit_code not in (2, 10, 12, 15, 18), "after those a service stays down"
