"""Messages wait for an acting loop that is busy."""

from __future__ import annotations

import pytest

from broker.contract import messages, signing
from broker.fleet import identity
from broker.program import bounded_queue
from edge_actor.fleet import inbox


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> inbox.Inbox:
    monkeypatch.setattr(inbox, "LIMIT", bounded_queue.Limit(4, 1000))
    return inbox.Inbox(signing.LearnerVerifier(identity.Fleet.open("f").sealer.public_key), 5)


def command(number: int) -> messages.Command:
    return messages.Command(f"c{number}", "bench", 5)


def test_of_messages_that_replace_each_other_the_newest_waits(waiting: inbox.Inbox) -> None:
    receipts = [messages.Receipt("a", 5, seq) for seq in range(10)]
    for receipt in receipts:
        waiting.put(receipt, bytes(300))
    other = messages.Receipt("a", 6, 1)
    waiting.put(other, bytes(300))
    assert waiting.wake.is_set()
    assert [waiting.get(), waiting.get(), waiting.get()] == [receipts[-1], other, None]
    assert waiting.refused == {}


def test_beyond_the_limit_the_oldest_goes_and_is_counted(waiting: inbox.Inbox) -> None:
    commands = [command(number) for number in range(7)]
    for each in commands:
        waiting.put(each, bytes(10))
    assert waiting.refused == {"flood": 3}
    waiting.put(command(8), bytes(980))
    assert waiting.refused == {"flood": 5}, "of 1020 bytes, 1000 may wait"
    assert waiting.get() is commands[5]


def test_one_message_may_be_larger_than_all_that_may_wait(waiting: inbox.Inbox) -> None:
    large = command(1)
    waiting.put(command(0), bytes(10))
    waiting.put(large, bytes(2000))
    assert waiting.get() is large
    assert waiting.refused == {"flood": 1}
