"""Ledger, then replay, then receipt; and after a kill between any two of them nothing is lost or doubled."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, messages, signing
from learner.experience import age, dead_letters, ingest, ledger, validate
from learner.experience.buffers import replay
from learner.files import run_directory
from tests.fakes import fleet_examples, log_reader

MAC = signing.ActorMac(b"k" * 32)
TOPIC = "actorq/lab/actor/pi/experience"


class Learner:
    """One life of a learner on one run directory."""

    def __init__(self, run: Path, capacity: int = 100) -> None:
        self.replay = replay.Replay(fleet_examples.SPEC, capacity, n_step=2, gamma=0.9)
        self.book = ledger.Ledger.open(run / run_directory.LEDGER)
        letters = dead_letters.DeadLetters(run / dead_letters.NAME)
        checks = validate.Validator(
            {"pi": MAC}, fleet_examples.SPEC, (1, 1), self.book.marks(), letters, self.replay.fits
        )
        self.refused = checks.refused
        self.ingest = ingest.Ingest(checks, self.book, self.replay)
        self.ingest.rebuild_replay()

    def take(self, *seqs: int, oldest: int = 1, reward: float = 1.0, created_ms: int = 0) -> None:
        for seq in seqs:
            values: dict[str, Any] = {"observation": np.full((5, 4), seq, np.float32)}
            values |= {"reward": np.full(3, reward, np.float32), "seq": seq, "oldest": oldest, "step": 3 * (seq - 1)}
            values["created_ms"] = created_ms
            sent = fleet_examples.experience(**values)
            self.ingest.receive("pi", TOPIC, MAC.seal(TOPIC, codec.encode(sent)), 5)

    @property
    def receipts(self) -> list[int]:
        return [receipt.seq for _, receipt in self.ingest.receipts()]

    @property
    def contents(self) -> list[float]:
        """The first feature of every observation in replay, which is its message's number; in order."""
        rng = np.random.default_rng(0)
        return sorted(self.replay.observations(10**6, rng)[:, 0].tolist())


