"""The ledger has once what was committed; what cannot be read is named and set aside."""

from __future__ import annotations

import contextlib
import functools
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.contract import errors
from learner.experience import ledger
from learner.files import run_directory
from tests.fakes import log_reader


def entry(seq: int, boot: int = 1, verdict: str = ledger.OK, steps: int = 10) -> ledger.Entry:
    body = bytes([seq]) * 20 if verdict == ledger.OK else None
    return ledger.Entry("pi", boot, seq, 100 + seq, steps, 2, 20, verdict, body)


def commit(book: ledger.Ledger, *entries: ledger.Entry, forget_before: int = 0) -> None:
    book.begin(entries, forget_before)
    book.wait()


def seqs(book: ledger.Ledger, steps: int = 10**6) -> list[int]:
    return [body[0] for _, body in book.newest(steps)]


def test_remembers_over_a_restart(tmp_path: Path, log: log_reader.LogReader) -> None:
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    commit(book, entry(1), entry(2, verdict="shape"), entry(1, boot=2))
    commit(book, entry(3))
    book.close()
    again = ledger.resume(tmp_path / run_directory.LEDGER, keep=False, before=(9, 9), about={})
    assert not log.lines
    assert again.id == book.id
    assert again.last_id == 4
    assert again.marks() == {("pi", 1): ledger.Mark(3, 113), ("pi", 2): ledger.Mark(1, 111)}
    assert again.totals() == (30, 6), "refused steps are not in replay"
    assert seqs(again) == [1, 1, 3]
    assert [id_ for id_, _ in again.newest(15)] == [3, 4], "the newest that hold so many steps"
    again.close()


def test_a_key_never_comes_twice(tmp_path: Path) -> None:
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    commit(book, entry(1))
    book.begin([entry(2), entry(1)], 0)
    for _ in range(2):
        with pytest.raises(errors.RunError, match="cannot be written"):
            book.wait()
    book.close()
    again = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    assert again.marks() == {("pi", 1): ledger.Mark(1, 111)}, "of a group all is written, or nothing"
    again.close()


def test_a_full_disk_is_named_and_nothing_is_half_there(tmp_path: Path) -> None:
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    book._db.execute("PRAGMA max_page_count = 12")
    commit(book, entry(1))
    big = ledger.Entry("pi", 1, 2, 0, 10, 0, 10**6, ledger.OK, bytes(10**6))
    book.begin([big], 0)
    with pytest.raises(errors.StorageError, match="full"):
        book.wait()
    book.close()
    again = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    assert seqs(again) == [1]
    again.close()


@pytest.mark.parametrize("keep", [False, True])
def test_forgets_payloads_and_never_keys(tmp_path: Path, keep: bool) -> None:
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER, keep=keep)
    commit(book, *(entry(seq) for seq in range(1, 6)))
    commit(book, entry(6), forget_before=4)
    assert seqs(book) == ([1, 2, 3, 4, 5, 6] if keep else [4, 5, 6])
    assert book.marks() == {("pi", 1): ledger.Mark(6, 116)}
    assert book.totals() == (60, 12)
    book.close()


def test_a_new_ledger_has_a_new_id(tmp_path: Path) -> None:
    books = [ledger.Ledger.open(tmp_path / name) for name in ("a", "b")]
    assert books[0].id != books[1].id
    for book in books:
        book.close()


def test_what_is_forgotten_is_not_written_again(tmp_path: Path) -> None:
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    commit(book, *(ledger.Entry("pi", 1, seq, 0, 10, 0, 27_000, ledger.OK, bytes(27_000)) for seq in range(1, 85)))
    book._worker.submit(book._tidy).result()  # the log begins anew with the next commit
    commit(book, entry(85), forget_before=85)
    assert seqs(book) == [85]
    _, pages, _ = book._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    assert pages < 84, "zeros were written over what went: SQLite can be built so that it does (Debian's is)"
    book.close()


