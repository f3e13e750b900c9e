"""Counts and seconds of stages, and their sums."""

from __future__ import annotations

import threading

import pytest

from broker.program import stopwatch


def test_a_block_counts_with_what_it_took_even_if_it_raises() -> None:
    ticks = iter([10.0, 12.5, 20.0, 20.25])
    watch = stopwatch.Stopwatch("send", "seal", clock=lambda: next(ticks))
    with watch.time("send", 3):
        pass
    with pytest.raises(OSError, match="gone"), watch.time("send"):
        raise OSError("gone")
    assert watch.totals() == {"send": (4, 2.75), "seal": (0, 0.0)}
    assert watch.seconds("send") == 2.75


def test_a_stage_that_was_not_named_is_a_fault() -> None:
    with pytest.raises(KeyError, match="sned"):
        stopwatch.Stopwatch("send").add("sned", 1.0)


def test_sums_are_by_stage() -> None:
    one, other = stopwatch.Stopwatch("a", "b"), stopwatch.Stopwatch("b")
    one.add("a", 1.0)
    one.add("b", 2.0, 5)
    other.add("b", 3.0)
    assert stopwatch.added([one.totals(), other.totals()]) == {"a": (1, 1.0), "b": (6, 5.0)}


def test_threads_that_share_one_lose_nothing() -> None:
    watch, each = stopwatch.Stopwatch("sign"), 20_000

    def work() -> None:
        for _ in range(each):
            watch.add("sign", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.totals() == {"sign": (4 * each, 4.0 * each)}
