"""A queue that knows how much waits in it."""

from __future__ import annotations

import pytest

from broker.program import bounded_queue


def made(items: int = 3, size_bytes: int = 100) -> bounded_queue.BoundedQueue[str]:
    return bounded_queue.BoundedQueue(bounded_queue.Limit(items, size_bytes))


def test_items_come_out_in_their_order_and_none_from_an_empty_queue() -> None:
    queue = made()
    for item in "abc":
        queue.put(item, 10)
    assert (len(queue), queue.size_bytes) == (3, 30)
    assert [queue.get() for _ in range(4)] == ["a", "b", "c", None]
    assert (len(queue), queue.size_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("sizes", "is_full", "is_over"),
    [([], False, False), ([1, 1], False, False), ([1, 1, 1], True, False), ([0] * 4, True, True)]
    + [([99], False, False), ([100], True, False), ([50, 51], True, True)],
)
def test_it_tells_when_it_is_full_in_number_or_in_bytes(sizes: list[int], is_full: bool, is_over: bool) -> None:
    queue = made()
    for size in sizes:
        queue.put("x", size)
    assert (queue.is_full, queue.is_over) == (is_full, is_over)
    while queue.get():
        pass
    assert not queue.is_full


def test_the_newest_on_a_subject_replaces_what_waits_and_goes_to_the_end() -> None:
    queue = made()
    queue.put("old", 70, "me")
    queue.put("other", 1, "you")
    queue.put("new", 5, "me")
    assert (len(queue), queue.size_bytes) == (2, 6)
    assert [queue.get(), queue.get()] == ["other", "new"]


def test_items_without_a_subject_replace_nothing_whatever_subjects_there_are() -> None:
    queue = made()
    queue.put("first", 1, 1)
    queue.put("second", 1)
    queue.put("third", 1)
    assert [queue.get() for _ in range(3)] == ["first", "second", "third"]