@pytest.mark.parametrize("damage", ["lost", "junk", "cut", "empty"])
def test_a_lost_or_broken_ledger_is_named_and_a_new_one_begins(
    tmp_path: Path, damage: str, log: log_reader.LogReader
) -> None:
    path = tmp_path / run_directory.LEDGER
    book = ledger.Ledger.open(path)
    commit(book, *(entry(seq) for seq in range(1, 100)))
    book.close()
    data = path.read_bytes()
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes({"junk": b"junk" * 5000, "cut": data[: len(data) // 2], "empty": b""}[damage])
    again = ledger.resume(path, keep=False, before=(500, 7), about={"env_id": "x"})
    assert again.id != book.id
    assert again.marks() == {}
    assert again.totals() == (500, 7), "the run goes on counting where its checkpoint was"
    assert ("is lost" if damage == "lost" else "is broken") in log.lines[0]
    assert "a new ledger begins" in log.lines[-1]
    assert (damage == "lost") == (not list(tmp_path.glob("*.broken-*")))
    assert ledger.about(path)["env_id"] == "x"
    commit(again, entry(1))
    again.close()


def test_others_read_along(tmp_path: Path) -> None:
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER, about={"env_id": "x"})
    commit(book, entry(1), entry(2, verdict="shape"), entry(3))
    assert list(ledger.bodies(tmp_path / run_directory.LEDGER)) == [("pi", entry(1).body), ("pi", entry(3).body)]
    assert ledger.about(tmp_path / run_directory.LEDGER)["id"] == book.id
    book.close()
    with pytest.raises(errors.RunError, match="no ledger"):
        ledger.about(tmp_path / "elsewhere")


def test_what_is_committed_is_in_the_file_when_wait_returns(tmp_path: Path) -> None:
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    commit(book, entry(1))
    other = sqlite3.connect(tmp_path / run_directory.LEDGER)
    assert other.execute("SELECT seq FROM messages").fetchall() == [(1,)]
    assert book._db.execute("PRAGMA synchronous").fetchone() == (2,), "FULL: each commit is synced"
    other.close()
    book.close()


def test_the_log_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much was committed, moving it into the file makes no receipt wait for long."""
    monkeypatch.setattr(ledger, "_TIDY_S", 0.0)
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    size = 100_000
    for seq in range(1, 31):
        commit(book, ledger.Entry("pi", 1, seq, 0, 10, 0, size, ledger.OK, bytes([seq]) * size))
    log = tmp_path / f"{run_directory.LEDGER}-wal"
    assert log.stat().st_size < 5 * size
    assert seqs(book) == list(range(1, 31))
    book.close()


@contextlib.contextmanager
def no_room(size_bytes: int) -> Iterator[None]:
    """No file grows beyond that: what a full disk is to SQLite, without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.fault(10)
@pytest.mark.parametrize("left_behind", ["closed", "killed"])
def test_a_sound_ledger_that_cannot_be_opened_now_is_not_called_broken(
    tmp_path: Path, left_behind: str, log: log_reader.LogReader
) -> None:
    path = tmp_path / run_directory.LEDGER
    book = ledger.Ledger.open(path)
    commit(book, *(entry(seq) for seq in range(1, 100)))
    if left_behind == "killed":  # its log is not in the file
        (tmp_path / "copy").mkdir()
        for file in tmp_path.glob("ledger*"):
            shutil.copy(file, tmp_path / "copy")
        path = tmp_path / "copy" / run_directory.LEDGER
    book.close()
    refused: list[errors.ActorqError] = []
    for size_bytes in (0, 4096, 16384):
        with no_room(size_bytes):
            try:
                ledger.resume(path, keep=False, before=(0, 0), about={}).close()
            except errors.ActorqError as error:
                refused.append(error)
    assert refused, "else this shows nothing"
    assert all("cannot be" in one.what and "make room" in one.todo and "--resume" in one.todo for one in refused)
    assert not list(path.parent.glob("*.broken-*"))
    again = ledger.resume(path, keep=False, before=(0, 0), about={})
    assert not log.lines
    assert again.id == book.id and again.totals() == (990, 198)
    again.close()


@pytest.mark.fault(10)
def test_a_ledger_that_somebody_holds_is_not_called_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: log_reader.LogReader
) -> None:
    path = tmp_path / run_directory.LEDGER
    ledger.Ledger.open(path).close()
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=0.05))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(errors.ActorqError, match="locked"):
        ledger.resume(path, keep=False, before=(0, 0), about={})
    other.close()
    assert not log.lines
    assert not list(tmp_path.glob("*.broken-*"))
    with pytest.raises(errors.ActorqError, match="cannot be opened"):
        ledger.Ledger.open(tmp_path / "nowhere" / run_directory.LEDGER)


