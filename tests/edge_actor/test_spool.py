"""The spool: numbers, window, receipts, rewinding and what it drops."""

from __future__ import annotations

from typing import Any

import numpy as np

from broker import messages
from edge_actor import spool, trajectory


def segments(steps: int = 10) -> trajectory.Segments:
    ints, flags, floats = np.zeros(1, np.int32), np.zeros(1, np.uint8), np.zeros(1, np.float32)
    return trajectory.Segments(
        length=np.int32([steps]),
        env_index=ints,
        terminated=flags,
        truncated=flags,
        episode_return=floats,
        episode_length=ints,
        observation=np.zeros((steps + 1, 4), np.float32),
        action=np.zeros(steps, np.int32),
        reward=np.zeros(steps, np.float32),
        log_prob=np.zeros(0, np.float32),
        finished=np.zeros(0, np.float32),
    )


class Broker:
    """Takes what is published, as long as it wants to."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.accepts = 1000

    def publish(self, payload: bytes) -> bool:
        if self.accepts <= 0:
            return False
        self.accepts -= 1
        self.got.append(int(payload.split()[0]))
        return True


def seal(message: messages.Experience) -> bytes:
    return f"{message.seq} {message.oldest} {message.step}".encode().ljust(100)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(count: int, limit_bytes: int = 10**6, clock: Any = None) -> spool.Spool:
    made = spool.Spool(7, "f", seal, limit_bytes, clock or Clock())
    for _ in range(count):
        made.add(segments(), 1, 1, 1)
    return made


def test_messages_are_numbered_and_say_what_came_before() -> None:
    sealed: list[messages.Experience] = []

    def keep(message: messages.Experience) -> bytes:
        sealed.append(message)
        return b"x"

    made = spool.Spool(7, "f", keep, 10**6)
    for _ in range(3):
        made.add(segments(), assigned_epoch=4, epoch=3, version=9)
    assert [(m.boot, m.seq, m.oldest, m.step) for m in sealed] == [(7, 1, 1, 0), (7, 2, 1, 10), (7, 3, 1, 20)]
    assert (sealed[0].assigned_epoch, sealed[0].epoch, sealed[0].version) == (4, 3, 9)
    assert made.steps == 30


def test_each_is_sent_once_and_kept_until_its_receipt() -> None:
    made, broker = filled(3), Broker()
    made.pump(broker.publish)
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3]
    assert not made.unsent
    made.acknowledge(messages.Receipt("a", 7, 2))
    assert len(made) == 1


def test_a_refusal_is_tried_again_later() -> None:
    made, broker = filled(3), Broker()
    broker.accepts = 2
    made.pump(broker.publish)
    assert made.unsent
    broker.accepts = 9
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3]


def test_a_new_connection_sends_what_has_no_receipt() -> None:
    made, broker = filled(3), Broker()
    made.pump(broker.publish)
    made.acknowledge(messages.Receipt("a", 7, 1))
    made.rewind()
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3, 2, 3]


def test_a_new_ledger_inherits_no_receipts() -> None:
    made, broker = filled(3), Broker()
    made.pump(broker.publish)
    made.acknowledge(messages.Receipt("a", 7, 1))
    made.acknowledge(messages.Receipt("b", 7, 0))
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3, 2, 3]


def test_receipts_of_another_boot_trim_nothing() -> None:
    made = filled(3)
    made.acknowledge(messages.Receipt("a", 6, 99))
    assert len(made) == 3


def test_the_window_bounds_what_is_in_flight() -> None:
    made, broker = filled(spool.WINDOW + 10), Broker()
    made.pump(broker.publish)
    assert len(broker.got) == spool.WINDOW
    made.acknowledge(messages.Receipt("a", 7, 5))
    made.pump(broker.publish)
    assert broker.got == list(range(1, spool.WINDOW + 6))


def test_silence_sends_everything_again() -> None:
    clock, broker = Clock(), Broker()
    made = filled(2, clock=clock)
    made.pump(broker.publish)
    clock.now = spool.RESEND_S + 1.0
    made.pump(broker.publish)
    assert broker.got == [1, 2, 1, 2]


def test_the_oldest_are_dropped_and_counted() -> None:
    made, broker = filled(5, limit_bytes=300), Broker()
    assert len(made) == 3
    assert made.steps_dropped == 20
    made.pump(broker.publish)
    assert broker.got == [3, 4, 5]


def test_one_message_is_held_however_large() -> None:
    assert len(filled(2, limit_bytes=1)) == 1
