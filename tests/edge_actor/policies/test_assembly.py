"""Policies that come as patches and pieces: chains, bases, gaps, damage and replays, as the receiver sees them."""

from __future__ import annotations

import dataclasses
import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import errors, messages
from broker.contract.policies import policy_patch
from edge_actor.policies import policy, receiver
from tests.edge_actor.policies import offers

pytestmark = pytest.mark.usefixtures("synchronised")


def test_a_chain_of_steps_from_the_policy_before(received: offers.Receiver) -> None:
    received.receive(*offers.whole(1))
    for version in range(2, 9):
        received.receive(*offers.step(version - 1, version))
        if version % 3 == 0:
            assert received.acts() == version
    newest = received.held.newest
    assert newest is not None
    assert newest.model == offers.variant(8), "those that were never built are bases all the same"
    assert received.refused == {}


@pytest.mark.parametrize("patch_first", [False, True])
def test_a_late_joiner_needs_the_whole_one_and_one_patch_in_any_order(
    received: offers.Receiver, patch_first: bool
) -> None:
    arrivals = [offers.whole(10), offers.patch(10, 17)]
    for offer in reversed(arrivals) if patch_first else arrivals:
        received.receive(*offer)
    assert received.acts() == 17
    assert received.refused == ({"base": 1} if patch_first else {})


def test_lost_steps_are_mended_by_the_next_patch(received: offers.Receiver) -> None:
    received.receive(*offers.whole(1))
    received.receive(*offers.step(1, 2))
    assert received.acts() == 2
    received.receive(*offers.step(3, 4))  # 3 is lost, and 4 cannot be made without it
    assert received.acts() is None
    assert received.refused == {"base": 1}
    assert received.phase is receiver.Phase.ANNOUNCED
    assert received.announced == (1, 4)
    received.receive(*offers.patch(1, 6))
    assert received.acts() == 6
    received.receive(*offers.step(6, 7))
    assert received.acts() == 7


def test_a_patch_for_an_unknown_base_waits_for_it(received: offers.Receiver) -> None:
    received.receive(*offers.whole(1))
    assert received.acts() == 1
    received.receive(*offers.patch(20, 21))
    assert received.acts() is None
    received.receive(*offers.whole(20))
    assert received.acts() == 21
    assert received.refused == {"base": 1}
    received.receive(*offers.patch(20, 22, epoch=2))
    assert received.acts() is None, "the base belongs to the epoch"


def damaged(version: int, patch: bytes) -> offers.Offer:
    """A genuine, signed patch whose bytes are not what they should be."""
    message = offers.patch(1, version)[0]
    assert isinstance(message, messages.PolicyPatch)
    return offers.sealed(dataclasses.replace(message, patch=np.frombuffer(patch, np.uint8)))


@pytest.mark.parametrize(
    ("reason", "offer"),
    [
        ("patch", damaged(3, b"not zstd")),
        ("patch", damaged(3, offers.patch(1, 3)[0].patch.tobytes()[:-3])),  # type: ignore[union-attr]
        ("patch", damaged(3, policy_patch.difference(b"short", b"patch").tobytes())),
        ("sha256", damaged(3, offers.patch(1, 4)[0].patch.tobytes())),  # type: ignore[union-attr]
        ("expired", offers.patch(1, 3, expires_s=1000.0)),
    ],
)
def test_a_corrupted_patch_is_refused_and_the_next_one_works(
    received: offers.Receiver, reason: str, offer: offers.Offer
) -> None:
    received.receive(*offers.whole(1))
    assert received.acts() == 1
    received.receive(*offer)
    assert received.acts() is None
    assert received.refused == {reason: 1}
    assert received.phase is receiver.Phase.REFUSED
    received.receive(*offers.patch(1, 5))
    assert received.acts() == 5


def test_after_a_reconnect_the_older_retained_ones_are_no_replays(received: offers.Receiver) -> None:
    received.receive(*offers.whole(10))
    received.receive(*offers.patch(10, 12))
    for version in (13, 14):
        received.receive(*offers.step(version - 1, version))
    assert received.acts() == 14
    received.receive(*offers.whole(10))  # what the broker retained
    received.receive(*offers.patch(10, 12))
    assert received.refused == {}
    assert received.acts() is None
    assert received.phase is receiver.Phase.ACTIVE
    received.receive(*offers.patch(10, 15))
    assert received.acts() == 15


def test_an_older_whole_one_that_is_new_here_becomes_a_base(received: offers.Receiver) -> None:
    received.receive(*offers.whole(10))
    received.receive(*offers.patch(10, 17))
    assert received.acts() == 17
    received.receive(*offers.whole(15))
    assert received.refused == {}
    assert received.acts() is None, "17 acts on"
    received.receive(*offers.patch(15, 18))
    assert received.acts() == 18


