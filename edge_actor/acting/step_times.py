"""Where the time of steps goes: environment, observation to action, and the rest, which explores and records.

A step of CartPole takes some 6 us and a look at the clock 0.06, so that only one row in 64 is timed, drawn at random
from each 64 so that no period of the environment can fall in with it; of a short burst one row at least. All else is
exact: what a burst and its loop took, and each reset of a single environment, for resets are few and may be long. What
the loop took is divided by the shares that the timed rows had. So the three add up to what acting took, whatever was
drawn; and what timing a row costs is measured and taken off.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from broker.program import stopwatch

PERIOD = 64
_ENOUGH = 16  # timed rows, whose shares then divide what the loops took
_LONG_S = 0.1  # ... or fewer, where steps are slow
clock = time.perf_counter
Call = Callable[[Any], Any]


class Overhead(NamedTuple):
    """What timing adds: seconds inside each call that is timed, outside of it, and to a row in all besides."""

    inside_s: float = 0.0
    outside_s: float = 0.0
    row_s: float = 0.0


class StepTimes:
    """Times one row in 64, and divides what bursts took. For one thread; `times` may be read by others.

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
        self._asked, self._stepped = Timed(), Timed()
        self._rows, self._rows_s = 0, 0.0  # timed in this burst, less those that only reset
        self._looped_s = 0.0  # the loop of this burst
        self._shares = [0.0, 0.0, 0.0]  # of rows timed lately, as if all had been: environment, action, record
        self._samples = self._undivided = 0  # rows that were timed lately; that stepped lately, of which
        self._known = self._known_acts = 0.0  # in bursts with a timed one, and asked the policy
        self._undivided_s = 0.0

    def plan(self, rows: int) -> list[tuple[bool, int]]:
        """Returns how to go through so many rows: in turn some that are not timed, and one that is."""
        plan: list[tuple[bool, int]] = []
        passed = 0
        for first in range(0, max(1, rows - PERIOD + 1), PERIOD):
            at = first + int(self._draw() * min(PERIOD, rows))
            plan += (False, at - passed), (True, 1)
            passed = at + 1
        plan.append((False, rows - passed))
        return plan

    def watched(self, act: Call, step: Call) -> tuple[Call, Call]:
        """Returns functions that do the same, and time it."""
        return self._asked.watch(act), self._stepped.watch(step)

    def note_row(self, seconds: float) -> None:
        """Takes note of a row that was timed as a whole."""
        if self._stepped.calls > self._rows:  # else it only reset, which is timed by itself
            self._rows += 1
            self._rows_s += seconds

    def note_loop(self, rows: int, seconds: float, resets: Sequence[float] = ()) -> None:
        """Takes note of a loop over rows.

        Args:
            rows: Done, those that only reset among them.
            seconds: In all.
            resets: Seconds of each reset that was timed by itself.
        """
        self._looped_s += seconds
        asked, stepped, cost = self._asked, self._stepped, self._overhead()
        if resets:
            self.times.add("environment", sum(resets), len(resets))
        stepping = rows - len(resets)
        self._undivided += stepping
        self._undivided_s += max(0.0, seconds - sum(resets))
        if self._rows:
            weight = stepping / self._rows
            calls = asked.calls + stepped.calls
            rest_s = self._rows_s - asked.seconds - stepped.seconds
            self._shares[0] += weight * max(0.0, stepped.seconds - stepped.calls * cost.inside_s)
            self._shares[1] += weight * max(0.0, asked.seconds - asked.calls * cost.inside_s)
            self._shares[2] += weight * max(0.0, rest_s - calls * cost.outside_s - self._rows * cost.row_s)
            self._known += stepping
            self._known_acts += weight * asked.calls
            self._samples += self._rows
            if self._samples >= _ENOUGH or self._undivided_s > _LONG_S:
                self._divide()
        self._asked.reset()
        self._stepped.reset()
        self._rows, self._rows_s = 0, 0.0

    def note_burst(self, seconds: float) -> None:
        """Takes note of a burst as a whole: what its loop did not take went into exploration and records."""
        self.times.add("record", max(0.0, seconds - self._looped_s), 0)
        self._looped_s = 0.0

    def vitals(self) -> dict[str, Any]:
        """Returns where the time went, by fields of `messages.Vitals`."""
        return {"stages": self.times.totals()}

    def _divide(self) -> None:
        whole = sum(self._shares) or 1.0
        acts = round(self._undivided * self._known_acts / self._known)
        counts = self._undivided, acts, self._undivided
        for stage, count, share in zip(self.times.totals(), counts, self._shares, strict=True):
            self.times.add(stage, self._undivided_s * share / whole, count)
        self._shares = [0.0, 0.0, 0.0]
        self._samples = self._undivided = 0
        self._known = self._known_acts = 0.0
        self._undivided_s = 0.0


class Timed:
    """What calls of one function took since `reset`."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins anew."""
        self.calls, self.seconds = 0, 0.0

    def watch(self, function: Call) -> Call:
        """Returns a function that does the same, and times it; a call that raises is left out."""

        def call(argument: Any) -> Any:
            began = clock()
            answer = function(argument)
            self.seconds += clock() - began
            self.calls += 1
            return answer

        return call


@functools.cache
def measured_overhead() -> Overhead:
    """Returns what timing costs on this machine: the least of several tries, which nothing else disturbed."""
    tries, calls = 8, 32
    inside_s = whole_s = bare_s = row_s = plain_s = 1.0
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
        row_s = min(row_s, spent)
    inside_s = max(0.0, inside_s - bare_s)
    outside_s = max(0.0, whole_s - bare_s - inside_s)
    return Overhead(inside_s / calls, outside_s / calls, max(0.0, row_s - plain_s) / calls)


def _nothing(argument: Any) -> None:
    """Takes the least time that a call takes."""
