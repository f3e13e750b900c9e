"""What a whole fleet may say: messages a second of each kind, by what ingest and brokers are measured to take.

A fleet has MESSAGES_PER_S, as long as each of its actors then speaks often enough (WANTED_PERIOD_S). A larger one is
given more, as far as taking it in leaves the learner's loop to training (SPARE). Any fleet is given less once taking in
holds the loop up (NEEDED), or what arrives waits. Each broker has a limit of its own, by how long what the learner says
takes through it and back; as all actors have one period, the lowest one counts, times the brokers.

Each share is a band: below its lower end a limit rises, step by step, and beyond its upper end it falls to the lower
one, so that it rests in between. What was changed shows once every actor has been told and has spoken; as long as that
takes (SETTLE_PERIODS, at most SETTLE_MAX_S), nothing rises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

MESSAGES_PER_S = 80.0
"""Messages that all actors together send of each kind, and are sent: a learner that trains has better things to do."""
LEAST_PER_S = 10.0
MOST_PER_S = 2000.0
WANTED_PERIOD_S = 6.25
"""Seconds between two messages of an actor, up to which its fleet needs no more: 500 actors have MESSAGES_PER_S."""
WINDOW_S = 2.0
"""Seconds of one measurement; two in a row must say that a limit is exceeded."""
RISE = 1.25
SETTLE_PERIODS = 3
SETTLE_MAX_S = 30.0
BACKLOG_S = 1.0
"""What has arrived and would take so long to be taken in is too much."""
SLOW_S = 1.0
"""A broker that takes longer is given less."""
QUICK_S = 0.3
"""A broker that is no slower may be given more."""
EASY = 0.3
"""While taking in holds the loop up for no more than this share, MESSAGES_PER_S are no question of capacity."""
_FEW = 10
"""Fewer messages tell nothing: neither what one costs, nor that they wait."""


class Band(NamedTuple):
    """Shares of the learner's loop."""

    low: float
    high: float


SPARE = Band(0.1, 0.15)
"""Share for messages beyond MESSAGES_PER_S: a tenth of what the loop could take in if it did nothing else."""
NEEDED = Band(0.4, 0.5)
"""Share for those up to it."""


class Seen(NamedTuple):
    """What was measured since the time before.

    Attributes:
        actors: Those that work.
        seconds: Since then.
        messages: Of experience that were opened.
        taken: Messages of any kind that were taken from the inbox.
        busy_s: The loop's seconds for these and their receipts.
        waiting: Messages in the inbox.
        delays_s: Seconds from here through a broker and back, of each that is connected, by address.
    """

    actors: int
    seconds: float
    messages: int
    taken: int
    busy_s: float
    waiting: int
    delays_s: Mapping[str, float]


