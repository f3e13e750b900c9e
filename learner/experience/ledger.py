"""The ledger: every message that the learner has, once, on disk before its receipt goes out and before replay sees it.

SQLite in WAL mode, synchronous=FULL: a commit that returned survives the loss of power. One transaction takes all that
arrived since the one before; it runs on a thread of its own, because it waits for the disk, and training need not.

    meta      id of this ledger, schema, and what readers need to know
    totals    one row: what has reached replay over the whole run, and what was refused
    sessions  the epoch of each session of the run, from its start: experience recorded under another is another run's.
              Once a later one has begun (`generation` in meta), an earlier one writes nothing more, though no lock
              keeps it from the file
    marks     how far each boot is: of every actor the BOOTS_KEPT that were heard last, and all that have messages here
    conflicts the first number of a boot that came with two contents, if one did: from there on it gets no receipt
    messages  (actor, boot, seq), steps, bytes, time, a short digest, and the verdict: `ok`, what else keeps it out of
              replay (HELD and so on), or why it was refused; of those that replay still holds and of the newest
              ROWS_KEPT; of all with --keep-experience
    payloads  the encoded messages that replay still holds; all of them with --keep-experience

So the file stops growing, and a session begins as fast after a year as after a day. Rows have integer ids in order of
arrival, which is the order of replay. With payloads in their own table, forgetting some touches no other row: 9.5 k
messages of 27 KB a second were committed, 6.6 k with all in one table.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import re
import secrets
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from broker.contract import errors
from broker.program import stopwatch, storage

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_TIDY_S = 0.5
"""Between two moves of what was committed from the log into the file: each takes 3 ms. SQLite by itself moves 4000
pages at once, within a commit, which made receipts wait 50 ms every 7 s (200 messages of 14 KB a second)."""
OK = "ok"
QUARANTINED = "quarantined"
"""Was in replay, and spoilt training: it counts as before, and replay does not see it again."""
HELD = "held"
"""Came from an actor that does not do what it says: kept out of replay until a person decides."""
RECALLED = "recalled"
"""The same, and was in replay before: it counts as before."""
DISCARDED = "discarded"
"""Was held, and a person decided that replay shall not see it."""
TOO_OLD = "too old"
"""Came later than the run learns from what it gets (age.py): replay does not see it."""
_RECEIVED = OK, QUARANTINED, HELD, RECALLED, DISCARDED, TOO_OLD
"""The verdicts on what was not refused."""
_SCHEMA_VERSION = "4"
_OLDEST = re.compile(rb'"oldest":"[0-9]+"')
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""SQLite's codes which say that the file is no sound ledger; a full disk, say, is no fault of the file."""
BOOTS_KEPT = 128
"""Boots of each actor whose marks are kept, those heard last: so many of which something was taken, and as many others.
An actor sends one boot after the other, with 64 messages on their way at most: of an older one nothing comes again.
One that lies can invent as many as it likes."""
ROWS_KEPT = 1 << 18
"""Rows of messages that outlive their payloads, 20 MB: a message that comes again is compared with its digest there."""
_PRUNED = 2, 64
"""Rows that a commit may prune: so many times those it brings, and so many more. It never waits for many at once."""
_TOGETHER = 64, 16, 4, 1
"""Rows of one statement; few kinds, so that they stay prepared. After each one this thread waits for Python's lock:
with one a row, a commit of 80 messages of 27 KB took 25 ms under load, not 19."""
_OF_DISK = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
"""Errors of SQLite that are the disk's: primary codes."""
_OF_HELD = "FROM messages JOIN payloads USING (id) WHERE actor = ? AND verdict IN (?, ?) ORDER BY id"
_NOTHING: Mapping[str, str] = {}
_LAST_ID = "SELECT coalesce((SELECT max(id) FROM messages), 0), coalesce((SELECT max(last_id) FROM marks), 0)"
_PRAGMAS = (
    "page_size = 16384",
    "journal_mode = WAL",
    "synchronous = FULL",
    "secure_delete = OFF",  # Debian's is on: what is deleted is written again, as zeros; 19 ms, not 12
    "wal_autocheckpoint = 4000",
    "journal_size_limit = 100000000",
)
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE messages (
    id INTEGER PRIMARY KEY, actor TEXT NOT NULL, boot INTEGER NOT NULL, seq INTEGER NOT NULL, step INTEGER NOT NULL,
    steps INTEGER NOT NULL, ended INTEGER NOT NULL, bytes INTEGER NOT NULL, arrived_s REAL NOT NULL,
    verdict TEXT NOT NULL, digest BLOB, UNIQUE (actor, boot, seq)
);
CREATE TABLE payloads (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
"""
_SINCE_2 = """
CREATE TABLE sessions (epoch INTEGER PRIMARY KEY);
CREATE TABLE conflicts (actor TEXT NOT NULL, boot INTEGER NOT NULL, seq INTEGER NOT NULL, UNIQUE (actor, boot));
"""
_SINCE_3 = """
CREATE TABLE totals (steps INTEGER NOT NULL, episodes INTEGER NOT NULL, refused INTEGER NOT NULL);
CREATE TABLE marks (
    actor TEXT NOT NULL, boot INTEGER NOT NULL, seq INTEGER NOT NULL, steps INTEGER NOT NULL, last_id INTEGER NOT NULL,
    taken INTEGER NOT NULL, PRIMARY KEY (actor, boot)
) WITHOUT ROWID;
"""
_FROM_1 = f"ALTER TABLE messages ADD COLUMN digest BLOB; {_SINCE_2}"
_FROM_2 = f"""
{_SINCE_3}
INSERT INTO marks SELECT actor, boot, max(seq), step + steps, id, 0 FROM messages GROUP BY actor, boot;
UPDATE marks SET taken = EXISTS (
    SELECT 1 FROM messages m WHERE m.actor = marks.actor AND m.boot = marks.boot AND verdict IN ('ok', 'quarantined')
);
INSERT INTO totals
    SELECT coalesce(sum(steps) FILTER (WHERE verdict IN ('ok', 'quarantined')), 0)
               + (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'steps_before'),
           coalesce(sum(ended) FILTER (WHERE verdict IN ('ok', 'quarantined')), 0)
               + (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'episodes_before'),
           coalesce(sum(CASE WHEN verdict LIKE '% refused' THEN CAST(verdict AS INTEGER) ELSE 1 END)
                        FILTER (WHERE verdict NOT IN ('ok', 'quarantined')), 0)
    FROM messages;
"""
_FROM_3 = f"""
UPDATE messages SET digest = NULL;
UPDATE meta SET value = '{_SCHEMA_VERSION}' WHERE key = 'schema';
"""
"""Digests were by another function, and are not compared any more."""
_UPGRADES = {"1": _FROM_1 + _FROM_2 + _FROM_3, "2": _FROM_2 + _FROM_3, "3": _FROM_3}
"""By the schema that a ledger has."""


class Broken(errors.RunError):
    """The file is there and can be read, and is no sound ledger."""


class Superseded(errors.RunError):
    """A later session goes on with the run: this one writes nothing more."""


class Entry(NamedTuple):
    """One message of one actor, as the ledger keeps it. Times are Unix times in seconds.

    `step` counts the steps its boot recorded before it, `ended` the episodes that end in it. `body` is the encoded
    message, or None for what replay shall not see; then `digest` has its digest.
    """

    actor_id: str
    boot: int
    seq: int
    step: int
    steps: int
    ended: int
    size_bytes: int
    verdict: str
    body: bytes | memoryview | None
    digest: bytes | None = None


class Source(NamedTuple):
    """The origin of a message, and how many steps it brought."""

    actor_id: str
    boot: int
    seq: int
    steps: int


class Mark(NamedTuple):
    """The last message of one boot: its seq, and the steps up to and with it."""

    seq: int = 0
    steps: int = 0


class _Boots:
    """Boots of one actor, each with whether something of it was taken; the one that was heard last is the last."""

    def __init__(self, known: Iterable[tuple[int, int]]) -> None:
        self._taken: dict[int, None] = {}
        self._refused: dict[int, None] = {}
        for boot, is_taken in known:
            self.hear(boot, is_taken=bool(is_taken))

    def hear(self, boot: int, *, is_taken: bool) -> None:
        """Takes note of messages of a boot."""
        was_taken = boot in self._taken
        for boots in (self._taken, self._refused):
            boots.pop(boot, None)
        (self._taken if is_taken or was_taken else self._refused)[boot] = None

    def pop_old(self, is_held: Callable[[int], bool]) -> Iterator[int]:
        """Yields boots of which nothing can come again, each once; not yet those of which replay may hold something."""
        while len(self._refused) > BOOTS_KEPT:
            yield self._pop(self._refused)
        while len(self._taken) > BOOTS_KEPT and not is_held(next(iter(self._taken))):
            yield self._pop(self._taken)

    def _pop(self, boots: dict[int, None]) -> int:
        boot = next(iter(boots))
        del boots[boot]
        return boot


class Ledger:
    """An open ledger, as `open` gives it. One commit is under way at most.

    Args:
        path: Of the file.
        database: Open on it, its tables there.
        keep: Whether payloads stay for ever.
        about: What the file says of itself.
        last_id: Of the newest message.

    Attributes:
        id: Names this ledger in receipts.
        last_id: As given, and those since.
        on_commit: Called on the ledger's thread when a commit has ended, well or not.
        times: `ledger`: transactions, by messages.
    """

    @classmethod
    def open(
        cls, path: Path, *, keep: bool = False, before: tuple[int, int] = (0, 0), about: Mapping[str, str] = _NOTHING
    ) -> Ledger:
        """Opens the ledger in a file, or makes one.

        Args:
            path: Of the file; made if missing.
            keep: Whether payloads stay for ever.
            before: Steps and episodes that the run counted before this ledger began; kept in a new one.
            about: What readers of the file need to know; kept in a new one.

        Raises:
            Broken: The file is no ledger, or a broken one.
            RunError: It cannot be opened now: the disk is full, say.
        """
        fresh = not path.exists()
        with _named(path, _OPENED):
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            for pragma in _PRAGMAS:
                database.execute(f"PRAGMA {pragma}")
            if fresh:
                _make(database, about, before)
            _check(database, path)
            kept = dict(database.execute("SELECT key, value FROM meta"))
            last_id = max(*database.execute(_LAST_ID).fetchone())
        except sqlite3.Error as error:
            database.close()
            raise _failed(path, error, _OPENED) from error
        except errors.ActorqError:
            database.close()
            raise
        return cls(path, database, keep=keep, about=kept, last_id=last_id)

    def __init__(
        self, path: Path, database: sqlite3.Connection, *, keep: bool, about: Mapping[str, str], last_id: int
    ) -> None:
        self._path = path
        self._db = database
        self._keep = keep
        self.id = about["id"]
        self.last_id = self._began_after = last_id
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "ledger")
        self._commit: concurrent.futures.Future[None] | None = None
        self._forgotten = 0
        self._generation: int | None = None  # of whoever writes to it
        self._boots: dict[str, _Boots] = {}  # of the actors heard in this session
        self._tidied_at = 0.0
        self.on_commit: Callable[[], None] = lambda: None
        self.times = stopwatch.Stopwatch("ledger")
        self._others: sqlite3.Connection | None = None  # to look something up while a commit goes on

    def begin_session(self, epochs: Iterable[int]) -> frozenset[int]:
        """Notes epochs of the run, that of the session that begins among them; returns all of the run's.

        To be called before anything else is written, or read: until then an earlier session may write. What it returns
        is durable: a session that is killed at any time later is known to those that follow.
        """
        with _named(self._path, "written"), self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO sessions VALUES (?)", [(epoch,) for epoch in epochs])
            # Not the number of sessions: a worker that is started again begins with the epochs of the one before
            generation = self._newest_generation() + 1
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_GENERATION, str(generation)))
            self.last_id = self._began_after = max(*self._db.execute(_LAST_ID).fetchone())
            found = frozenset(epoch for (epoch,) in self._db.execute("SELECT epoch FROM sessions"))
        self._generation = generation
        return found

    def marks(self) -> dict[tuple[str, int], Mark]:
        """Returns the last message of each boot, by actor and boot."""
        with _named(self._path):
            rows = self._db.execute("SELECT actor, boot, seq, steps FROM marks")
            return {(actor, boot): Mark(seq, steps) for actor, boot, seq, steps in rows}

    def conflicts(self) -> dict[tuple[str, int], int]:
        """Returns the first message of each boot that came with two contents, by actor and boot."""
        with _named(self._path):
            rows = self._db.execute("SELECT actor, boot, seq FROM conflicts")
            return {(actor, boot): seq for actor, boot, seq in rows}

    def note_conflict(self, actor_id: str, boot: int, seq: int) -> None:
        """Notes that a message came with another content than it has here. Soon, in the ledger's thread."""
        values = (actor_id, boot, seq)

        def write() -> None:
            with contextlib.suppress(sqlite3.Error, Superseded), self._transaction():  # the next commit says so
                self._db.execute(
                    "INSERT INTO conflicts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET seq = min(seq, excluded.seq)",
                    values,
                )

        self._worker.submit(write)

    def digest(self, actor_id: str, boot: int, seq: int) -> bytes | None:
        """Returns the digest of a message that is committed; None if there is none, or it is older than digests."""
        with _named(self._path):
            if self._others is None:
                self._others = _reader(self._path)
            row = self._others.execute(
                "SELECT digest FROM messages WHERE actor = ? AND boot = ? AND seq = ?", (actor_id, boot, seq)
            ).fetchone()
        return row[0] if row else None

    def totals(self) -> tuple[int, int]:
        """Returns the steps that reached replay over the whole run, and the episodes that ended in them."""
        with _named(self._path):
            steps, episodes = self._db.execute("SELECT steps, episodes FROM totals").fetchone()
        return steps, episodes

    def newest(self, steps: int) -> Iterator[tuple[int, bytes]]:
        """Yields ids and bodies of the newest messages that hold that many steps, or of all; oldest first."""
        with _named(self._path):
            first = _first_of_newest(self._db, steps, QUARANTINED, TOO_OLD)
            yield from self._db.execute(
                "SELECT id, body FROM payloads JOIN messages USING (id) WHERE id >= ? AND verdict = ? ORDER BY id",
                (first, OK),
            )

    def quarantine(self, ids: Sequence[int]) -> list[Source]:
        """Keeps messages out of replay for good; returns what they were.

        Raises:
            StorageError, RunError: As for `wait`.
        """
        return self._on_worker(lambda: self._quarantine(ids))

    def _quarantine(self, ids: Sequence[int]) -> list[Source]:
        which = f"id IN ({', '.join('?' * len(ids))})"
        self._db.execute(f"UPDATE messages SET verdict = ? WHERE {which}", (QUARANTINED, *ids))
        rows = self._db.execute(f"SELECT actor, boot, seq, steps FROM messages WHERE {which} ORDER BY id", tuple(ids))
        return [Source(*row) for row in rows]

    def hold(self, actor_id: str, since: tuple[int, int] | None) -> list[tuple[int, int]]:
        """Holds what an actor sent since a message of it (boot, seq), or in this session; returns ids and steps.

        Raises:
            StorageError, RunError: As for `wait`.
        """

        def write() -> list[tuple[int, int]]:
            first = self._began_after
            if since is not None:
                row = self._db.execute(
                    "SELECT id FROM messages WHERE actor = ? AND boot = ? AND seq = ?", (actor_id, *since)
                ).fetchone()
                first = max(first, row[0] if row else 0)
            key = actor_id, OK, first
            which = "actor = ? AND verdict = ? AND id > ?"
            found = self._db.execute(f"SELECT id, steps FROM messages WHERE {which} ORDER BY id", key).fetchall()
            self._db.execute(f"UPDATE messages SET verdict = ? WHERE {which}", (RECALLED, *key))
            return found

        return self._on_worker(write)

    def actors_held(self) -> set[str]:
        """Returns the actors of which something is held and not forgotten."""
        query = "SELECT DISTINCT actor FROM messages JOIN payloads USING (id) WHERE verdict IN (?, ?)"
        with _named(self._path):
            return {actor for (actor,) in self._db.execute(query, (HELD, RECALLED))}

    def held(self, actor_id: str) -> list[tuple[int, int]]:
        """Returns ids and steps of what is held of an actor and not forgotten, the oldest first."""
        with _named(self._path):
            return self._db.execute(f"SELECT id, steps {_OF_HELD}", (actor_id, HELD, RECALLED)).fetchall()

    def bodies_held(self, actor_id: str) -> list[tuple[int, str, bytes]]:
        """Returns ids, verdicts and bodies of what is held of an actor and not forgotten, the oldest first."""
        query = f"SELECT id, verdict, body {_OF_HELD}"
        return self._on_worker(lambda: self._db.execute(query, (actor_id, HELD, RECALLED)).fetchall())

    def decide(self, actor_id: str, *, keep: bool) -> None:
        """Lets what is held of an actor into replay, now and after a restart, or keeps it out for good.

        What was held for so long that its payload was forgotten stays out.

        Raises:
            StorageError, RunError: As for `wait`.
        """
        verdicts = {HELD: OK, RECALLED: OK} if keep else {HELD: DISCARDED, RECALLED: QUARANTINED}
        rows = [(verdict, actor_id, before) for before, verdict in verdicts.items()]

        def write() -> None:
            db = self._db
            if keep:
                gone = "UPDATE messages SET verdict = ? WHERE actor = ? AND verdict = ?"
                gone += " AND id NOT IN (SELECT id FROM payloads)"
                db.execute(gone, (DISCARDED, actor_id, HELD))
                reached = "SELECT coalesce(sum(steps), 0), coalesce(sum(ended), 0) FROM messages"
                brought = db.execute(f"{reached} WHERE actor = ? AND verdict = ?", (actor_id, HELD)).fetchone()
                db.execute("UPDATE totals SET steps = steps + ?, episodes = episodes + ?", brought)
            db.executemany("UPDATE messages SET verdict = ? WHERE actor = ? AND verdict = ?", rows)

        self._on_worker(write)

    def forget(self, ids: Sequence[int]) -> None:
        """Forgets payloads that replay lacks; where all are kept for ever, lets those held never be released.

        Raises:
            StorageError, RunError: As for `wait`.
        """
        rows = [(id_,) for id_ in ids]
        change = "DELETE FROM payloads WHERE id = ?"
        if self._keep:
            change = f"UPDATE messages SET verdict = '{DISCARDED}' WHERE id = ? AND verdict = '{HELD}'"

        self._on_worker(lambda: self._db.executemany(change, rows))

    def _on_worker(self, job: Callable[[], _T]) -> _T:
        """Does a job in one transaction, in the ledger's thread."""

        def work() -> _T:
            with self._transaction():
                return job()

        with _named(self._path, "written"):
            return self._worker.submit(work).result()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commits what is done inside, all of it or nothing.

        Raises:
            Superseded: A later session, or worker, has begun to write here.
        """
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if self._generation not in (None, self._newest_generation()):
                raise Superseded(
                    "another learner goes on with this run, and this one ends",
                    where=str(self._path),
                    todo="nothing, if this machine stood still, or was cut off: a standby has taken its place",
                )
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _newest_generation(self) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (_GENERATION,)).fetchone()
        return int(row[0]) if row else 0

    @property
    def busy(self) -> bool:
        """Returns whether a commit is under way."""
        return self._commit is not None and not self._commit.done()

    def begin(self, entries: Sequence[Entry], forget_before: int) -> range:
        """Begins to commit entries; returns their ids. The commit before must have been awaited.

        Args:
            entries: In order of arrival.
            forget_before: Payloads of smaller ids are not needed any longer.
        """
        assert self._commit is None
        ids = range(self.last_id + 1, self.last_id + 1 + len(entries))
        self.last_id += len(entries)
        self._commit = self._worker.submit(self._write, ids, entries, forget_before)
        self._commit.add_done_callback(lambda _: self.on_commit())
        if time.monotonic() - self._tidied_at > _TIDY_S:
            self._tidied_at = time.monotonic()
            self._worker.submit(self._tidy)
        return ids

    def wait(self) -> None:
        """Waits until what was begun is durable.

        Raises:
            StorageError: The disk does not take it.
            Superseded: A later session goes on with the run.
            RunError: It cannot be written for another reason.
        """
        if self._commit is None:
            return
        try:
            self._commit.result()
        except sqlite3.Error as error:  # and again, whoever asks: what was not written must never be receipted
            raise _failed(self._path, error, "written") from error
        self._commit = None

    def close(self) -> None:
        """Waits for what is under way, and closes the file."""
        self._worker.shutdown()
        if self._others is not None:
            self._others.close()
        self._db.close()

    def _write(self, ids: range, entries: Sequence[Entry], forget_before: int) -> None:
        with self.times.time("ledger", len(entries)):
            self._transact(ids, entries, forget_before)

    def _transact(self, ids: range, entries: Sequence[Entry], forget_before: int) -> None:
        now = time.time()
        rows = [
            (id_, e.actor_id, e.boot, e.seq, e.step, e.steps, e.ended, e.size_bytes, now, e.verdict)
            + (e.digest if e.body is None else digest(e.body),)
            for id_, e in zip(ids, entries, strict=True)
        ]
        bodies = [(id_, e.body) for id_, e in zip(ids, entries, strict=True) if e.body is not None]
        try:
            with self._transaction():
                _insert(self._db, "messages", rows)
                _insert(self._db, "payloads", bodies)
                if not self._keep and forget_before > self._forgotten:
                    self._db.execute("DELETE FROM payloads WHERE id < ?", (forget_before,))
                self._mark(ids, entries)
                if not self._keep:
                    self._prune(len(entries))
        except BaseException:
            self._boots.clear()
            raise
        self._forgotten = max(self._forgotten, forget_before)

    def _mark(self, ids: range, entries: Sequence[Entry]) -> None:
        """Moves the marks, and forgets those of boots that cannot come again."""
        newest = {(entry.actor_id, entry.boot): (entry, id_) for id_, entry in zip(ids, entries, strict=True)}
        reached = [entry for entry in entries if entry.verdict == OK]
        received = [entry for entry in entries if entry.verdict in _RECEIVED]
        taken = {(entry.actor_id, entry.boot) for entry in received}
        self._db.executemany(
            "INSERT INTO marks VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET seq = excluded.seq,"
            " steps = excluded.steps, last_id = excluded.last_id, taken = max(taken, excluded.taken)",
            [(*key, e.seq, e.step + e.steps, id_, key in taken) for key, (e, id_) in newest.items()],
        )
        self._db.execute(
            "UPDATE totals SET steps = steps + ?, episodes = episodes + ?, refused = refused + ?",
            (sum(e.steps for e in reached), sum(e.ended for e in reached), len(entries) - len(received)),
        )
        for actor_id, boot in newest:
            boots = self._boots.get(actor_id)
            if boots is None:
                query = "SELECT boot, taken FROM marks WHERE actor = ? ORDER BY last_id"
                boots = self._boots[actor_id] = _Boots(self._db.execute(query, (actor_id,)))
            boots.hear(boot, is_taken=(actor_id, boot) in taken)
            for old in boots.pop_old(functools.partial(self._has_row, actor_id)):
                for table in ("marks", "conflicts", "messages"):
                    self._db.execute(f"DELETE FROM {table} WHERE actor = ? AND boot = ?", (actor_id, old))

    def _has_row(self, actor_id: str, boot: int) -> bool:
        """Returns whether a message of a boot that was taken has its row still."""
        verdicts = ", ".join("?" * len(_RECEIVED))
        query = f"SELECT 1 FROM messages WHERE actor = ? AND boot = ? AND verdict IN ({verdicts}) LIMIT 1"
        return self._db.execute(query, (actor_id, boot, *_RECEIVED)).fetchone() is not None

    def _prune(self, brought: int) -> None:
        """Deletes rows of messages beyond those to keep; the oldest first, and never many at once."""
        db, (times, more) = self._db, _PRUNED
        (held,) = db.execute("SELECT min(id) FROM payloads").fetchone()
        (first,) = db.execute("SELECT min(id) FROM messages").fetchone()
        end = min(self.last_id - ROWS_KEPT + 1, self.last_id if held is None else held)
        if first is not None and first < end:
            db.execute("DELETE FROM messages WHERE id < ?", (min(end, first + times * brought + more),))

    def _tidy(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # it stays in the log, which is as good, until the next time
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


def _make(database: sqlite3.Connection, about: Mapping[str, str], before: tuple[int, int]) -> None:
    values = {**about, "id": secrets.token_hex(16), "schema": _SCHEMA_VERSION}
    database.executescript(f"BEGIN; {_TABLES} {_SINCE_2} {_SINCE_3}")
    database.executemany("INSERT INTO meta VALUES (?, ?)", values.items())
    database.execute("INSERT INTO totals VALUES (?, ?, 0)", before)
    database.execute("COMMIT")


def _check(database: sqlite3.Connection, path: Path) -> None:
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise _broken(path, found)
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        raise _broken(path, "it has no tables")
    row = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row and row[0] in _UPGRADES:
        _log.info("bringing the ledger of an earlier release up to date; with millions of messages that takes a minute")
        database.executescript(f"BEGIN; {_UPGRADES[row[0]]} COMMIT;")
    elif row != (_SCHEMA_VERSION,):  # sound for all that we know: whoever wrote it can go on
        raise errors.RunError(
            f"the ledger's schema is {row and row[0]}, and this release of actorq-fleet has {_SCHEMA_VERSION}",
            where=str(path),
            todo="go on with the release that wrote it, or begin a new run",
        )


def _insert(db: sqlite3.Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    at = 0
    for together in _TOGETHER:
        while len(rows) - at >= together:
            one = f"({', '.join('?' * len(rows[at]))})"
            values = itertools.chain.from_iterable(rows[at : at + together])
            db.execute(f"INSERT INTO {table} VALUES {', '.join([one] * together)}", tuple(values))
            at += together


def digest(body: bytes | memoryview) -> bytes:
    """Returns a digest that tells two messages of one number apart.

    What its actor still holds, `oldest`, differs when it is sent again, and is left out. A checksum is enough: it takes
    8 us for 27 KB, a cryptographic hash 18 to 35. It finds copied cards, and no forger, for whoever has an actor's key
    can send what they like at once.
    """
    start = 8 + int.from_bytes(body[:8], "little")
    header = _OLDEST.sub(b"", bytes(body[8:start]), count=1).rstrip()
    return zlib.crc32(body[start:], zlib.crc32(header)).to_bytes(4, "little")


def about(path: Path) -> dict[str, str]:
    """Returns what a ledger says of itself; it raises as `bodies` does."""
    with contextlib.closing(_reader(path)) as db, _named(path):
        return dict(db.execute("SELECT key, value FROM meta"))


def bodies(path: Path, newest_steps: int = 1 << 62) -> Iterator[tuple[str, bytes]]:
    """Yields actors and encoded messages that a ledger still holds, in order of arrival; a learner may go on meanwhile.

    Args:
        path: Of the file.
        newest_steps: Only the newest messages that hold so many steps.

    Raises:
        RunError: There is no ledger, or it cannot be read.
    """
    with contextlib.closing(_reader(path)) as db, _named(path):
        yield from db.execute(
            "SELECT actor, body FROM payloads JOIN messages USING (id) "
            "WHERE id >= ? AND verdict NOT IN (?, ?, ?) ORDER BY id",
            (_first_of_newest(db, newest_steps), HELD, RECALLED, DISCARDED),
        )


def _first_of_newest(db: sqlite3.Connection, steps: int, *without: str) -> int:
    """Returns the id from which on the messages that are still there have so many steps, if they have.

    Args:
        db: Open.
        steps: So many.
        without: Verdicts on messages that do not count, beside those on what is held.
    """
    without = HELD, RECALLED, DISCARDED, *without
    first, left = 1 << 62, steps
    rows = db.execute(
        "SELECT id, steps FROM messages JOIN payloads USING (id) "
        f"WHERE verdict NOT IN ({', '.join('?' * len(without))}) ORDER BY id DESC",
        without,
    )
    while left > 0 and (row := rows.fetchone()) is not None:
        first, left = row[0], left - row[1]
    rows.close()
    return first


def _reader(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise errors.RunError("there is no ledger", where=str(path), todo="name a run directory, as in runs/")
    with _named(path):
        return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)


def resume(path: Path, *, keep: bool, before: tuple[int, int], about: Mapping[str, str]) -> Ledger:
    """Opens the ledger of a run that goes on; makes a new one, with a new id, where it is lost or broken.

    Args:
        path: Of the file.
        keep: Whether payloads stay for ever.
        before: Steps and episodes by the run's checkpoint, for a new one.
        about: As for `Ledger.open`.

    Raises:
        RunError: It cannot be opened now, and nothing says that it is broken.
    """
    if path.exists():
        try:
            return Ledger.open(path, keep=keep)
        except Broken as error:
            aside = path.with_name(f"{path.name}.broken-{time.strftime('%Y%m%d-%H%M%S')}")
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
            _log.warning("%s; it is now %s", error.what, aside.name)
    else:
        _log.warning("the ledger of the run is lost (%s)", path)
    _log.warning("a new ledger begins; actors send again what they still hold, and replay fills anew")
    return Ledger.open(path, keep=keep, before=before, about=about)


_OPENED = "opened"
_GENERATION = "generation"


@contextlib.contextmanager
def _named(path: Path, what: str = "read") -> Iterator[None]:
    """Raises SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise _failed(path, error, what) from error


def _failed(path: Path, error: sqlite3.Error, what: str) -> errors.ActorqError:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
        return _broken(path, str(error))
    what = f"the ledger cannot be {what}: {error}"
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_DISK:
        todo = "it is as it was: make room on its disk, or see that you may write there; then go on with --resume"
        return storage.at(what, str(path), todo=todo)
    return errors.RunError(what, where=str(path), todo="go on with --resume: actors hold what has no receipt yet")


def _broken(path: Path, why: str) -> Broken:
    return Broken(f"the ledger is broken: {why}", where=str(path), todo="restore it, or begin a new run")
