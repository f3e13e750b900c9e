"""A swap leaves on disk the last good policy, and the order below which nothing may act again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import codec, messages, signing
from edge_actor.policies import policy_store, receiver
from tests import conftest
from tests.edge_actor.policies import offers

pytestmark = pytest.mark.usefixtures("synchronised")


@pytest.mark.parametrize(
    ("arrivals", "stored"),
    [
        ([offers.whole(1), offers.whole(3)], 3),
        ([offers.whole(1), offers.patch(1, 2), offers.patch(1, 3)], 3),
        ([offers.whole(1), offers.patch(1, 2), offers.step(2, 3)], 2),  # the sealed do not make 3
        ([offers.whole(1), offers.patch(1, 2), offers.step(2, 3), offers.patch(1, 3)], 3),  # now they do
        ([offers.whole(1), offers.patch(1, 2), offers.whole(4)], 4),
        ([offers.whole(1), offers.patch(1, 2), offers.step(2, 4), offers.whole(4)], 4),
    ],
)
def test_the_last_good_policy_acts_after_a_restart_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrivals: list[offers.Offer], stored: int
) -> None:
    monkeypatch.setattr(receiver, "STORE_PERIOD_S", 0.0)
    first = offers.Receiver(tmp_path)
    first.start(offers.VERIFIER, offers.NAMES)
    for offer in arrivals:
        first.receive(*offer)
        first.acts()
    first.close()

    second = offers.Receiver(tmp_path)
    second.start(offers.VERIFIER, offers.NAMES)
    assert second.acts() == stored
    assert second.refused == {}
    second.receive(*offers.whole(0))
    assert second.refused == {"older": 1}
    second.close()


def test_between_two_stores_only_closing_writes(tmp_path: Path) -> None:
    made = offers.Receiver(tmp_path)
    made.start(offers.VERIFIER, offers.NAMES)
    made.receive(*offers.whole(1))
    assert made.acts() == 1
    conftest.wait_until((tmp_path / "keyframe.sealed").exists, "the first one is stored at once")
    made.receive(*offers.patch(1, 2))
    assert made.acts() == 2
    assert not (tmp_path / "delta.sealed").exists()
    made.close()
    assert (tmp_path / "delta.sealed").read_bytes() == patch_bytes(made)


def patch_bytes(made: offers.Receiver) -> bytes:
    newest = made.held.newest
    assert newest is not None
    return newest.sources[1]


@pytest.mark.parametrize("lost", ["keyframe.sealed", "delta.sealed"])
def test_a_rollback_is_refused_though_the_stored_policy_is_gone(tmp_path: Path, lost: str) -> None:
    first = offers.Receiver(tmp_path)
    first.start(offers.VERIFIER, offers.NAMES)
    for offer in (offers.whole(5), offers.patch(5, 9)):
        first.receive(*offer)
        first.acts()
    first.close()
    (tmp_path / lost).unlink()

    second = offers.Receiver(tmp_path)
    second.start(offers.VERIFIER, offers.NAMES)
    kept = second.acts()
    assert kept == (None if lost.startswith("keyframe") else 5), "what is on this disk may act, lest it stands still"
    for replay in (offers.whole(6), offers.patch(5, 8), offers.whole(5), offers.whole(99, epoch=0)):
        second.receive(*replay)
        assert second.acts() is None, "older than what acted in the life before"
    assert second.refused["older"] >= 2
    second.receive(*offers.patch(5, 9))
    if lost.startswith("keyframe"):
        second.receive(*offers.whole(9))
    assert second.acts() == 9, "as new as that one is new enough"
    second.close()


def test_orders_under_another_key_mean_nothing(tmp_path: Path) -> None:
    """A fleet that began anew begins with epoch 1, and nobody can replay what the new key did not sign."""
    policy_store.PolicyStore(tmp_path, b"o" * 32).write((b"sealed by an old key",), messages.Order(7, 100))
    made = offers.Receiver(tmp_path)
    made.start(offers.VERIFIER, offers.NAMES)
    assert made.refused == {"stored": 1}
    made.receive(*offers.whole(1))
    assert made.acts() == 1
    made.close()


@pytest.mark.parametrize("junk", [b"{", b"[]", b'{"epoch": "x"}', b"\xff"])
def test_a_damaged_order_is_said_and_stops_nothing(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "newest.json").write_bytes(junk)
    made = offers.Receiver(tmp_path)
    made.start(offers.VERIFIER, offers.NAMES)
    assert made.refused == {"stored": 1}
    made.receive(*offers.whole(1))
    assert made.acts() == 1
    made.close()


@pytest.mark.parametrize("damage", [lambda b: b[:-1] + b"x", lambda b: b[:50], lambda b: b"x"])
def test_a_damaged_store_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any) -> None:
    (tmp_path / "keyframe.sealed").write_bytes(damage(offers.whole()[1]))
    made = offers.Receiver(tmp_path)
    made.start(offers.VERIFIER, offers.NAMES)
    assert not made.has_work
    assert made.refused == {"stored": 1}
    assert "stored policy cannot be used" in caplog.messages[0]
    made.close()


def test_a_store_of_another_learner_is_refused(tmp_path: Path) -> None:
    stranger = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())
    sealed = stranger.seal(offers.NAMES.policy("main"), codec.encode(offers.whole()[0]))
    (tmp_path / "keyframe.sealed").write_bytes(sealed)
    made = offers.Receiver(tmp_path)
    made.start(offers.VERIFIER, offers.NAMES)
    assert made.refused == {"stored": 1}
    made.close()


def test_a_stored_patch_of_another_policy_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "keyframe.sealed").write_bytes(offers.whole(7)[1])
    (tmp_path / "delta.sealed").write_bytes(offers.patch(1, 6)[1])
    made = offers.Receiver(tmp_path)
    made.start(offers.VERIFIER, offers.NAMES)
    assert made.acts() == 7
    made.close()


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    made = offers.Receiver(blocked)
    made.start(offers.VERIFIER, offers.NAMES)
    made.receive(*offers.whole())
    acting = made.newest()
    assert acting is not None
    assert np.isin(acting.act(np.zeros((1, 4), np.float32)), [0, 1])
    conftest.wait_until(lambda: "store" in made.refused or "stored" in made.refused, "counted")
    made.close()
