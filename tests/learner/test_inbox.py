"""The inbox: in order, with its limits, and waited for."""

from __future__ import annotations

import threading

import pytest

from learner import inbox


def test_in_order_and_full_at_a_limit_of_bytes_or_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "LIMIT_BYTES", 20)
    monkeypatch.setattr(inbox, "LIMIT_MESSAGES", 3)
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
    assert made.size_bytes == 0 and made.has_room()


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
