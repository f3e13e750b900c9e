"""The spool: numbers, window, receipts, rewinding, what earlier boots left, what it drops, and files that fail."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, messages
from edge_actor.experience import journal, spool, trajectory, window

BODY = 1000
"""About the bytes of one message of `taken`."""


def taken(steps: int = 10) -> trajectory.Segments:
    ints, flags, floats = np.zeros(1, np.int32), np.zeros(1, np.uint8), np.zeros(1, np.float32)
    return trajectory.Segments(
        length=np.array([steps], np.int32),
        env_index=ints,
        row=ints,
        terminated=flags,
        truncated=flags,
        episode_return=floats,
        episode_length=ints,
        observation=np.zeros((steps + 1, 4), np.float32),
        action=np.zeros(steps, np.int32),
        reward=np.zeros(steps, np.float32),
        log_prob=np.zeros(0, np.float32),
        draw=0,
        finished=np.zeros(0, np.float32),
    )


class Broker:
    """Takes what is published, as long as it wants to."""

    def __init__(self) -> None:
        self.messages: list[messages.Experience] = []
        self.accepts = 1000

    def publish(self, payload: bytes) -> bool:
        if self.accepts <= 0:
            return False
        self.accepts -= 1
        self.messages.append(codec.decode(messages.Experience, payload.removeprefix(b"sealed")))
        return True

    @property
    def got(self) -> list[int]:
        return [message.seq for message in self.messages]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def boot(tmp_path: Path) -> Callable[..., spool.Spool]:
    """Makes the spool of one boot, with so many messages added to what is there."""

    def make(count: int, number: int = 7, limit_bytes: int = 10**6, clock: Any = None) -> spool.Spool:
        files = journal.Journal.open(tmp_path / "spool", limit_bytes)
        made = spool.Spool.open(number, "f", lambda body: b"sealed" + body, files, clock or Clock())
        for _ in range(count):
            made.add(taken(), assigned_epoch=4, epoch=3, version=9)
        return made

    return make


Boot = Callable[..., spool.Spool]


def test_messages_are_numbered_and_say_what_came_before(boot: Boot) -> None:
    made, broker = boot(3), Broker()
    made.pump(broker.publish)
    assert [(m.boot, m.seq, m.oldest, m.step) for m in broker.messages] == [(7, 1, 1, 0), (7, 2, 1, 10), (7, 3, 1, 20)]
    first = broker.messages[0]
    assert (first.assigned_epoch, first.epoch, first.version) == (4, 3, 9)
    assert made.steps == 30


def test_each_is_sent_once_and_kept_until_its_receipt(boot: Boot) -> None:
    made, broker = boot(3), Broker()
    made.pump(broker.publish)
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3]
    assert not made.unsent
    made.acknowledge(messages.Receipt("a", 7, 2))
    assert len(made) == 1


def test_a_refusal_is_tried_again_later(boot: Boot) -> None:
    made, broker = boot(3), Broker()
    broker.accepts = 2
    made.pump(broker.publish)
    assert made.unsent
    broker.accepts = 9
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3]


def test_a_new_connection_sends_what_has_no_receipt(boot: Boot) -> None:
    made, broker = boot(3), Broker()
    made.pump(broker.publish)
    made.acknowledge(messages.Receipt("a", 7, 1))
    made.rewind()
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3, 2, 3]


def test_a_new_ledger_inherits_no_receipts_and_is_told_where_to_begin(boot: Boot) -> None:
    made, broker = boot(3), Broker()
    made.pump(broker.publish)
    made.acknowledge(messages.Receipt("a", 7, 1))
    made.acknowledge(messages.Receipt("b", 7, 0))
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3, 2, 3]
    assert [m.oldest for m in broker.messages[3:]] == [2, 1], "it would wait for message 1 for ever"


def test_receipts_of_another_boot_trim_nothing(boot: Boot) -> None:
    made = boot(3)
    made.acknowledge(messages.Receipt("a", 6, 99))
    assert len(made) == 3


def test_the_window_bounds_what_is_in_flight(boot: Boot) -> None:
    made, broker = boot(window.LIMIT + 10), Broker()
    made.pump(broker.publish)
    assert len(broker.got) == window.LIMIT
    made.acknowledge(messages.Receipt("a", 7, 5))
    made.pump(broker.publish)
    assert broker.got == list(range(1, window.LIMIT + 6))


def test_the_window_bounds_the_bytes_in_flight_but_for_one_message(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    made, broker = boot(9), Broker()
    monkeypatch.setattr(window, "LIMIT_BYTES", 3 * BODY)
    made.pump(broker.publish)
    assert len(broker.got) in (3, 4)
    monkeypatch.setattr(window, "LIMIT_BYTES", 1)
    made.acknowledge(messages.Receipt("a", 7, len(broker.got)))
    before = len(broker.got)
    made.pump(broker.publish)
    assert len(broker.got) == before + 1


def test_what_is_dropped_is_on_its_way_all_the_same(boot: Boot) -> None:
    """Else a spool that drops its oldest would send on and on to a learner that stands still."""
    made, broker = boot(0, limit_bytes=20 * BODY), Broker()
    for _ in range(2 * window.LIMIT):
        made.add(taken(), assigned_epoch=4, epoch=3, version=9)
        made.pump(broker.publish)
    assert made.steps_dropped > 0
    assert broker.got == list(range(1, window.LIMIT + 1))
    made.acknowledge(messages.Receipt("a", 7, window.LIMIT))
    made.pump(broker.publish)
    assert broker.messages[window.LIMIT].seq == broker.messages[window.LIMIT].oldest > window.LIMIT


def test_to_a_silent_learner_nothing_is_sent_again_and_to_one_that_lives_one_by_one(boot: Boot) -> None:
    clock, broker = Clock(), Broker()
    made = boot(8, clock=clock)
    made.follow_learner("one")
    made.pump(broker.publish)
    assert broker.got == list(range(1, 9))
    broker.messages.clear()
    clock.now = 100.0
    made.pump(broker.publish)
    assert broker.got == [], "it stands still"
    made.follow_learner("one")
    made.pump(broker.publish)
    made.pump(broker.publish)
    assert broker.got == [1]
    made.acknowledge(messages.Receipt("a", 7, 1))
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3]
    made.acknowledge(messages.Receipt("a", 7, 3))
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3, 4, 5, 6, 7]


def test_a_new_learner_is_sent_everything_at_once(boot: Boot) -> None:
    made, broker = boot(3), Broker()
    made.follow_learner("one")
    made.pump(broker.publish)
    made.follow_learner("two")
    made.pump(broker.publish)
    assert broker.got == [1, 2, 3, 1, 2, 3]


def test_half_full_is_said_until_receipts_make_room(boot: Boot) -> None:
    made = boot(40, limit_bytes=64 * BODY)
    assert made.is_half_full
    made.acknowledge(messages.Receipt("a", 7, 30))
    assert not made.is_half_full


def test_the_oldest_are_dropped_and_counted_and_the_next_one_says_so(boot: Boot) -> None:
    made, broker = boot(5, limit_bytes=3 * BODY), Broker()
    assert 1 <= len(made) < 5
    assert made.steps_dropped == 10 * (5 - len(made))
    made.pump(broker.publish)
    first = broker.messages[0]
    assert broker.got == list(range(6 - len(made), 6))
    assert first.oldest == first.seq, "else the learner would wait for what was dropped"


def test_one_message_is_held_however_large(boot: Boot) -> None:
    assert len(boot(2, limit_bytes=1)) == 1


def test_what_an_earlier_boot_left_goes_first_and_the_new_waits_for_its_receipt(boot: Boot) -> None:
    boot(3).close()
    made, broker = boot(2, number=8), Broker()
    assert len(made) == 5
    assert made.steps == 20, "of this boot"
    made.pump(broker.publish)
    assert [(m.boot, m.seq) for m in broker.messages] == [(7, 1), (7, 2), (7, 3)]
    assert not made.unsent, "a lost message of boot 7 that came after boot 8 would be a duplicate"
    made.acknowledge(messages.Receipt("a", 7, 3))
    made.pump(broker.publish)
    assert [(m.boot, m.seq, m.oldest, m.step) for m in broker.messages[3:]] == [(8, 1, 1, 0), (8, 2, 1, 10)]


def test_nothing_is_left_behind_when_all_has_its_receipt(boot: Boot, tmp_path: Path) -> None:
    made = boot(3)
    made.acknowledge(messages.Receipt("a", 7, 3))
    made.close()
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_what_is_damaged_between_two_messages_is_passed_over(boot: Boot, tmp_path: Path) -> None:
    boot(3).close()
    (file,) = (tmp_path / "spool").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    made, broker = boot(0, number=8), Broker()
    made.pump(broker.publish)
    assert broker.got == [1], "3 would make the learner pass over whatever was lost on its way"
    made.acknowledge(messages.Receipt("a", 7, 1))
    made.pump(broker.publish)
    assert [(m.seq, m.oldest) for m in broker.messages] == [(1, 1), (3, 3)]


class Disk:
    """A disk that holds so many bytes, in place of os.pwritev."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.free = 0
        self.code = errno.ENOSPC
        self._directory = directory
        self._pwritev = os.pwritev
        monkeypatch.setattr(os, "pwritev", self)
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, file: int, parts: Any, offset: int) -> int:
        data = b"".join(parts) if isinstance(parts, list) else bytes(parts)
        used = sum(path.stat().st_size for path in self._directory.glob("*.segment"))
        fits = data[: max(0, self.free - used)]
        if not fits:
            raise OSError(self.code, os.strerror(self.code))
        return self._pwritev(file, [fits], offset)