def test_an_expired_whole_one_never_acts_and_is_a_base_all_the_same(tmp_path: Path, received: offers.Receiver) -> None:
    received.receive(*offers.whole(1, expires_s=1000.0))
    assert received.acts() is None
    assert received.refused == {"expired": 1}
    received.receive(*offers.patch(1, 3, expires_s=4e9))
    assert received.acts() == 3
    assert received.phase is receiver.Phase.ACTIVE
    received.close()
    again = offers.Receiver(tmp_path)
    again.start(offers.VERIFIER, offers.NAMES)
    assert again.acts() == 3, "from its disk"
    again.close()


def test_a_patch_that_came_before_its_expired_base_acts(received: offers.Receiver) -> None:
    received.receive(*offers.patch(1, 3))
    received.receive(*offers.whole(1, expires_s=1000.0))
    assert received.acts() == 3
    assert received.refused == {"base": 1, "expired": 1}


def test_replays_of_genuine_old_messages_are_refused(received: offers.Receiver) -> None:
    old = [offers.whole(1), offers.patch(1, 2), offers.step(2, 3), offers.patch(1, 4)]
    for offer in old:
        received.receive(*offer)
    received.receive(*offers.whole(10))
    received.receive(*offers.patch(10, 11))
    assert received.acts() == 11
    for offer in old:
        received.receive(*offer)
    assert received.refused == {"older": 4}
    assert received.acts() is None
    received.receive(*offers.step(11, 12))
    assert received.acts() == 12


CUTS = (0, 700, 1500, len(offers.MODEL))


def in_pieces(base: int, version: int, attempt: int = 1) -> list[messages.PolicyPiece]:
    """A policy as three patches on another version, without what makes it one."""
    one, other = offers.variant(base), offers.variant(version)
    patches = [policy_patch.difference(one[a:b], other[a:b]) for a, b in pairwise(CUTS)]
    cuts = zip(pairwise(CUTS), patches, strict=True)
    return [messages.PolicyPiece(1, version, base, attempt, a, b, None, patch) for (a, b), patch in cuts]


def last(base: int, version: int, attempt: int = 1) -> offers.Offer:
    """The last piece, which has no bytes left to bring."""
    message, size = offers.step(base, version)[0], len(offers.MODEL)
    assert isinstance(message, messages.PolicyPiece)
    assert message.changes is not None
    changes = dataclasses.replace(message.changes, sha256=None)
    empty = np.zeros(0, np.uint8)
    return offers.sealed(
        dataclasses.replace(message, attempt=attempt, start=size, end=size, changes=changes, patch=empty)
    )


def test_pieces_make_a_policy_once_the_last_has_come(received: offers.Receiver) -> None:
    received.receive(*offers.whole(1))
    for version in (2, 3):
        for piece in in_pieces(version - 1, version):
            received.receive(piece, b"")
            assert received.held.best == (1, version - 1), "pieces without the last are nothing"
        received.receive(*last(version - 1, version))
        assert received.held.newest is not None
        assert received.held.newest.model == offers.variant(version)
    assert received.acts() == 3
    assert received.refused == {}