def test_a_ledger_of_another_release_is_not_called_broken(tmp_path: Path, log: log_reader.LogReader) -> None:
    path = tmp_path / run_directory.LEDGER
    book = ledger.Ledger.open(path)
    book._db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    book.close()
    with pytest.raises(errors.RunError, match="schema is 99"):
        ledger.resume(path, keep=False, before=(0, 0), about={})
    assert not log.lines
    assert not list(tmp_path.glob("*.broken-*"))


def test_knows_the_sessions_of_its_run(tmp_path: Path) -> None:
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    assert book.begin_session({3}) == {3}
    again = ledger.Ledger.open(tmp_path / run_directory.LEDGER)  # the first one was killed
    assert again.begin_session({7}) == {3, 7}
    again.close()


@pytest.mark.parametrize("epochs", [{3, 7}, {3}], ids=["a later session", "a worker of the same, started again"])
def test_once_a_later_one_has_begun_an_earlier_one_writes_nothing_more(tmp_path: Path, epochs: set[int]) -> None:
    first = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    first.begin_session({3})
    commit(first, entry(1))
    second = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    commit(first, entry(2))  # nobody has succeeded it yet
    second.begin_session(epochs)
    assert second.marks() == {("pi", 1): ledger.Mark(2, 112)}
    first.begin([entry(3)], 99)
    for _ in range(2):
        with pytest.raises(ledger.Superseded, match="another learner goes on with this run"):
            first.wait()
    commit(second, entry(3), entry(4))
    writers: list[Callable[[], object]] = [
        lambda: first.quarantine([3]),
        lambda: first.hold("pi", None),
        lambda: first.decide("pi", keep=False),
        lambda: first.forget([3]),
    ]
    for write in writers:
        with pytest.raises(ledger.Superseded):
            write()
    first.note_conflict("pi", 1, 3)
    first.close()
    assert seqs(second) == [1, 2, 3, 4] and not second.conflicts()
    second.close()


def rows(book: ledger.Ledger, table: str = "messages") -> int:
    (count,) = book._db.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(count)


