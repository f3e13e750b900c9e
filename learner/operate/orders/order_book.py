"""The orders of a fleet and what became of them, and labels of actors: `orders.sqlite` beside the fleet's keys.

Whoever may read that directory may give orders, and nobody else. Numbers grow with every order, and never fall behind
the time of day, so that those of a directory that was lost or put back are newer than what actors have taken.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from broker.contract import errors, messages
from broker.program import storage

WAITING, TAKEN, WITHDRAWN, EXPIRED = "waiting", "taken", "withdrawn", "expired"
OPEN = (WAITING, TAKEN)
"""Outcomes of orders that are still to be answered."""
_KEPT_S = 30 * 86_400.0
_TABLES = """
CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, actor TEXT, kind TEXT, options TEXT, issued_s REAL,
  expires_s REAL, outcome TEXT, text TEXT);
CREATE INDEX IF NOT EXISTS by_actor ON orders (actor, number);
CREATE TABLE IF NOT EXISTS labels (actor TEXT, key TEXT, value TEXT, PRIMARY KEY (actor, key));
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One order to one actor. Times are Unix times."""

    number: int
    actor: str
    kind: str
    options: dict[str, str]
    issued_s: float
    expires_s: float
    outcome: str
    text: str


class OrderBook:
    """Orders and labels of one fleet.

    Args:
        database: As `open` opens it.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    @classmethod
    def open(cls, directory: Path) -> OrderBook:
        """Opens the book in a fleet's directory; makes it at first use.

        Raises:
            StorageError: It cannot be read or written.
        """
        path = directory / "orders.sqlite"
        try:
            path.touch(0o600)
            database = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
            database.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise storage.at(f"the book of orders cannot be used: {error}", str(path)) from error
        return cls(database)

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def add(
        self, actors: Iterable[str], kind: str, options: Mapping[str, str], now_s: float, valid_s: float
    ) -> dict[str, int]:
        """Writes down an order to each of the actors; returns its number by actor.

        Raises:
            ConfigError: Too many orders wait for one of them.
        """
        numbers: dict[str, int] = {}
        with self._database as book:
            book.execute("BEGIN IMMEDIATE")
            (last,) = book.execute("SELECT COALESCE(MAX(number), 0) FROM orders").fetchone()
            number = max(last + 1, int(now_s * 1000))
            for actor in actors:
                if len(self.open_orders(actor)) >= messages.MAX_ORDERS:
                    raise errors.ConfigError(
                        f"{messages.MAX_ORDERS} orders wait for {actor} already",
                        todo="wait until it is back, or withdraw them: actorq-learner fleet withdraw",
                    )
                row = (number, actor, kind, json.dumps(dict(options)), now_s, now_s + valid_s, WAITING, "")
                book.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                numbers[actor] = number
                number += 1
        return numbers

    def note(self, answers: Iterable[tuple[str, messages.Answer]]) -> None:
        """Writes down what actors answered, each with its name; an order that has its outcome keeps it."""
        with self._database as book:
            book.executemany(
                f"UPDATE orders SET outcome = ?, text = ? WHERE number = ? AND actor = ? AND outcome IN {OPEN}",
                [(one.outcome, one.text, one.number, actor) for actor, one in answers],
            )

    def withdraw(self, numbers: Iterable[int]) -> None:
        """Takes orders back that nobody has answered."""
        with self._database as book:
            rows = [(WITHDRAWN, number, WAITING) for number in numbers]
            book.executemany("UPDATE orders SET outcome = ? WHERE number = ? AND outcome = ?", rows)

    def expire(self, now_s: float) -> list[str]:
        """Marks what has expired without an answer, and forgets what is long past; returns the actors concerned."""
        with self._database as book:
            late = f"outcome IN {OPEN} AND expires_s < ?"
            found = book.execute(f"SELECT DISTINCT actor FROM orders WHERE {late}", (now_s,))
            actors = [actor for (actor,) in found]
            book.execute(
                f"UPDATE orders SET outcome = ?, text = ? WHERE {late}",
                (EXPIRED, "the actor did not answer", now_s),
            )
            book.execute("DELETE FROM orders WHERE expires_s < ?", (now_s - _KEPT_S,))
        return actors

    def open_orders(self, actor: str = "") -> list[Entry]:
        """Returns what is to be answered, by number; of all actors, if none is named."""
        return self._entries(f"outcome IN {OPEN} AND (actor = ? OR ? = '') ORDER BY number", (actor, actor))

    def waiting(self, now_s: float) -> dict[str, messages.Orders]:
        """Returns what is to be answered and has not expired, as it goes out to each actor."""
        found: dict[str, list[messages.Instruction]] = {}
        for one in self.open_orders():
            if one.expires_s >= now_s:
                order = messages.Instruction(one.number, one.kind, one.expires_s, one.options)
                found.setdefault(one.actor, []).append(order)
        return {actor: messages.Orders(tuple(orders)) for actor, orders in found.items()}

    @property
    def version(self) -> int:
        """A number that is another one once somebody else has written; 1 at first."""
        (version,) = self._database.execute("PRAGMA data_version").fetchone()
        return int(version)

    def last(self, actor: str, count: int) -> list[Entry]:
        """Returns the last orders to an actor, the newest one first."""
        return self._entries("actor = ? ORDER BY number DESC LIMIT ?", (actor, count))

    def entry(self, number: int) -> Entry:
        """Returns one order."""
        return self._entries("number = ?", (number,))[0]

    def _entries(self, where: str, values: tuple[object, ...]) -> list[Entry]:
        rows = self._database.execute(f"SELECT * FROM orders WHERE {where}", values)
        return [Entry(row[0], row[1], row[2], json.loads(row[3]), *row[4:]) for row in rows]

    # -- labels -------------------------------------------------------------------------------------------------------

    def label(self, actors: Iterable[str], changes: Mapping[str, str]) -> None:
        """Gives actors labels; an empty value takes one away."""
        with self._database as book:
            for actor in actors:
                for key, value in changes.items():
                    book.execute("DELETE FROM labels WHERE actor = ? AND key = ?", (actor, key))
                    if value:
                        book.execute("INSERT INTO labels VALUES (?, ?, ?)", (actor, key, value))

    def labels(self) -> dict[str, dict[str, str]]:
        """Returns the labels of each actor that has some."""
        found: dict[str, dict[str, str]] = {}
        for actor, key, value in self._database.execute("SELECT actor, key, value FROM labels ORDER BY key"):
            found.setdefault(actor, {})[key] = value
        return found