def test_a_full_disk_drops_the_oldest_goes_on_and_says_so_once(
    boot: Boot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch, tmp_path / "spool")
    disk.free = 6 * BODY
    made, broker = boot(20, limit_bytes=16 * BODY), Broker()  # every message a file of its own
    assert made.steps_dropped == 10 * (20 - len(made))
    assert 2 <= len(made) <= 6
    made.pump(broker.publish)
    assert broker.got == list(range(21 - len(made), 21))
    made.close()
    disk.free = 10**6
    again = boot(window.LIMIT + 2, number=8, limit_bytes=10**6)
    assert len(again) == len(broker.got) + window.LIMIT + 2, "all of it is in files"
    assert len([line for line in caplog.messages if "cannot be written" in line]) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_nothing_leaves_memory(
    boot: Boot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level(logging.INFO)
    disk = Disk(monkeypatch, tmp_path / "spool")
    disk.code = code
    made, broker = boot(20, limit_bytes=5 * BODY), Broker()
    assert made.steps_dropped == 10 * (20 - len(made))
    assert 2 <= len(made) <= 6, "the limit holds for memory too"
    made.pump(broker.publish)
    assert broker.got == list(range(21 - len(made), 21))
    disk.free = 10**6
    made.add(taken(), 1, 1, 1)
    made.acknowledge(messages.Receipt("a", 7, 20))
    for _ in range(window.LIMIT + 1):
        made.add(taken(), 1, 1, 1)
    made.acknowledge(messages.Receipt("a", 7, 20 + window.LIMIT + 1))
    made.close()
    assert len(boot(0, number=8)) == 1
    said = [record.getMessage() for record in caplog.records if record.name == spool.__name__]
    assert len(said) == 3
    assert "cannot be written" in said[0]
    assert "can be written again" in said[1]
    assert "holds 1 messages of earlier boots" in said[2]


def test_what_only_memory_held_is_written_at_the_end_if_that_goes(
    boot: Boot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path / "spool")
    made = boot(3)
    disk.free = 10**6
    made.close()
    broker = Broker()
    boot(0, number=8).pump(broker.publish)
    assert [(m.boot, m.seq) for m in broker.messages] == [(7, 1), (7, 2), (7, 3)]


@pytest.mark.parametrize(("date", "created_ms"), [(lambda: 1_800_000_000.25, 1_800_000_000_250), (lambda: None, 0)])
def test_a_message_says_when_it_was_finished_however_late_it_is_sent(
    tmp_path: Path, date: Callable[[], float | None], created_ms: int
) -> None:
    files = journal.Journal.open(tmp_path, 10**6)
    first = spool.Spool.open(1, "f", bytes, files, date=date)
    first.add(taken(), assigned_epoch=4, epoch=3, version=9)
    first.close()
    broker = Broker()
    later = spool.Spool.open(2, "f", lambda body: b"sealed" + body, journal.Journal.open(tmp_path, 10**6))
    later.pump(broker.publish)
    assert [message.created_ms for message in broker.messages] == [created_ms]
    later.close()
