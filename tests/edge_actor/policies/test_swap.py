"""Policy swaps: what is refused and why, what acts, and in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract import messages
from edge_actor.board import clock
from edge_actor.policies import interpreter, policy, swap
from tests import conftest
from tests.edge_actor.policies import offers

pytestmark = pytest.mark.usefixtures("synchronised")


def test_a_policy_goes_through_all_phases_and_acts(swapped: offers.Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [swapped.phase]
    swapped.announce(1, 1)
    seen.append(swapped.phase)
    swapped.offer(*offers.keyframe())
    seen.append(swapped.phase)
    assert swapped.has_work

    def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
        seen.append(swapped.phase)
        return offers.build(manifest, model)

    monkeypatch.setattr(swapped, "_build", build)
    taken = swapped.build()
    assert taken is not None
    seen.append(swapped.phase)
    assert seen == [swap.Phase.NONE, swap.Phase.ANNOUNCED, swap.Phase.VERIFIED, swap.Phase.BUILDING, swap.Phase.ACTIVE]
    kernels = "XNNPACK" if interpreter.find().name == "ai-edge-litert" else "built-in"
    assert (taken.epoch, taken.version, taken.delegate) == (1, 1, kernels)
    assert not swapped.has_work


def test_what_is_large_is_opened_on_a_thread_of_its_own(swapped: offers.Swap) -> None:
    threads: list[str] = []

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        threads.append(threading.current_thread().name)
        if payload.startswith(b"bug"):
            raise ZeroDivisionError
        swapped.offer(*offers.keyframe())

    put = swapped.queued(handle)
    put("topic", b"bug".ljust(swap.AT_ONCE_BYTES + 1), False)
    put("topic", b"good".ljust(swap.AT_ONCE_BYTES + 1), False)
    assert swapped.event.wait(5.0), "a bug in one message does not end the thread"
    assert threads == ["policy-checker"] * 2
    assert swapped.refused == {"fault": 1}
    assert swapped.acts() == 1


def test_what_is_small_is_opened_at_once_but_never_before_what_came_earlier(swapped: offers.Swap) -> None:
    order: list[bytes] = []
    may_go_on = threading.Event()

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        if len(payload) > 1:
            assert may_go_on.wait(5.0)
        order.append(payload[:1])

    put = swapped.queued(handle)
    put("topic", b"a", False)
    assert order == [b"a"]
    put("topic", b"b".ljust(swap.AT_ONCE_BYTES + 1), False)
    put("topic", b"c", False)
    assert order == [b"a"]
    may_go_on.set()
    conftest.wait_until(lambda: order == [b"a", b"b", b"c"], "in order")


def test_newer_ones_replace_it_also_of_a_new_epoch(swapped: offers.Swap) -> None:
    for order in ((1, 5), (1, 6), (2, 1)):
        swapped.offer(*offers.keyframe(epoch=order[0], version=order[1]))
        taken = swapped.build()
        assert taken is not None
        assert (taken.epoch, taken.version) == order
    assert swapped.refused == {}


def test_what_was_overtaken_is_never_built_and_waiting_is_bounded(tmp_path: Path) -> None:
    made = offers.Swap(tmp_path, patience_s=0.5)
    made.offer(*offers.keyframe(1))
    assert not made.overdue
    for version in range(2, 6):
        made.offer(*offers.delta(1, version))
    conftest.wait_until(lambda: made.overdue, "it has waited, though newer ones came")
    assert made.acts() == 5
    assert made.build() is None
    assert not made.overdue


def test_the_same_again_is_no_refusal(swapped: offers.Swap) -> None:
    for _ in range(2):
        swapped.offer(*offers.keyframe(1))
        swapped.offer(*offers.delta(1, 2))
        swapped.acts()
    assert swapped.refused == {}
    assert swapped.phase is swap.Phase.ACTIVE


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("older", {"version": 4}),
        ("older", {"epoch": 1, "version": 99}),
        ("sha256", {"version": 6, "sha256": "0" * 64}),
        ("length", {"version": 6, "length": 17}),
        ("size", {"version": 6, "length": messages.MAX_POLICY_BYTES + 1}),
        ("fingerprint", {"version": 6, "fingerprint": "0123456789abcdef"}),
        ("head", {"version": 6, "head": "gaussian"}),
        ("expired", {"version": 6, "expires_s": 1000.0}),
        ("model", {"version": 6, "model": b"junk" * 100}),
        ("model", {"version": 6, "model": offers.MODEL[:1000]}),
    ],
)
def test_refusals_are_counted_and_the_acting_policy_stays(
    swapped: offers.Swap, reason: str, changes: dict[str, Any]
) -> None:
    swapped.offer(*offers.keyframe(epoch=2, version=5))
    assert swapped.acts() == 5
    swapped.offer(*offers.keyframe(**({"epoch": 2} | changes)))
    assert swapped.acts() is None
    assert swapped.refused == {reason: 1}
    assert swapped.phase is swap.Phase.REFUSED
    swapped.offer(*offers.keyframe(epoch=2, version=7))  # and the next good one is taken
    assert swapped.acts() == 7


def test_other_channels_are_not_ours(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(channel="canary"))
    assert swapped.phase is swap.Phase.NONE


def test_a_policy_that_never_expires_or_not_yet_is_good(swapped: offers.Swap) -> None:
    swapped.offer(*offers.keyframe(expires_s=4e9))
    assert swapped.acts() == 1


def test_nothing_expires_where_nobody_knows_the_time(
    tmp_path: Path, swapped: offers.Swap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Pi that boots without a network believes in some year, and must act on all the same."""
    monkeypatch.setattr(clock, "now_s", lambda: None)
    swapped.offer(*offers.keyframe(expires_s=1000.0))
    assert swapped.acts() == 1
    swapped.close()
    again = offers.Swap(tmp_path)
    again.start(offers.VERIFIER, offers.NAMES)
    assert again.acts() == 1
    again.close()
    monkeypatch.setattr(clock, "now_s", time.time)
    third = offers.Swap(tmp_path)
    third.start(offers.VERIFIER, offers.NAMES)
    assert third.acts() is None
    assert third.refused == {"expired": 1}
    third.close()


