"""The time of steps, divided: environment, observation to action, and the rest, which explores and records.

A step of CartPole takes some 6 us and a look at the clock 0.06, so that one row in 128 is timed: 16 in a row, since
the first pays for what the processor has forgotten of it. How many lie before the next 16 is drawn at random, so
that no period of the environment can fall in with them, and goes on from burst to burst. At first more are timed, one
in 2 and ever fewer for some 130,000 rows, for a run may be over by then. All else is exact: what a burst and its loop
took, and each reset of a single environment, for resets are few and may be long. What a loop took is divided by the
shares that the newest timed rows had, at the end of a burst, and 128 rows or 50 ms late at most, sooner at first, for
the next burst may be long in coming. So the three add up to what acting took, whatever was drawn; and what timing costs
is measured and taken off.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from broker.program import stopwatch

PERIOD = 128  # rows, of which one is timed
TOGETHER = 16
_ENOUGH = 64  # timed rows that shares are taken of: what was before them counts for less and less
_LATE_S = 0.05  # of rows that are not divided yet: to divide after each burst of 2 ms took 1 % of it
_NEWEST = 512  # timed calls of the policy that percentiles are taken of
_SLOW_S = 2e-4  # rows that take so long are all timed, which is 1 % of them
clock = time.perf_counter
Call = Callable[[Any], Any]


class Overhead(NamedTuple):
    """The cost of timing: seconds inside each call that is timed, outside of it, and for each piece besides."""

    inside_s: float = 0.0
    outside_s: float = 0.0
    piece_s: float = 0.0


class StepTimes:
    """Times one row in 128, and divides what bursts took. For one thread; `times` may be read by others.

    Args:
        overhead: Returns what timing costs; None measures it here.
        rng: Draws the rows, by numbers in [0, 1).

    Attributes:
        times: The stages `environment`, `observation_to_action` and `record`. They are counted by calls: one steps all
            environments, a reset is one, and a step that explores asks no policy.
    """

    def __init__(self, overhead: Callable[[], Overhead] | None = None, rng: Callable[[], float] | None = None) -> None:
        self.times = stopwatch.Stopwatch("environment", "observation_to_action", "record")
        self._overhead, self._draw = overhead or measured_overhead, rng or random.Random(0).random
        self._left, self._due = 0, TOGETHER  # rows until some are timed; rows to be timed now
        self._period = 1  # of whose rows one is timed; one more each time, up to PERIOD
        self._is_slow = False  # so that looking at the clock costs nothing
        self._asked, self._stepped = Timed(), Timed()
        self._newest: collections.deque[float] = collections.deque(maxlen=_NEWEST)
        self._pieces, self._timed_s = 0, 0.0  # of timed rows, resets apart
        self._shares = Shares()
        self._rows, self._rows_s, self._asks = 0, 0.0, 0.0  # of loops, not divided yet; resets apart
        self._looped_s = self._rest_s = 0.0  # the loop of this burst; what bursts took besides, not told yet

    def plan(self, rows: int) -> Sequence[tuple[bool, int]]:
        """Returns how to go through so many rows: in turn some that are not timed, and some that are."""
        if self._left > rows:
            self._left -= rows
            return ((False, rows),)
        plan = []
        while rows:
            some = min(self._due or self._left, rows)
            plan.append((self._due > 0, some))
            rows -= some
            if not self._due:
                self._left -= some
            elif some < self._due:
                self._due -= some
                break
            else:
                self._left = 0 if self._is_slow else self._gap()
            self._due = 0 if self._left else TOGETHER
        return plan or ((False, 0),)

    def _gap(self) -> int:
        self._period = min(PERIOD, self._period + 1)
        return int(self._draw() * (2 * TOGETHER * (self._period - 1) + 1))  # any number as likely

    def watched(self, act: Call, step: Call) -> tuple[Call, Call]:
        """Returns functions that do the same, and time it."""
        return self._asked.watch(act), self._stepped.watch(step)

    def note_piece(self, seconds: float) -> None:
        """Takes note of what rows took that were timed, resets apart."""
        self._pieces += 1
        self._timed_s += seconds

    def note_loop(self, rows: int, seconds: float, resets: Sequence[float] = ()) -> None:
        """Takes note of a loop over rows.

        Args:
            rows: Done, those that only reset among them.
            seconds: In all.
            resets: Seconds of each reset that was timed by itself.
        """
        self._looped_s += seconds
        if resets:
            self.times.add("environment", sum(resets), len(resets))
            rows -= len(resets)
            seconds -= sum(resets)
        self._rows += rows
        self._rows_s += seconds

    def note_burst(self, seconds: float) -> None:
        """Takes note of a burst: what its loop did not take went into exploration and records."""
        self._rest_s += max(0.0, seconds - self._looped_s)
        self._looped_s = 0.0
        if self._shares.rows and PERIOD * (self._rows_s + self._rest_s) < _LATE_S * self._period:
            return
        if self._stepped.taken:
            self._learn()
            self._divide()
        elif self._rows >= self._period and self._shares.rows:
            self._divide()

    def vitals(self) -> dict[str, Any]:
        """Returns percentiles of observation to action, by fields of `messages.Vitals`; none before it was timed."""
        timed = sorted(self._newest)  # takes the whole deque at once: this is another thread
        if not timed:
            return {}
        p50, p99 = (1e6 * max(0.0, timed[int(share * (len(timed) - 1))]) for share in (0.5, 0.99))
        return {"latency_p50_us": round(p50, 2), "latency_p99_us": round(p99, 2)}

    def _learn(self) -> None:
        asked, stepped, cost = self._asked, self._stepped, self._overhead()
        outside_s = (asked.calls + stepped.calls) * cost.outside_s + self._pieces * cost.piece_s
        self._newest.extend(seconds - cost.inside_s for seconds in asked.taken)
        newest = Shares(
            stepped.calls,
            asked.calls,
            max(0.0, stepped.seconds - stepped.calls * cost.inside_s),
            max(0.0, asked.seconds - asked.calls * cost.inside_s),
            max(0.0, self._timed_s - stepped.seconds - asked.seconds - outside_s),  # a piece that raised is not in it
        )
        kept = max(0.0, 1.0 - stepped.calls / _ENOUGH)
        self._shares = Shares(*(kept * old + new for old, new in zip(self._shares, newest, strict=True)))
        asked.clear()
        stepped.clear()
        self._pieces, self._timed_s = 0, 0.0

    def _divide(self) -> None:
        timed, asked, environment, action, rest = self._shares
        one_s = self._rows_s / ((environment + action + rest) or 1.0)
        self._asks += self._rows * asked / timed
        asks = round(self._asks)
        self.times.add("environment", environment * one_s, self._rows)
        self.times.add("observation_to_action", action * one_s, asks)
        self.times.add("record", rest * one_s + self._rest_s, self._rows)
        self._rows, self._rows_s, self._rest_s = 0, 0.0, 0.0
        self._asks -= asks
        is_slow = environment + action + rest > _SLOW_S * timed
        if is_slow and not self._is_slow:
            self._left, self._due = 0, self._due or TOGETHER
        self._is_slow = is_slow


class Shares(NamedTuple):
    """The cost of timed rows: how many there were and how many of them asked the policy, and seconds by stage."""

    rows: float = 0.0
    asks: float = 0.0
    environment_s: float = 0.0
    action_s: float = 0.0
    rest_s: float = 0.0


class Timed:
    """Seconds of each call of one function since `clear`."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken: list[float] = []

    @property
    def calls(self) -> int:
        """The number of calls."""
        return len(self.taken)

    @property
    def seconds(self) -> float:
        """The seconds that they took in all."""
        return sum(self.taken)

    def clear(self) -> None:
        """Begins anew."""
        self.taken.clear()

    def watch(self, function: Call) -> Call:
        """Returns a function that does the same, and times it; a call that raises is left out."""
        note, now = self.taken.append, clock

        def call(argument: Any) -> Any:
            began = now()
            answer = function(argument)
            note(now() - began)
            return answer

        return call


