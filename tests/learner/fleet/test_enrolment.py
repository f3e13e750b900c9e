"""Following who is enrolled beside a loop: it is never made to wait, and a revoked actor's key goes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from broker.contract import errors
from broker.fleet import identity
from learner.fleet import enrolment
from tests import conftest


def test_a_loop_does_not_wait_for_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = identity.Fleet.open("lab", tmp_path / "lab")
    fleet.enroll("one")
    follows = enrolment.Enrolment(fleet)
    follows.read()
    assert follows.mac("one") is follows.macs["one"] and follows.version == 1
    may_look, looks = threading.Event(), vars(identity.Fleet)["enrolment"]

    def slow(self: identity.Fleet) -> object:
        assert threading.current_thread() is not threading.main_thread()
        assert may_look.wait(60.0)
        return looks.fget(self)

    monkeypatch.setattr(identity.Fleet, "enrolment", property(slow))
    monkeypatch.setattr(enrolment, "_PERIOD_S", 0.0)
    fleet.enroll("two")
    fleet.revoke("one")
    for _ in range(100):
        follows.follow()
    assert follows.macs.keys() == {"one"} and follows.version == 1, "the look has not ended"
    may_look.set()

    def is_followed() -> bool:
        follows.follow()
        return follows.macs.keys() == {"two"}

    conftest.wait_until(is_followed, "the change is followed", 60.0)
    with pytest.raises(errors.SignatureError, match="not enrolled"):
        follows.mac("one")
    monkeypatch.setattr(identity.Fleet, "enrolment", property(lambda _: pytest.fail("looked at each file")))


def test_a_rotated_fleet_ends_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = identity.Fleet.open("lab", tmp_path / "lab")
    fleet.enroll("one")
    follows = enrolment.Enrolment(fleet)
    follows.read()
    monkeypatch.setattr(enrolment, "_PERIOD_S", 0.0)
    identity.Fleet.open("lab", tmp_path / "lab").rotate()
    ended = []

    def has_ended() -> bool:
        try:
            follows.follow()
        except errors.IdentityError as error:
            ended.append(error)
        return bool(ended)

    conftest.wait_until(has_ended, "the session has heard of it", 60.0)
    assert "rotated" in ended[0].what
