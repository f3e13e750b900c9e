"""Received policies: what is refused and why, what acts, and in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract import messages
from broker.program import bounded_queue
from edge_actor.board import clock
from edge_actor.policies import arrivals, interpreter, policy, receiver
from tests import conftest
from tests.edge_actor.policies import offers

pytestmark = pytest.mark.usefixtures("synchronised")


def test_a_policy_goes_through_all_phases_and_acts(received: offers.Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [received.phase]
    received.announce(messages.Order(1, 1))
    seen.append(received.phase)
    received.receive(*offers.whole())
    seen.append(received.phase)
    assert received.has_work

    def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
        seen.append(received.phase)
        return offers.build(manifest, model)

    monkeypatch.setattr(received, "_build", build)
    taken = received.newest()
    assert taken is not None
    seen.append(received.phase)
    assert seen == [
        receiver.Phase.NONE,
        receiver.Phase.ANNOUNCED,
        receiver.Phase.VERIFIED,
        receiver.Phase.BUILDING,
        receiver.Phase.ACTIVE,
    ]
    kernels = "XNNPACK" if interpreter.find().name == "ai-edge-litert" else "built-in"
    assert (taken.order, taken.delegate) == ((1, 1), kernels)
    assert not received.has_work


def test_what_is_large_is_opened_on_a_thread_of_its_own(received: offers.Receiver) -> None:
    threads: list[str] = []

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        threads.append(threading.current_thread().name)
        if payload.startswith(b"bug"):
            raise ZeroDivisionError
        received.receive(*offers.whole())

    put = received._arrivals.queued(handle)
    put("topic", b"bug".ljust(arrivals.AT_ONCE_BYTES + 1), False)
    put("topic", b"good".ljust(arrivals.AT_ONCE_BYTES + 1), False)
    assert received.event.wait(5.0), "a bug in one message does not end the thread"
    assert threads == ["policy-checker"] * 2
    assert received.refused == {"fault": 1}
    assert received.acts() == 1


def test_what_is_small_is_opened_at_once_but_never_before_what_came_earlier(received: offers.Receiver) -> None:
    order: list[bytes] = []
    may_go_on = threading.Event()

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        if len(payload) > 1:
            assert may_go_on.wait(5.0)
        order.append(payload[:1])

    put = received._arrivals.queued(handle)
    put("topic", b"a", False)
    assert order == [b"a"]
    put("topic", b"b".ljust(arrivals.AT_ONCE_BYTES + 1), False)
    put("topic", b"c", False)
    assert order == [b"a"]
    may_go_on.set()
    conftest.wait_until(lambda: order == [b"a", b"b", b"c"], "in order")


def test_newer_ones_replace_it_also_of_a_new_epoch(received: offers.Receiver) -> None:
    for order in ((1, 5), (1, 6), (2, 1)):
        received.receive(*offers.whole(epoch=order[0], version=order[1]))
        taken = received.newest()
        assert taken is not None
        assert taken.order == order
    assert received.refused == {}


def test_what_was_overtaken_is_never_built_and_waiting_is_bounded(tmp_path: Path) -> None:
    made = offers.Receiver(tmp_path, patience_s=0.5)
    made.receive(*offers.whole(1))
    assert not made.overdue
    for version in range(2, 6):
        made.receive(*offers.patch(1, version))
    conftest.wait_until(lambda: made.overdue, "it has waited, though newer ones came")
    assert made.acts() == 5
    assert made.newest() is None
    assert not made.overdue


def test_the_same_again_is_no_refusal(received: offers.Receiver) -> None:
    for _ in range(2):
        received.receive(*offers.whole(1))
        received.receive(*offers.patch(1, 2))
        received.acts()
    assert received.refused == {}
    assert received.phase is receiver.Phase.ACTIVE


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
        ("head", {"version": 6, "head": "of_a_later_release"}),
        ("expired", {"version": 6, "expires_s": 1000.0}),
        ("model", {"version": 6, "model": b"junk" * 100}),
        ("model", {"version": 6, "model": offers.MODEL[:1000]}),
    ],
)
def test_refusals_are_counted_and_the_acting_policy_stays(
    received: offers.Receiver, reason: str, changes: dict[str, Any]
) -> None:
    received.receive(*offers.whole(epoch=2, version=5))
    assert received.acts() == 5
    received.receive(*offers.whole(**({"epoch": 2} | changes)))
    assert received.acts() is None
    assert received.refused == {reason: 1}
    assert received.phase is receiver.Phase.REFUSED
    received.receive(*offers.whole(epoch=2, version=7))  # and the next good one is taken
    assert received.acts() == 7


def test_other_channels_are_not_ours(received: offers.Receiver) -> None:
    received.receive(*offers.whole(channel="canary"))
    assert received.phase is receiver.Phase.NONE


def test_what_comes_of_a_channel_that_was_followed_before_is_passed_over(received: offers.Receiver) -> None:
    handlers: dict[str, arrivals.Handler] = {}
    opened = {offer[1]: offer for offer in (offers.whole(1), offers.step(1, 2), offers.patch(1, 2), offers.step(2, 3))}

    def opener(kind: Any, use: Callable[[Any, bytes], None]) -> arrivals.Handler:
        return lambda topic, payload, retained: use(*opened[payload])

    received.listen(handlers.__setitem__, offers.NAMES, opener)
    (whole, step, patch, late), names = opened, offers.NAMES
    handlers[names.policy("main")](names.policy("main"), whole, True)
    handlers[names.policy_piece("main")](names.policy_piece("main"), step, False)
    assert received.acts() == 2
    received.channel = "canary"
    received.listen(handlers.__setitem__, offers.NAMES, opener)
    assert len(handlers) == 6
    handlers[names.policy_patch("main")](names.policy_patch("main"), patch, True)
    handlers[names.policy_piece("main")](names.policy_piece("main"), late, False)
    assert received.acts() is None
    assert received.held.best == (1, 2)
    assert received.refused == {}


def test_a_policy_that_never_expires_or_not_yet_is_good(received: offers.Receiver) -> None:
    received.receive(*offers.whole(expires_s=4e9))
    assert received.acts() == 1


def test_nothing_expires_where_nobody_knows_the_time(
    tmp_path: Path, received: offers.Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Pi that boots without a network believes in some year, and must act on all the same."""
    monkeypatch.setattr(clock, "now_s", lambda: None)
    received.receive(*offers.whole(expires_s=1000.0))
    assert received.acts() == 1
    received.close()
    again = offers.Receiver(tmp_path)
    again.start(offers.VERIFIER, offers.NAMES)
    assert again.acts() == 1
    again.close()
    monkeypatch.setattr(clock, "now_s", time.time)
    third = offers.Receiver(tmp_path)
    third.start(offers.VERIFIER, offers.NAMES)
    assert third.acts() is None
    assert third.refused == {"expired": 1}
    third.close()