@pytest.fixture
def builds(received: offers.Receiver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions that were built, in order."""
    built: list[int] = []

    def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
        built.append(manifest.version)
        return offers.build(manifest, model)

    monkeypatch.setattr(received, "_build", build)
    return built


def test_what_came_in_pieces_is_built_ahead_and_acts_once_the_last_has_come(
    received: offers.Receiver, builds: list[int]
) -> None:
    received.receive(*offers.whole(1))
    assert received.acts() == 1
    for version in (2, 3):
        *others, final = in_pieces(version - 1, version)
        for piece in others:
            received.receive(piece, b"")
        assert not received.has_work
        received.event.clear()
        received.receive(final, b"")
        assert received.event.is_set()
        assert received.acts() is None, "nobody said yet that it is a policy"
        assert builds[-1] == version
        assert not received.has_work
        assert received.build_ms > 0.0, "what else comes has yet to be built"
        received.receive(*last(version - 1, version))
        assert received.build_ms == 0.0
        assert received.acts() == version
        assert received.pause_ms is not None
        assert received.pause_ms > 0.0
    assert builds == [1, 2, 3], "each of them once"
    assert received.refused == {}


def test_what_was_built_ahead_and_then_refused_by_the_gate_never_acts(
    received: offers.Receiver, builds: list[int]
) -> None:
    received.receive(*offers.whole(1))
    assert received.acts() == 1
    for piece in in_pieces(1, 9):
        received.receive(dataclasses.replace(piece, version=2), b"")
    assert received.acts() is None
    for piece in in_pieces(1, 2, attempt=2):
        received.receive(piece, b"")
    received.receive(*last(1, 2, attempt=2))
    assert received.acts() == 2
    assert received.held.newest is not None
    assert received.held.newest.model == offers.variant(2)
    assert builds == [1, 2, 2]


def test_what_cannot_be_built_ahead_is_refused_when_it_is_a_policy(
    received: offers.Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
        raise errors.PolicyError("the runtime cannot load the model", reason="model")

    received.receive(*offers.whole(1))
    assert received.acts() == 1
    monkeypatch.setattr(received, "_build", build)
    for piece in in_pieces(1, 2):
        received.receive(piece, b"")
    assert received.acts() is None
    assert received.refused == {}
    received.receive(*last(1, 2))
    assert received.acts() is None
    assert received.refused == {"model": 1}
    assert received.phase is receiver.Phase.REFUSED


def test_a_policy_that_the_gate_refused_is_begun_anew_under_its_version(received: offers.Receiver) -> None:
    received.receive(*offers.whole(1))
    for piece in in_pieces(1, 9)[:2]:
        received.receive(dataclasses.replace(piece, version=2), b"")
    for piece in in_pieces(1, 2, attempt=2):
        received.receive(piece, b"")
    received.receive(*last(1, 2, attempt=2))
    assert received.acts() == 2
    assert received.refused == {}


def test_pieces_of_what_the_gate_refused_mix_with_no_others(received: offers.Receiver) -> None:
    refused = [dataclasses.replace(piece, version=2) for piece in in_pieces(1, 9)]
    received.receive(*offers.whole(1))
    for piece in (refused[0], in_pieces(1, 2, attempt=2)[1], refused[2]):
        received.receive(piece, b"")
    received.receive(*last(1, 2, attempt=2))
    for piece in refused:
        received.receive(piece, b"")
    received.receive(*last(1, 2, attempt=2))
    assert received.acts() == 1
    assert received.refused == {"pieces": 4}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_misses_a_piece_is_no_policy_and_the_next_retained_one_mends_it(
    received: offers.Receiver, lost: int
) -> None:
    received.receive(*offers.whole(1))
    for piece in [piece for index, piece in enumerate(in_pieces(1, 2)) if index != lost]:
        received.receive(piece, b"")
    received.receive(*last(1, 2))
    assert received.acts() == 1
    assert received.refused == {"pieces": [3, 2, 1][lost]}
    assert received.phase is not receiver.Phase.REFUSED
    received.receive(*offers.patch(1, 4))
    assert received.acts() == 4


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("pieces", {"start": 701}),
        ("pieces", {"end": 700}),
        ("pieces", {"end": len(offers.MODEL) + 1}),
        ("pieces", {"end": 1 << 62}),
        ("pieces", {"version": 3}),
        ("pieces", {"base": 9}),
        ("pieces", {"attempt": 2}),
        ("older", {"epoch": 0}),
        ("older", {"version": 1}),
        ("patch", {"end": 1499}),
        ("patch", {"patch": np.frombuffer(b"not zstd", np.uint8)}),
        ("base", {"start": 0, "base": 9}),
    ],
)
def test_a_piece_that_does_not_follow_is_refused(
    received: offers.Receiver, reason: str, changes: dict[str, Any]
) -> None:
    received.receive(*offers.whole(1))
    first, second, third = in_pieces(1, 2)
    received.receive(first, b"")
    received.receive(dataclasses.replace(second, **changes), b"")
    assert received.refused == {reason: 1}
    for piece in (first, second, third):  # a first one begins anew
        received.receive(piece, b"")
    received.receive(*last(1, 2))
    assert received.acts() == 2


def test_a_policy_that_came_in_pieces_is_kept_once_it_is_retained(received: offers.Receiver) -> None:
    received.receive(*offers.whole(1))
    for piece in in_pieces(1, 2):
        received.receive(piece, b"")
    received.receive(*last(1, 2))
    assert received.held.newest is not None
    assert not received.held.newest.sources, "it cannot be made again from this"
    model = received.held.newest.model
    received.receive(*offers.patch(1, 2))
    assert received.acts() == 2
    assert received.held.newest.model is model, "there is one copy of it"
    assert received.held.newest.manifest.sha256 == hashlib.sha256(model).hexdigest()
    assert received.held.newest.sources
    assert received.refused == {}


def test_what_pieces_made_wrongly_is_made_again_when_its_digest_comes(received: offers.Receiver) -> None:
    received.receive(*offers.whole(1))
    for piece in in_pieces(1, 7):
        received.receive(dataclasses.replace(piece, version=2), b"")
    received.receive(*last(1, 2))
    assert received.acts() == 2
    for _ in range(2):
        received.receive(*offers.patch(1, 2))
    assert received.refused == {"sha256": 1}
    assert received.held.newest is not None
    assert received.held.newest.model == offers.variant(2)
    assert received.acts() == 2
    assert received.acts() is None


@pytest.mark.parametrize("offered", [offers.patch(1, 2), offers.step(1, 2)], ids=["patch", "piece"])
def test_what_comes_at_once_needs_its_digest(received: offers.Receiver, offered: offers.Offer) -> None:
    received.receive(*offers.whole(1))
    message = offered[0]
    assert isinstance(message, messages.PolicyPatch | messages.PolicyPiece)
    assert message.changes is not None
    changes = dataclasses.replace(message.changes, sha256=None)
    received.receive(*offers.sealed(dataclasses.replace(message, changes=changes)))
    assert received.refused == {"sha256": 1}
    assert received.acts() == 1