def test_a_receipt_comes_after_ledger_and_replay(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    learner.take(1, 2)
    assert learner.receipts == []
    assert len(learner.replay) == 0
    fed = learner.ingest.commit(wait=True)
    assert [m.seq for m in fed] == [1, 2]
    assert len(learner.replay) == 6
    assert learner.receipts == [2]
    assert not learner.ingest.pending
    learner.ingest.close()


def test_without_waiting_a_commit_goes_on_and_its_messages_come_later(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    learner.take(1)
    assert learner.ingest.commit(wait=False) == []
    assert learner.ingest.pending
    learner.take(2)
    assert [m.seq for m in learner.ingest.commit(wait=True)] == [1, 2]
    assert learner.receipts == [2]
    learner.ingest.close()


def test_it_is_full_until_the_commit_under_way_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "LIMIT_BYTES", 3000)
    learner = Learner(tmp_path)
    learner.take(1, 2)
    full = [learner.ingest.is_full]
    learner.take(3, 4, 5)
    full.append(learner.ingest.is_full)
    learner.ingest.commit(wait=False)
    full.append(learner.ingest.is_full)
    assert full == [False, True, False], "while they are written, others may wait"
    learner.ingest.commit(wait=True)
    learner.ingest.close()


@pytest.mark.parametrize("killed", ["before the commit", "before replay", "before the receipt"])
def test_a_kill_between_any_two_steps_loses_and_doubles_nothing(tmp_path: Path, killed: str) -> None:
    first = Learner(tmp_path)
    first.take(1, 2)
    first.ingest.commit(wait=True)
    first.take(3)
    if killed == "before replay":
        while first.ingest.due_in_s < math.inf:  # until a commit is due
            first.ingest.commit(wait=False)
        first.book.wait()
    elif killed == "before the receipt":
        first.ingest.commit(wait=True)
    first.book.close()

    second = Learner(tmp_path)
    assert len(second.replay) == (6 if killed == "before the commit" else 9)
    second.take(3)  # it got no receipt
    second.take(4)
    second.ingest.commit(wait=True)
    assert second.contents == [float(seq) for seq in (1, 2, 3, 4) for _ in range(5)]
    assert second.receipts == [4]
    assert second.book.totals() == (12, 8)
    second.ingest.close()


def test_replay_is_rebuilt_as_it_was_and_draws_alike(tmp_path: Path, log: log_reader.LogReader) -> None:
    first = Learner(tmp_path, capacity=20)
    for seq in range(1, 30):
        first.take(seq)
        first.ingest.commit(wait=True)
    first.book.close()
    second = Learner(tmp_path, capacity=20)
    assert len(first.replay) == len(second.replay)
    assert second.contents == first.contents
    a, b = (each.replay.sample(2, 16, np.random.default_rng(3)) for each in (first, second))
    for name in ("observation", "action", "reward", "discount", "bootstrap"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert len(list(second.book.newest(10**6))) <= 9, "what left replay is forgotten"
    assert "20 transitions" in log.lines[0] or f"{len(second.replay)} transitions" in log.lines[0]
    second.ingest.close()


def test_a_message_of_another_release_is_passed_over(tmp_path: Path, log: log_reader.LogReader) -> None:
    first = Learner(tmp_path)
    first.take(1, 2)
    first.ingest.commit(wait=True)
    first.book._db.execute("UPDATE payloads SET body = x'00' WHERE id = 1")
    first.ingest.close()
    second = Learner(tmp_path)
    assert len(second.replay) == 3
    assert "1 messages of the ledger do not fit" in log.lines[-1]
    second.ingest.close()


def test_what_cannot_be_committed_is_never_receipted_nor_fed(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    learner.take(1)
    learner.book._db.execute("DROP TABLE payloads")
    for _ in range(2):
        with pytest.raises(errors.RunError, match="cannot be written"):
            learner.ingest.commit(wait=True)
    assert learner.receipts == []
    assert len(learner.replay) == 0
    learner.ingest.close()


def test_refused_messages_are_receipted_but_not_fed(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    bad: messages.Experience = fleet_examples.experience(fingerprint="0" * 16)
    assert learner.ingest.receive("pi", TOPIC, MAC.seal(TOPIC, codec.encode(bad)), 5) is not None
    assert learner.ingest.commit(wait=True) == []
    assert learner.receipts == [1]
    assert learner.book.totals() == (0, 0)
    learner.ingest.close()


@pytest.mark.fault(4)
@pytest.mark.parametrize("when", ["under way", "settled", "after a restart"])
def test_what_came_with_another_content_is_never_receipted(
    tmp_path: Path, when: str, log: log_reader.LogReader
) -> None:
    """Two machines that number their messages alike: the second still holds its own 2 and 3."""
    learner = Learner(tmp_path)
    learner.take(1, 2, 3)
    if when != "under way":
        learner.ingest.commit(wait=True)
    if when == "after a restart":
        learner.ingest.close()
        learner = Learner(tmp_path)
    learner.take(3, reward=2.0)
    learner.take(2, reward=2.0)
    learner.take(4)
    learner.ingest.commit(wait=True)
    assert learner.receipts == [1]
    said = [line for line in log.lines if "two contents" in line]
    assert len(said) == 2 and "actor pi" in said[0] and "actorq-broker enroll" in said[0]
    assert (learner.refused["conflict"], learner.refused["duplicate"]) == (2, 0)
    assert "conflict" in (tmp_path / dead_letters.NAME).read_text()
    learner.ingest.close()
    again = Learner(tmp_path)
    again.take(5)
    again.ingest.commit(wait=True)
    assert again.receipts == [1], "not by the learner's next life either"
    again.ingest.close()


@pytest.mark.parametrize("when", ["under way", "settled", "refused"])
def test_what_is_sent_again_is_the_same_though_less_is_held_by_now(tmp_path: Path, when: str) -> None:
    learner = Learner(tmp_path)
    reward = math.nan if when == "refused" else 1.0
    learner.take(1, 2, reward=reward)
    if when != "under way":
        learner.ingest.commit(wait=True)
    learner.take(2, oldest=2, reward=reward)
    learner.ingest.commit(wait=True)
    assert learner.receipts == [2] and learner.refused["conflict"] == 0 and learner.refused["duplicate"] == 1
    learner.ingest.close()


def test_what_is_held_is_receipted_and_kept_out_of_replay_until_it_is_released(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    learner.take(1, 2, 3)
    learner.ingest.commit(wait=True)
    assert learner.ingest.hold("pi", (1, 1)) == 6, "messages 2 and 3"
    assert set(learner.contents) == {1.0}
    learner.take(4, 5)
    assert learner.ingest.commit(wait=True) == []
    assert learner.receipts == [5], "the ledger has them: their actor need not keep them"
    assert learner.ingest.steps_held == 12
    assert set(learner.contents) == {1.0}
    learner.ingest.close()

    again = Learner(tmp_path)
    again.ingest.keep_holding(["pi"])
    assert set(again.contents) == {1.0}
    assert again.ingest.steps_held == 12
    assert again.book.totals()[0] == 9, "of 1, 2 and 3: what replay had seen counts"
    again.take(6)
    assert [m.seq for m in again.ingest.release("pi")] == [4, 5], "2 and 3 counted before"
    assert set(again.contents) == {1.0, 2.0, 3.0, 4.0, 5.0}
    again.take(7)
    again.ingest.commit(wait=True)
    assert set(again.contents) == {1.0, 2.0, 3.0, 4.0, 5.0, 7.0}, "6 came when it was held"
    assert again.book.totals()[0] == 18
    again.ingest.close()


def test_what_is_discarded_never_enters_replay_and_what_comes_then_does(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    learner.take(1)
    learner.ingest.commit(wait=True)
    assert learner.ingest.hold("pi", None) == 3, "none was found good: all of this session"
    learner.take(2)
    learner.ingest.commit(wait=True)
    assert learner.ingest.discard("pi") == 6
    learner.take(3)
    learner.ingest.commit(wait=True)
    assert set(learner.contents) == {3.0}
    learner.ingest.close()

    again = Learner(tmp_path)
    assert set(again.contents) == {3.0}
    assert again.book.totals()[0] == 6, "message 1 had been in replay"
    with sqlite3.connect(tmp_path / run_directory.LEDGER) as book:
        assert book.execute("SELECT verdict FROM messages ORDER BY id").fetchall() == [
            (ledger.QUARANTINED,), (ledger.DISCARDED,), (ledger.OK,),
        ]  # fmt: skip
    assert [boot for _, boot in ledger.bodies(tmp_path / run_directory.LEDGER)] != []
    again.ingest.close()


def test_only_what_came_in_this_session_is_held_where_nothing_was_found_good(tmp_path: Path) -> None:
    first = Learner(tmp_path)
    first.take(1)
    first.ingest.commit(wait=True)
    first.ingest.close()
    second = Learner(tmp_path)
    second.take(2)
    second.ingest.commit(wait=True)
    assert second.ingest.hold("pi", None) == 3
    assert set(second.contents) == {1.0}
    second.ingest.close()


def test_as_much_is_held_as_replay_would_keep(tmp_path: Path) -> None:
    learner = Learner(tmp_path, capacity=12)
    learner.ingest.hold("pi", None)
    for seq in range(1, 30):
        learner.take(seq)
        learner.ingest.commit(wait=True)
    assert learner.ingest.steps_held == 12
    assert learner.receipts == [29]
    assert [m.seq for m in learner.ingest.release("pi")] == [26, 27, 28, 29]
    assert learner.book.totals()[0] == 12, "what was forgotten meanwhile has not reached replay"
    learner.ingest.close()


def test_what_is_too_old_is_in_the_ledger_and_receipted_and_never_in_replay(tmp_path: Path) -> None:
    learner = Learner(tmp_path, capacity=9)
    learner.ingest.ages = age.Ages(limit_s=60.0, clock=lambda: 2000.0)
    learner.take(1, 2, created_ms=1_990_000)
    learner.take(3, 4, 5, created_ms=1_000_000)
    fed = learner.ingest.commit(wait=True)
    assert [message.seq for message in fed] == [1, 2]
    assert learner.receipts == [5]
    assert learner.ingest.pending_steps == 0
    assert learner.ingest.ages.metrics()["steps_too_old"] == 9
    assert learner.ingest.ages.summary()["experience_age_s_p99"] == 10.0
    assert learner.book.totals() == (6, 4), "what reached replay"
    assert len(list(ledger.bodies(tmp_path / run_directory.LEDGER))) == 5, "an export has all"
    before = learner.contents
    learner.ingest.close()
    again = Learner(tmp_path, capacity=9)
    assert again.contents == before == [1.0] * 5 + [2.0] * 5, "as it was, and not less for what came behind"
    again.ingest.ages = age.Ages(limit_s=60.0, clock=lambda: 2000.0)
    again.take(5, 6, 7, 8, created_ms=1_000_000)
    again.ingest.commit(wait=True)
    assert again.refused["duplicate"] == 1
    again.take(9, 10, created_ms=1_000_000)
    again.ingest.commit(wait=True)
    assert again.receipts == [10]
    assert len(list(ledger.bodies(tmp_path / run_directory.LEDGER))) == 8, "of its session as much as replay would hold"
    again.ingest.close()


def test_what_is_held_is_so_however_old_it_is(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    learner.ingest.ages = age.Ages(limit_s=60.0, clock=lambda: 2000.0)
    learner.ingest.hold("pi", None)
    learner.take(1, created_ms=1_000_000)
    learner.ingest.commit(wait=True)
    assert learner.ingest.ages.steps_too_old == 0
    assert learner.ingest.steps_held == 3
    learner.ingest.close()
