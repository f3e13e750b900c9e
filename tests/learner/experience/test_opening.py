"""Messages of frames are opened on another thread, come back in their order, and are refused and counted as ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, frames, messages, signing, specs
from learner.experience import dead_letters, ingest, ledger, opening, validate
from learner.experience.buffers import replay
from learner.files import run_directory
from tests.fakes import fleet_examples

MAC = signing.ActorMac(b"k" * 32)
TOPIC = "actorq/lab/actor/pi/experience"
SPEC = specs.EnvSpec(specs.ObservationSpec((8, 8, 1), "uint8"), specs.ActionSpec("discrete", n=2))
SEEN = np.arange(5 * 64, dtype=np.uint8).reshape(5, 8, 8, 1)


class Learner:
    """What takes frames in: an opener, a validator, a ledger and replay."""

    def __init__(self, run: Path) -> None:
        self.replay = replay.Replay(SPEC, 100, n_step=1, gamma=0.9)
        self.book = ledger.Ledger.open(run / run_directory.LEDGER)
        letters = dead_letters.DeadLetters(run / dead_letters.NAME)
        self.checks = validate.Validator({"pi": MAC}, SPEC, (1,), self.book.marks(), letters, self.replay.fits)
        self.ingest = ingest.Ingest(self.checks, self.book, self.replay)
        self.ingest.rebuild_replay()
        self.woken = threading.Semaphore(0)
        self.opener = opening.Opener(self.checks, self.woken.release)

    def add(self, seq: int, observation: Any = None, *, flip: bool = False) -> None:
        packed = frames.pack(SEEN + np.uint8(seq)) if observation is None else observation
        values: dict[str, Any] = {"seq": seq, "step": 3 * (seq - 1), "fingerprint": SPEC.fingerprint}
        sent = bytearray(MAC.seal(TOPIC, codec.encode(fleet_examples.experience(observation=packed, **values))))
        sent[-1] ^= flip
        self.opener.add("pi", TOPIC, bytes(sent))

    def take(self, *, wait: bool = True) -> list[str]:
        """Takes in what is open; returns verdicts."""
        found = [self.ingest.receive(one[0], one[1], one[2], 5, one[3]) for one in self.opener.opened(wait=wait)]
        return [one.entry.verdict if one is not None else "" for one in found]

    def close(self) -> None:
        self.opener.close()
        self.ingest.close()


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[Learner]:
    made = Learner(tmp_path)
    yield made
    made.close()


def test_frames_are_unpacked_on_another_thread_and_enter_in_their_order(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, unpack, may_go = [], frames.unpack, threading.Event()

    def noted(*arguments: Any) -> Any:
        assert may_go.wait(20.0)
        threads.append(threading.get_ident())
        return unpack(*arguments)

    monkeypatch.setattr(frames, "unpack", noted)
    for seq in (1, 2, 3):
        learner.add(seq)
    assert learner.take(wait=False) == [], "the loop goes on meanwhile"
    assert not learner.ingest.pending, "and nothing is committed that is not unpacked"
    may_go.set()
    for _ in range(3):
        assert learner.woken.acquire(timeout=20.0)
    assert learner.take(wait=False) == [ledger.OK] * 3
    assert len(threads) == 3, "each once"
    assert threading.get_ident() not in threads
    inserted = learner.ingest.commit(wait=True)
    assert [one.seq for one in inserted] == [1, 2, 3]
    assert [one.observation.tolist() for one in inserted] == [(SEEN + np.uint8(seq)).tolist() for seq in (1, 2, 3)]


def test_what_is_wrong_is_refused_counted_and_does_not_hold_up_the_next(learner: Learner) -> None:
    learner.add(1, np.concatenate([frames.pack(SEEN), np.zeros(1, np.uint8)]))
    learner.add(2, flip=True)
    learner.add(2)
    learner.add(2)  # once more
    learner.add(4)
    assert learner.take() == ["frames", "", ledger.OK, "", ""]
    assert learner.checks.refused == {"frames": 1, "signature": 1, "duplicate": 1, "gap": 1}
    assert learner.checks.steps_refused == 3
    assert [one.seq for one in learner.ingest.commit(wait=True)] == [2]
    assert [receipt.seq for _, receipt in learner.ingest.receipts()] == [2], "refused, and not sent again"


def test_no_more_are_under_way_than_there_is_room_for(learner: Learner) -> None:
    for seq in range(1, opening.MOST + 1):
        assert not learner.opener.is_full
        learner.add(seq)
    assert learner.opener.is_full
    assert len(learner.take()) == opening.MOST
    assert not learner.opener.is_full


def test_what_was_open_already_is_what_is_opened_here(learner: Learner) -> None:
    sent = fleet_examples.experience(observation=frames.pack(SEEN), fingerprint=SPEC.fingerprint)
    sealed = MAC.seal(TOPIC, codec.encode(sent))
    opened = learner.checks.open("pi", TOPIC, sealed)
    assert isinstance(opened.unpacked, messages.Experience)
    assert opened.unpacked.observation.tolist() == validate.unpacked(sent, SPEC).observation.tolist()
    with pytest.raises(errors.SignatureError):
        learner.checks.open("another", TOPIC, sealed)


def test_what_is_not_taken_at_the_end_has_no_receipt(learner: Learner) -> None:
    learner.add(1)
    assert learner.take() == [ledger.OK]
    learner.add(2)
    learner.opener.close()
    learner.ingest.commit(wait=True)
    assert [receipt.seq for _, receipt in learner.ingest.receipts()] == [1]
