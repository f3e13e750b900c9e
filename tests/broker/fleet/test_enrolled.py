"""Following who is enrolled: who is new, renewed, revoked or broken, and that nothing is read twice."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import pytest

from broker.fleet import enrolled, identity


@pytest.fixture
def fleet(tmp_path: Path) -> identity.Fleet:
    return identity.Fleet.open("lab", tmp_path / "lab")


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system's clock may give two changes of a test one time: only a second look tells them apart."""
    monkeypatch.setattr(enrolled, "_SHARE", math.inf)


def follower(fleet: identity.Fleet) -> tuple[enrolled.Enrolled[str], list[str]]:
    """Returns who follows passwords, and the names of the actors whose bundles were read."""
    read: list[str] = []

    def password(bundle: identity.Bundle) -> str:
        read.append(bundle.actor_id)
        return bundle.password

    return enrolled.Enrolled(fleet, password), read


def test_only_what_changed_is_read(fleet: identity.Fleet) -> None:
    follows, read = follower(fleet)
    assert not follows.follow() and follows.found == {}
    one, two = fleet.enroll("one"), fleet.enroll("two")
    assert follows.follow() and follows.found == {"one": one.password, "two": two.password}
    assert sorted(read) == ["one", "two"]
    assert not follows.follow() and len(read) == 2
    renewed = fleet.enroll("two")
    assert follows.follow() and follows.found == {"one": one.password, "two": renewed.password}
    assert read[2:] == ["two"]
    fleet.revoke("one")
    assert follows.follow() and follows.found == {"two": renewed.password} and len(read) == 3


def test_a_change_within_a_tick_of_the_clock_is_seen(fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity.Fleet, "enrolled_ns", 7)  # what a slow clock says of both
    follows, _ = follower(fleet)
    first = fleet.enroll("one")
    assert follows.follow() and follows.found == {"one": first.password}
    second = fleet.enroll("one")
    assert follows.follow() and follows.found == {"one": second.password}


def test_looks_for_a_second_change_take_a_share_of_the_time(
    fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolled, "_SHARE", 1e-9)  # so that any look took too long for another one
    follows, read = follower(fleet)
    fleet.enroll("one")
    assert follows.follow()
    before = fleet.enrolled_ns
    monkeypatch.setattr(identity.Fleet, "enrolled_ns", before)
    fleet.enroll("two")
    assert not follows.follow() and read == ["one"]
    monkeypatch.setattr(identity.Fleet, "enrolled_ns", before + 1)
    assert follows.follow() and read == ["one", "two"], "what the directory tells is taken in at once"


def test_nothing_is_looked_at_while_the_directory_is_as_it_was(
    fleet: identity.Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolled, "_TICK_S", -1.0)
    follows, _ = follower(fleet)
    fleet.enroll("one")
    assert follows.follow()
    monkeypatch.setattr(identity.Fleet, "enrolment", property(lambda _: pytest.fail("looked at each file")))
    assert not follows.follow()
    fleet.enroll("two")
    os.utime(fleet.directory / "actors", ns=(0, 0))  # another time for sure, whatever the clock's tick
    with pytest.raises(pytest.fail.Exception, match="looked at"):
        follows.follow()


def test_a_broken_bundle_is_its_actors_trouble_alone(fleet: identity.Fleet, caplog: pytest.LogCaptureFixture) -> None:
    follows, _ = follower(fleet)
    one, two = fleet.enroll("one"), fleet.enroll("two")
    follows.follow()
    for name in ("one", "three"):
        broken = fleet.directory / "actors" / f".{name}"
        broken.write_text("{")
        broken.rename(broken.with_name(f"{name}.json"))
    with caplog.at_level(logging.WARNING, "broker"):
        follows.follow()
        follows.follow()
    assert follows.found == {"one": one.password, "two": two.password}
    told = [record.getMessage().split(":")[0] for record in caplog.records]
    assert sorted(told) == ["keeping one", "leaving out three"], "once each"
