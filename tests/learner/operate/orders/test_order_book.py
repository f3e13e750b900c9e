"""The book of orders: numbers that only grow, outcomes that stay, and what is forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract import errors, messages
from learner.operate.orders import order_book


@pytest.fixture
def book(tmp_path: Path) -> Iterator[order_book.OrderBook]:
    with contextlib.closing(order_book.OrderBook.open(tmp_path)) as made:
        yield made


def answer(number: int, outcome: str) -> messages.Answer:
    return messages.Answer(number, "pause", outcome, "words")


def test_numbers_grow_and_never_fall_behind_the_time_of_day(book: order_book.OrderBook, tmp_path: Path) -> None:
    first = book.add(["a", "b"], "pause", {}, 1000.0, 60.0)
    assert first == {"a": 1_000_000, "b": 1_000_001}
    with contextlib.closing(order_book.OrderBook.open(tmp_path)) as other:
        assert other.add(["a"], "resume", {}, 1000.0, 60.0) == {"a": 1_000_002}, "another command at the same time"
    assert book.add(["a"], "pause", {}, 900.0, 60.0) == {"a": 1_000_003}, "a clock that was put back"
    assert [one.number for one in book.open_orders("a")] == [1_000_000, 1_000_002, 1_000_003]


def test_an_outcome_stays(book: order_book.OrderBook) -> None:
    number = book.add(["a"], "set", {"seed": "3"}, 1000.0, 60.0)["a"]
    book.note([("b", answer(number, "done"))])
    assert book.entry(number).outcome == "waiting", "another actor cannot answer for it"
    book.note([("a", answer(number, "taken"))])
    book.withdraw([number])
    assert book.entry(number).outcome == "taken", "too late"
    book.note([("a", answer(number, "undone"))])
    book.note([("a", answer(number, "done"))])
    assert (book.entry(number).outcome, book.entry(number).options) == ("undone", {"seed": "3"})
    assert book.open_orders("a") == []


def test_what_nobody_answered_expires(book: order_book.OrderBook) -> None:
    late = book.add(["a"], "pause", {}, 1000.0, 60.0)["a"]
    kept = book.add(["a"], "pause", {}, 1000.0, 600.0)["a"]
    assert book.expire(1061.0) == ["a"]
    assert book.entry(late).outcome == "expired"
    assert [one.number for one in book.open_orders("a")] == [kept]
    assert book.expire(1061.0) == []
    book.expire(1000.0 + 40 * 86_400.0)
    assert book.last("a", 10) == []


def test_only_so_many_wait(book: order_book.OrderBook) -> None:
    for _ in range(messages.MAX_ORDERS):
        book.add(["a"], "pause", {}, 1000.0, 60.0)
    with pytest.raises(errors.ConfigError, match="64 orders wait for a"):
        book.add(["b", "a"], "pause", {}, 1000.0, 60.0)
    assert book.open_orders("b") == [], "all or nothing"


def test_labels(book: order_book.OrderBook) -> None:
    book.label(["a", "b"], {"room": "lab", "row": "1"})
    book.label(["a"], {"room": "", "row": "2"})
    assert book.labels() == {"a": {"row": "2"}, "b": {"room": "lab", "row": "1"}}


def test_a_book_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "orders.sqlite").write_bytes(b"no database, but long enough to be taken for one" * 30)
    with pytest.raises(errors.StorageError, match="the book of orders cannot be used"):
        order_book.OrderBook.open(tmp_path)