@pytest.mark.fault(16)
def test_the_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred boots of which all is taken, and as many messages that are refused."""
    monkeypatch.setattr(ledger, "ROWS_KEPT", 100)
    monkeypatch.setattr(ledger, "BOOTS_KEPT", 8)
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    pages = []
    for boot in range(1, 101):
        for begin in range(1, 101, 20):
            batch = [entry(seq, boot) for seq in range(begin, begin + 20)]
            batch += [entry(seq, 7, "grant") for seq in range(100 * boot + begin, 100 * boot + begin + 20)]
            commit(book, *batch, forget_before=book.last_id - 50)
        pages.append(book._db.execute("PRAGMA page_count").fetchone()[0])
    assert pages[-1] == pages[20], "grown until what is kept is full, and then no more"
    assert rows(book) < 300 and rows(book, "marks") <= 10 and rows(book, "payloads") < 100
    assert book.totals() == (100 * 100 * 10, 100 * 100 * 2)
    assert book._db.execute("SELECT refused FROM totals").fetchone() == (100 * 100,)
    assert book.marks()["pi", 100] == ledger.Mark(100, 210) and book.marks()["pi", 7].seq == 100 * 100 + 100
    assert len(list(book.newest(10**6))) > 25, "what replay holds is there"
    book.close()
    again = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    assert again.last_id == book.last_id and again.marks().keys() >= {("pi", 7), ("pi", 100)}
    commit(again, entry(101, 100), entry(1, 101))
    assert again.totals()[0] == 100_020
    again.close()


def test_kept_experience_has_all_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "ROWS_KEPT", 10)
    monkeypatch.setattr(ledger, "BOOTS_KEPT", 3)
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER, keep=True)
    for boot in range(1, 21):
        commit(book, *(entry(seq, boot) for seq in range(1, 6)), forget_before=book.last_id)
    assert rows(book) == rows(book, "payloads") == 100 and rows(book, "marks") == 20
    assert len(list(ledger.bodies(tmp_path / run_directory.LEDGER))) == 100
    book.close()


@pytest.mark.fault(16)
def test_nor_do_boots_that_were_invented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "BOOTS_KEPT", 16)
    book = ledger.Ledger.open(tmp_path / run_directory.LEDGER)
    commit(book, entry(1, boot=7))
    commit(book, entry(1, boot=8, verdict="grant"), entry(2, boot=8))
    for boot in range(100, 300):
        commit(book, entry(1, boot=boot, verdict="grant"), entry(2, boot=boot, verdict="grant"))
    commit(book, entry(2, boot=7, verdict="shape"))
    commit(book, entry(1, boot=100, verdict="grant"))  # as if for the first time: the validator forgot it too
    marks = book.marks()
    assert len(marks) <= 18 and rows(book) <= 40
    assert marks["pi", 299].seq == marks["pi", 8].seq == marks["pi", 7].seq == 2
    assert book.totals() == (20, 4)
    book.close()


@pytest.mark.parametrize("schema", ["1", "2", "3"])
def test_a_ledger_of_an_earlier_release_goes_on(tmp_path: Path, schema: str, log: log_reader.LogReader) -> None:
    path = tmp_path / run_directory.LEDGER
    book = ledger.Ledger.open(path, before=(7, 3))
    commit(book, entry(1), entry(2), entry(3, verdict="shape"), entry(1, boot=5, verdict="grant"))
    book.quarantine([2])
    book.close()
    with contextlib.closing(sqlite3.connect(path)) as old:
        if schema != "3":
            old.executescript("DROP TABLE totals; DROP TABLE marks;")
        if schema == "1":
            old.executescript("ALTER TABLE messages DROP COLUMN digest; DROP TABLE sessions; DROP TABLE conflicts;")
        old.execute("UPDATE messages SET verdict = '40 refused' WHERE boot = 5")
        old.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (schema,))
        old.executemany("INSERT INTO meta VALUES (?, ?)", [("steps_before", "7"), ("episodes_before", "3")])
        old.commit()
    again = ledger.resume(path, keep=False, before=(0, 0), about={})
    assert log.lines and all("earlier release" in line for line in log.lines)
    assert again.id == book.id and again.totals() == (27, 7)
    assert again.marks() == {("pi", 1): ledger.Mark(3, 113), ("pi", 5): ledger.Mark(1, 111)}
    assert again._db.execute("SELECT refused FROM totals").fetchone() == (2 if schema == "3" else 41,)
    assert again._db.execute("SELECT boot, taken FROM marks").fetchall() == [(1, 1), (5, 0)]
    commit(again, entry(4))
    assert again.totals() == (37, 9) and seqs(again) == [1, 4]
    assert again.digest("pi", 1, 1) is None, "it was by another function"
    assert again.digest("pi", 1, 4) == ledger.digest(bytes([4]) * 20)
    again.close()
    once = ledger.resume(path, keep=False, before=(0, 0), about={})
    assert len(log.lines) == 1 and once.totals() == (37, 9)
    once.close()
