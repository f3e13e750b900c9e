"""Policies that come as differences: chains, bases, gaps, damage and replays, as the swap sees them."""

from __future__ import annotations

import dataclasses
import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import errors, messages, policy_patch
from edge_actor.policies import policy, swap
from tests.edge_actor.policies import offers

pytestmark = pytest.mark.usefixtures("synchronised")


def test_a_chain_of_deltas_from_the_policy_before(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(1))
    for version in range(2, 9):
        swapped.offer(*offers.delta(version - 1, version))
        if version % 3 == 0:
            assert swapped.acts() == version
    newest = swapped._held.newest
    assert newest is not None
    assert newest.model == offers.variant(8), "those that were never built are bases all the same"
    assert swapped.refused == {}


@pytest.mark.parametrize("delta_first", [False, True])
def test_a_late_joiner_needs_the_keyframe_and_one_delta_in_any_order(swapped: offers.Swap, delta_first: bool) -> None:
    arrivals = [offers.keyframe(10), offers.delta(10, 17)]
    for offer in reversed(arrivals) if delta_first else arrivals:
        swapped.offer(*offer)
    assert swapped.acts() == 17
    assert swapped.refused == ({"base": 1} if delta_first else {})


def test_lost_deltas_are_mended_by_the_next_one_from_the_keyframe(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(1))
    swapped.offer(*offers.delta(1, 2))
    assert swapped.acts() == 2
    swapped.offer(*offers.delta(3, 4))  # 3 is lost, and 4 cannot be made without it
    assert swapped.acts() is None
    assert swapped.refused == {"base": 1}
    assert swapped.phase is swap.Phase.ANNOUNCED
    assert swapped.announced == (1, 4)
    swapped.offer(*offers.delta(1, 6))
    assert swapped.acts() == 6
    swapped.offer(*offers.delta(6, 7))
    assert swapped.acts() == 7


def test_a_delta_for_an_unknown_keyframe_waits_for_it(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(1))
    assert swapped.acts() == 1
    swapped.offer(*offers.delta(20, 21))
    assert swapped.acts() is None
    swapped.offer(*offers.keyframe(20))
    assert swapped.acts() == 21
    assert swapped.refused == {"base": 1}
    swapped.offer(*offers.delta(20, 22, epoch=2))
    assert swapped.acts() is None, "the base belongs to the epoch"


def damaged(version: int, patch: bytes) -> offers.Offer:
    """A genuine, signed delta whose patch is not what it should be."""
    message = offers.delta(1, version)[0]
    assert isinstance(message, messages.PolicyDelta)
    return offers.sealed(dataclasses.replace(message, patch=np.frombuffer(patch, np.uint8)))


@pytest.mark.parametrize(
    ("reason", "offer"),
    [
        ("patch", damaged(3, b"not zstd")),
        ("patch", damaged(3, offers.delta(1, 3)[0].patch.tobytes()[:-3])),  # type: ignore[union-attr]
        ("patch", damaged(3, policy_patch.difference(b"short", b"patch").tobytes())),
        ("sha256", damaged(3, offers.delta(1, 4)[0].patch.tobytes())),  # type: ignore[union-attr]
        ("expired", offers.delta(1, 3, expires_s=1000.0)),
    ],
)
def test_a_corrupted_delta_is_refused_and_the_next_one_works(
    swapped: offers.Swap, reason: str, offer: offers.Offer
) -> None:
    swapped.offer(*offers.keyframe(1))
    assert swapped.acts() == 1
    swapped.offer(*offer)
    assert swapped.acts() is None
    assert swapped.refused == {reason: 1}
    assert swapped.phase is swap.Phase.REFUSED
    swapped.offer(*offers.delta(1, 5))
    assert swapped.acts() == 5


def test_after_a_reconnect_the_older_keyframe_and_delta_are_no_replays(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(10))
    swapped.offer(*offers.delta(10, 12))
    for version in (13, 14):
        swapped.offer(*offers.delta(version - 1, version))
    assert swapped.acts() == 14
    swapped.offer(*offers.keyframe(10))  # what the broker retained
    swapped.offer(*offers.delta(10, 12))
    assert swapped.refused == {}
    assert swapped.acts() is None
    assert swapped.phase is swap.Phase.ACTIVE
    swapped.offer(*offers.delta(10, 15))
    assert swapped.acts() == 15


def test_an_older_keyframe_that_is_new_here_becomes_a_base(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(10))
    swapped.offer(*offers.delta(10, 17))
    assert swapped.acts() == 17
    swapped.offer(*offers.keyframe(15))
    assert swapped.refused == {}
    assert swapped.acts() is None, "17 acts on"
    swapped.offer(*offers.delta(15, 18))
    assert swapped.acts() == 18