def test_what_nobody_has_time_to_open_is_bounded(received: offers.Receiver) -> None:
    """Endless data: a broker sends junk of 40 MB faster than a Pi computes digests."""
    received._arrivals.waiting = bounded_queue.BoundedQueue(bounded_queue.Limit(arrivals.LIMIT.items, 3_000_000))
    may_go_on, opened = threading.Event(), list[bytes]()

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        assert may_go_on.wait(5.0)
        opened.append(payload[:2])

    put = received._arrivals.queued(handle)
    for index in range(20):
        put("topic", f"{index:02}".encode() + bytes(1_000_000), False)
        assert received._arrivals.waiting.size_bytes <= 3_000_000
    may_go_on.set()
    conftest.wait_until(lambda: opened[-1:] == [b"19"], "the newest one is opened")
    assert received.refused == {"flood": 20 - len(opened)}
    assert len(opened) <= 4
    assert received._arrivals.waiting.size_bytes == 0


@pytest.mark.fault(11)
def test_only_news_keeps_a_policy_from_being_too_old(received: offers.Receiver) -> None:
    """This is what `--max-policy-age-s` looks at; replays of the learner's states end before (test_replay_guard.py)."""

    def is_heard(act: Callable[[], object]) -> bool:
        received.heard_at = -1.0
        act()
        return received.heard_at > 0

    first, second = offers.whole(1), offers.patch(1, 2)
    assert is_heard(lambda: received.receive(*first))
    assert not is_heard(lambda: received.receive(*first)), "the same one, before it acts"
    assert received.acts() == 1
    assert not is_heard(lambda: received.receive(*first)), "the retained one, which a broker repeats"
    assert is_heard(lambda: received.announce(messages.Order(1, 1))), "the learner lives, and has none newer"
    assert not is_heard(lambda: received.announce(messages.Order(1, 2))), "it has a newer one, which someone holds back"
    assert not is_heard(lambda: received.announce(messages.Order(2, 1))), "another session's"
    assert is_heard(lambda: received.receive(*second))
    assert received.acts() == 2
    assert not is_heard(lambda: received.receive(*second))
    assert not is_heard(lambda: received.announce(messages.Order(1, 1))), "said before the one that acts was made"
    assert is_heard(lambda: received.announce(messages.Order(1, 2)))


def test_what_is_on_trial_is_not_stored_and_cannot_come_back_when_it_has_lost(tmp_path: Path) -> None:
    made = offers.Receiver(tmp_path)
    made.start(offers.VERIFIER, offers.NAMES)
    made.receive(*offers.whole(1))
    assert made.acts() == 1
    made.channel = "canary"
    made.receive(*offers.whole(2, channel="canary"))
    assert made.acts() == 2
    made.close()
    again = offers.Receiver(tmp_path)
    again.start(offers.VERIFIER, offers.NAMES)
    assert again.acts() == 1, "what was proven, until the learner says that it is a canary"
    again.channel = "canary"
    again.receive(*offers.whole(2, channel="canary"))
    assert again.acts() == 2
    again.channel = "main"
    again.receive(*offers.whole(3, offers.variant(1)))
    assert again.acts() == 3, "the incumbent, again"
    again.channel = "canary"
    again.receive(*offers.whole(2, channel="canary"))
    assert again.acts() is None
    assert again.refused == {"older": 1}
    again.close()


def test_a_policy_on_trial_is_the_newest_until_main_has_a_newer_one(received: offers.Receiver) -> None:
    received.receive(*offers.whole(epoch=2, version=4))
    assert received.acts() == 4

    def is_fresh(epoch: int, version: int) -> bool:
        received.heard_at = 0.0
        received.announce(messages.Order(epoch, version))
        return received.heard_at > 0.0

    assert is_fresh(2, 4)
    assert not is_fresh(2, 3), "of main itself the learner never goes back"
    received.channel = "canary"
    received.receive(*offers.whole(epoch=2, version=5, channel="canary"))
    assert received.acts() == 5
    assert is_fresh(2, 4), "what main had when the trial began"
    assert not is_fresh(1, 9), "a session before says nothing of this one"
    assert not is_fresh(2, 6), "the trial has ended, and word of it was held back"