def test_what_nobody_has_time_to_open_is_bounded(swapped: offers.Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless data: a broker sends junk of 40 MB faster than a Pi computes digests."""
    monkeypatch.setattr(swap, "QUEUE_LIMIT_BYTES", 3_000_000)
    may_go_on, opened = threading.Event(), list[bytes]()

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        assert may_go_on.wait(5.0)
        opened.append(payload[:2])

    put = swapped.queued(handle)
    for index in range(20):
        put("topic", f"{index:02}".encode() + bytes(1_000_000), False)
        assert swapped._queued_bytes <= 3_000_000
    may_go_on.set()
    conftest.wait_until(lambda: opened[-1:] == [b"19"], "the newest one is opened")
    assert swapped.refused == {"flood": 20 - len(opened)}
    assert len(opened) <= 4
    assert swapped._queued_bytes == 0


@pytest.mark.fault(11)
def test_only_news_keeps_a_policy_from_being_too_old(swapped: offers.Swap) -> None:
    """What `--max-policy-age-s` looks at; replays of the learner's states end before (test_authority.py)."""

    def is_heard(act: Callable[[], object]) -> bool:
        swapped.heard_at = -1.0
        act()
        return swapped.heard_at > 0

    first, second = offers.keyframe(1), offers.delta(1, 2)
    assert is_heard(lambda: swapped.offer(*first))
    assert not is_heard(lambda: swapped.offer(*first)), "the same one, before it acts"
    assert swapped.acts() == 1
    assert not is_heard(lambda: swapped.offer(*first)), "the retained one, which a broker repeats"
    assert is_heard(lambda: swapped.announce(1, 1)), "the learner lives, and has none newer"
    assert not is_heard(lambda: swapped.announce(1, 2)), "it has a newer one, which someone holds back"
    assert not is_heard(lambda: swapped.announce(2, 1)), "another session's"
    assert is_heard(lambda: swapped.offer(*second))
    assert swapped.acts() == 2
    assert not is_heard(lambda: swapped.offer(*second))
    assert not is_heard(lambda: swapped.announce(1, 1)), "said before the one that acts was made"
    assert is_heard(lambda: swapped.announce(1, 2))