def test_an_expired_keyframe_never_acts_and_is_a_base_all_the_same(tmp_path: Path, swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(1, expires_s=1000.0))
    assert swapped.acts() is None
    assert swapped.refused == {"expired": 1}
    swapped.offer(*offers.delta(1, 3, expires_s=4e9))
    assert swapped.acts() == 3
    assert swapped.phase is swap.Phase.ACTIVE
    swapped.close()
    again = offers.Swap(tmp_path)
    again.start(offers.VERIFIER, offers.NAMES)
    assert again.acts() == 3, "from its disk"
    again.close()


def test_a_delta_that_came_before_its_expired_keyframe_acts(swapped: offers.Swap) -> None:
    swapped.offer(*offers.delta(1, 3))
    swapped.offer(*offers.keyframe(1, expires_s=1000.0))
    assert swapped.acts() == 3
    assert swapped.refused == {"base": 1, "expired": 1}


def test_replays_of_genuine_old_messages_are_refused(swapped: offers.Swap) -> None:
    old = [offers.keyframe(1), offers.delta(1, 2), offers.delta(2, 3), offers.delta(1, 4)]
    for offer in old:
        swapped.offer(*offer)
    swapped.offer(*offers.keyframe(10))
    swapped.offer(*offers.delta(10, 11))
    assert swapped.acts() == 11
    for offer in old:
        swapped.offer(*offer)
    assert swapped.refused == {"older": 4}
    assert swapped.acts() is None
    swapped.offer(*offers.delta(11, 12))
    assert swapped.acts() == 12


CUTS = (0, 700, 1500, len(offers.MODEL))


def in_parts(base: int, version: int, draft: int = 1) -> list[messages.PolicyPart]:
    """A policy as three differences from another version."""
    one, other = offers.variant(base), offers.variant(version)
    patches = [policy_patch.difference(one[a:b], other[a:b]) for a, b in pairwise(CUTS)]
    cuts = zip(pairwise(CUTS), patches, strict=True)
    return [messages.PolicyPart("main", 1, version, base, draft, a, b, patch) for (a, b), patch in cuts]


def ended(base: int, version: int, draft: int = 1) -> offers.Offer:
    """The delta behind the parts."""
    message = offers.delta(base, version)[0]
    assert isinstance(message, messages.PolicyDelta)
    return offers.sealed(dataclasses.replace(message, draft=draft, sha256="", patch=np.zeros(0, np.uint8)))


def test_parts_make_a_policy_once_their_delta_has_come(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(1))
    for version in (2, 3):
        for part in in_parts(version - 1, version):
            swapped.prepare(part, b"")
            assert swapped.held.best == (1, version - 1), "parts alone are nothing"
        swapped.offer(*ended(version - 1, version))
        assert swapped.held.newest is not None
        assert swapped.held.newest.model == offers.variant(version)
    assert swapped.acts() == 3
    assert swapped.refused == {}