@functools.cache
def measured_overhead() -> Overhead:
    """Returns what timing costs on this machine: the least of several tries, which nothing else disturbed."""
    tries, calls = 8, 32
    inside_s = whole_s = bare_s = piece_s = plain_s = 1.0
    for _ in range(tries):
        timed = Timed()
        call = timed.watch(_nothing)
        began = clock()
        for _ in range(calls):
            call(None)
        whole_s, inside_s = min(whole_s, clock() - began), min(inside_s, timed.seconds)
        began = clock()
        for _ in range(calls):
            _nothing(None)
        bare_s = min(bare_s, clock() - began)
        began = clock()
        for _ in itertools.islice(itertools.repeat(None), calls):
            pass
        plain_s = min(plain_s, clock() - began)
        rows, spent = itertools.repeat(None), 0.0
        for _ in range(calls):
            began = clock()
            for _ in itertools.islice(rows, 1):
                pass
            spent += clock() - began
        piece_s = min(piece_s, spent)
    inside_s = max(0.0, inside_s - bare_s)
    outside_s = max(0.0, whole_s - bare_s - inside_s)
    return Overhead(inside_s / calls, outside_s / calls, max(0.0, piece_s - plain_s) / calls)


def _nothing(argument: Any) -> None:
    """Takes the least time that a call takes."""
