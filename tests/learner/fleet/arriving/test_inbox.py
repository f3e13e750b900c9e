"""The inbox: in order, with its limits, and waited for."""

from __future__ import annotations

import threading

import pytest

from broker.program import bounded_queue
from learner.fleet.arriving import inbox


def test_in_order_and_full_at_a_limit_of_bytes_or_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "LIMIT", bounded_queue.Limit(3, 20))
    made = inbox.Inbox()
    made.put("a", bytes(10), True)
    assert made.has_room()
    made.put("b", bytes(10), False)
    assert not made.has_room()
    assert made.get(0.0) == ("a", bytes(10), True)
    assert made.has_room()
    for _ in range(2):
        made.put("c", b"", False)
    assert not made.has_room(), "three messages"
    assert [made.get(0.0) for _ in range(4)] == [("b", bytes(10), False), ("c", b"", False), ("c", b"", False), None]
    assert made.has_room()


def test_is_waited_for() -> None:
    made = inbox.Inbox()
    timer = threading.Timer(0.05, made.put, ("a", b"x", False))
    timer.start()
    assert made.get(10.0) == ("a", b"x", False)
    timer.join()


def test_a_wait_ends_when_woken_before_or_meanwhile() -> None:
    made = inbox.Inbox()
    made.wake()
    assert made.get(60.0) is None
    timer = threading.Timer(0.05, made.wake)
    timer.start()
    assert made.get(60.0) is None
    timer.join()


class Tap:
    """An inbox whose topics have buckets, its clock, and what it did with messages."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.inbox = inbox.Inbox(lambda topic: (topic, "experience"), clock=lambda: self.now_s)

    def offer(self, topic: str, count: int, size_bytes: int = 100) -> int:
        """Returns how many of so many messages were let in."""
        for _ in range(count):
            self.inbox.put(topic, bytes(size_bytes), False)
        taken = 0
        while self.inbox.get(0.0) is not None:
            taken += 1
        return taken


@pytest.mark.fault(16)
def test_who_floods_is_left_out_and_takes_nobody_s_place() -> None:
    tap = Tap()
    burst = int(inbox.RATES["experience"].burst)
    assert burst > 64 + 8_000_000 / inbox.BYTES_PER_TOKEN, "all that an honest actor has on its way fits"
    assert burst - 1 <= tap.offer("liar", 10 * burst) <= burst
    assert tap.offer("pi", 64) == 64
    assert sum(tap.inbox.pop_left_out().values()) >= 9 * burst and not tap.inbox.pop_left_out()
    tap.now_s += 1.0
    assert tap.offer("liar", 10 * burst) <= inbox.RATES["experience"].per_s + 1
    assert set(tap.inbox.pop_left_out()) == {("liar", "experience")}


@pytest.mark.fault(16)
def test_what_is_refused_costs_more_and_what_is_taken_comes_back() -> None:
    tap = Tap()
    refused = taken = 0
    for _ in range(10_000):  # in no time at all
        taken += tap.offer("pi", 1, 27_000)
        tap.inbox.note_outcome("pi", 27_000, 1024)
    assert taken == 10_000, "an honest actor is as fast as it can be"
    for _ in range(6000):
        tap.now_s += 0.01
        if tap.offer("liar", 1):
            refused += 1
            tap.inbox.note_outcome("liar", 100, None)
    per_s = inbox.RATES["experience"].per_s
    assert refused <= (inbox.RATES["experience"].burst + 60 * per_s) / inbox.REFUSED_TOKENS + 1
    small = 0
    for _ in range(60 * 300):  # accepted, of a step each: where grants are small
        tap.now_s += 1 / 300
        small += tap.offer("small", 1)
        tap.inbox.note_outcome("small", 100, 1)
    assert small == 60 * 300


@pytest.mark.fault(16)
def test_the_longest_message_passes_too() -> None:
    assert Tap().offer("pi", 2, 41_000_000) == 2