@pytest.fixture
def builds(swapped: offers.Swap, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions that were built, in order."""
    built: list[int] = []

    def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
        built.append(manifest.version)
        return offers.build(manifest, model)

    monkeypatch.setattr(swapped, "_build", build)
    return built


def test_what_came_in_parts_is_built_ahead_and_acts_once_its_delta_has_come(
    swapped: offers.Swap, builds: list[int]
) -> None:
    swapped.offer(*offers.keyframe(1))
    assert swapped.acts() == 1
    for version in (2, 3):
        *others, last = in_parts(version - 1, version)
        for part in others:
            swapped.prepare(part, b"")
        assert not swapped.has_work
        swapped.event.clear()
        swapped.prepare(last, b"")
        assert swapped.event.is_set()
        assert swapped.acts() is None, "nobody said yet that it is a policy"
        assert builds[-1] == version
        assert not swapped.has_work
        assert swapped.build_ms > 0.0, "what else comes has yet to be built"
        swapped.offer(*ended(version - 1, version))
        assert swapped.build_ms == 0.0
        assert swapped.acts() == version
        assert swapped.pause_ms is not None
        assert swapped.pause_ms > 0.0
    assert builds == [1, 2, 3], "each of them once"
    assert swapped.refused == {}


def test_what_was_built_ahead_and_then_refused_by_the_gate_never_acts(swapped: offers.Swap, builds: list[int]) -> None:
    swapped.offer(*offers.keyframe(1))
    assert swapped.acts() == 1
    for part in in_parts(1, 9):
        swapped.prepare(dataclasses.replace(part, version=2), b"")
    assert swapped.acts() is None
    for part in in_parts(1, 2, draft=2):
        swapped.prepare(part, b"")
    swapped.offer(*ended(1, 2, draft=2))
    assert swapped.acts() == 2
    assert swapped.held.newest is not None
    assert swapped.held.newest.model == offers.variant(2)
    assert builds == [1, 2, 2]


def test_what_cannot_be_built_ahead_is_refused_when_it_is_a_policy(
    swapped: offers.Swap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
        raise errors.PolicyError("the runtime cannot load the model", reason="model")

    swapped.offer(*offers.keyframe(1))
    assert swapped.acts() == 1
    monkeypatch.setattr(swapped, "_build", build)
    for part in in_parts(1, 2):
        swapped.prepare(part, b"")
    assert swapped.acts() is None
    assert swapped.refused == {}
    swapped.offer(*ended(1, 2))
    assert swapped.acts() is None
    assert swapped.refused == {"model": 1}
    assert swapped.phase is swap.Phase.REFUSED


def test_a_policy_that_the_gate_refused_is_begun_anew_under_its_version(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(1))
    for part in in_parts(1, 9)[:2]:
        swapped.prepare(dataclasses.replace(part, version=2), b"")
    for part in in_parts(1, 2, draft=2):
        swapped.prepare(part, b"")
    swapped.offer(*ended(1, 2, draft=2))
    assert swapped.acts() == 2
    assert swapped.refused == {}


def test_parts_of_what_the_gate_refused_mix_with_no_others(swapped: offers.Swap) -> None:
    refused = [dataclasses.replace(part, version=2) for part in in_parts(1, 9)]
    swapped.offer(*offers.keyframe(1))
    for part in (refused[0], in_parts(1, 2, draft=2)[1], refused[2]):
        swapped.prepare(part, b"")
    swapped.offer(*ended(1, 2, draft=2))
    for part in refused:
        swapped.prepare(part, b"")
    swapped.offer(*ended(1, 2, draft=2))
    assert swapped.acts() == 1
    assert swapped.refused == {"parts": 4}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_misses_a_part_is_no_policy_and_the_next_retained_one_mends_it(swapped: offers.Swap, lost: int) -> None:
    swapped.offer(*offers.keyframe(1))
    for part in [part for index, part in enumerate(in_parts(1, 2)) if index != lost]:
        swapped.prepare(part, b"")
    swapped.offer(*ended(1, 2))
    assert swapped.acts() == 1
    assert swapped.refused == {"parts": [3, 2, 1][lost]}
    assert swapped.phase is not swap.Phase.REFUSED
    swapped.offer(*offers.delta(1, 4))
    assert swapped.acts() == 4


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("parts", {"start": 701}),
        ("parts", {"end": 700}),
        ("parts", {"end": len(offers.MODEL) + 1}),
        ("parts", {"end": 1 << 62}),
        ("parts", {"version": 3}),
        ("parts", {"base": 9}),
        ("parts", {"draft": 2}),
        ("older", {"epoch": 0}),
        ("older", {"version": 1}),
        ("patch", {"end": 1499}),
        ("patch", {"patch": np.frombuffer(b"not zstd", np.uint8)}),
        ("base", {"start": 0, "base": 9}),
    ],
)
def test_a_part_that_does_not_follow_is_refused(swapped: offers.Swap, reason: str, changes: dict[str, Any]) -> None:
    swapped.offer(*offers.keyframe(1))
    first, second, third = in_parts(1, 2)
    swapped.prepare(first, b"")
    swapped.prepare(dataclasses.replace(second, **changes), b"")
    assert swapped.refused == {reason: 1}
    for part in (first, second, third):  # a first one begins anew
        swapped.prepare(part, b"")
    swapped.offer(*ended(1, 2))
    assert swapped.acts() == 2


def test_a_policy_that_came_in_parts_is_kept_once_it_is_retained(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(1))
    for part in in_parts(1, 2):
        swapped.prepare(part, b"")
    swapped.offer(*ended(1, 2))
    assert swapped.held.newest is not None
    assert not swapped.held.newest.sources, "it cannot be made again from this"
    model = swapped.held.newest.model
    swapped.offer(*offers.delta(1, 2))
    assert swapped.acts() == 2
    assert swapped.held.newest.model is model, "there is one copy of it"
    assert swapped.held.newest.manifest.sha256 == hashlib.sha256(model).hexdigest()
    assert swapped.held.newest.sources
    assert swapped.refused == {}


def test_what_parts_made_wrongly_is_made_again_when_its_digest_comes(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(1))
    for part in in_parts(1, 7):
        swapped.prepare(dataclasses.replace(part, version=2), b"")
    swapped.offer(*ended(1, 2))
    assert swapped.acts() == 2
    for _ in range(2):
        swapped.offer(*offers.delta(1, 2))
    assert swapped.refused == {"sha256": 1}
    assert swapped.held.newest is not None
    assert swapped.held.newest.model == offers.variant(2)
    assert swapped.acts() == 2
    assert swapped.acts() is None


def test_a_whole_delta_needs_its_digest(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(1))
    message = offers.delta(1, 2)[0]
    assert isinstance(message, messages.PolicyDelta)
    swapped.offer(*offers.sealed(dataclasses.replace(message, sha256="")))
    assert swapped.refused == {"sha256": 1}
    assert swapped.acts() == 1