class Budget:
    """Says how many messages a second of each kind the fleet may send.

    Args:
        fixed: So many, whatever is measured; 0: as measured.

    Attributes:
        messages_per_s: In force now.
    """

    def __init__(self, fixed: float = 0.0) -> None:
        self._fixed = fixed
        self.messages_per_s = self._lowest = fixed or MESSAGES_PER_S
        self._ingest_per_s = MESSAGES_PER_S
        self._broker_per_s: dict[str, float] = {}
        self._slow: dict[str, int] = {}  # windows in a row, by broker
        self._cost_s = math.nan  # of one message of experience and all that comes with it
        self._busy = self._backlog_s = self._delay_s = 0.0
        self._strained = 0  # windows in a row
        self._settle_s = 0.0  # until what was changed shows

    @property
    def capacity_per_s(self) -> float:
        """The messages of experience a second that the loop could take in if it did nothing else; NaN: not known."""
        return 1.0 / self._cost_s if self._cost_s > 0 else math.nan

    def steer(self, seen: Seen) -> None:
        """Takes in a measurement, and sets what the fleet may say from now on."""
        self._measure(seen)
        self._settle_s -= seen.seconds
        if self._fixed:
            return
        wanted = min(MOST_PER_S, max(MESSAGES_PER_S, seen.actors / WANTED_PERIOD_S))
        may_rise = self._settle_s <= 0
        self._steer_ingest(wanted, may_rise)
        self._steer_brokers(wanted, seen.delays_s, may_rise)
        # All actors have one period, so that the slowest broker's share bounds each broker's
        shares = [self._broker_per_s[where] for where in seen.delays_s]
        together = len(shares) * min(shares) if shares else math.inf
        allowed = max(LEAST_PER_S, min(wanted, self._ingest_per_s, together))
        if allowed != self.messages_per_s:
            self._settle_s = min(SETTLE_MAX_S, SETTLE_PERIODS * seen.actors / allowed)
        self.messages_per_s, self._lowest = allowed, min(self._lowest, allowed)

    def _measure(self, seen: Seen) -> None:
        self._busy = seen.busy_s / seen.seconds
        self._backlog_s = seen.waiting * seen.seconds / max(1, seen.taken)
        self._delay_s = max(seen.delays_s.values(), default=0.0)
        is_late = seen.waiting >= _FEW and self._backlog_s > BACKLOG_S
        if seen.messages >= _FEW or (is_late and seen.messages):
            # Where something waits, and not for the loop (a slow disk, say), what came through is what can
            cost_s = max(seen.busy_s, seen.seconds if is_late else 0.0) / seen.messages
            self._cost_s = cost_s if math.isnan(self._cost_s) else (self._cost_s + cost_s) / 2
        self._strained = self._strained + 1 if is_late or self._busy > NEEDED.high else 0

    def _steer_ingest(self, wanted: float, may_rise: bool) -> None:
        capacity = self.capacity_per_s
        if math.isnan(capacity):
            return
        is_strained = self._strained >= 2
        high = max(SPARE.high * capacity, min(MESSAGES_PER_S, NEEDED.high * capacity if is_strained else math.inf))
        is_easy = not self._strained and self._busy < EASY
        low = max(SPARE.low * capacity, min(MESSAGES_PER_S, math.inf if is_easy else NEEDED.low * capacity))
        if self._ingest_per_s > high:
            self._ingest_per_s = max(LEAST_PER_S, low)
        elif may_rise and self._ingest_per_s < low:
            self._ingest_per_s = min(RISE * self._ingest_per_s, low)
        self._ingest_per_s = min(self._ingest_per_s, wanted)

    def _steer_brokers(self, wanted: float, delays_s: Mapping[str, float], may_rise: bool) -> None:
        for where, delay_s in delays_s.items():
            limit = self._broker_per_s.get(where, MESSAGES_PER_S)
            self._slow[where] = self._slow.get(where, 0) + 1 if delay_s > SLOW_S else 0
            if self._slow[where] >= 2 and may_rise:  # before, what it was given last does not show
                limit = max(LEAST_PER_S, min(limit, self.messages_per_s / len(delays_s)) / 2)
            elif may_rise and delay_s < QUICK_S:
                limit = min(RISE * limit, wanted)
            self._broker_per_s[where] = limit

    def metrics(self) -> dict[str, float]:
        """Returns what is in force, and what it follows from, for a row of metrics."""
        return {
            "message_budget_per_s": self.messages_per_s,
            "ingest_capacity_per_s": self.capacity_per_s,
            "ingest_busy_share": self._busy,
            "backlog_s": self._backlog_s,
            "broker_delay_s": self._delay_s,
        }

    def summary(self) -> dict[str, float | None]:
        """Returns the budget at the end, the least of the session, and the capacity, for the summary."""
        capacity = self.capacity_per_s
        return {
            "message_budget_per_s": self.messages_per_s,
            "message_budget_per_s_least": self._lowest,
            "ingest_capacity_per_s": None if math.isnan(capacity) else capacity,
        }
