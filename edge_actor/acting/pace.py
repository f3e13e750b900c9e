"""The pace of acting: what the learner granted, the length of a burst, and the control rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from broker.contract import messages

BURST_S = 0.002
"""The time that the loop acts between two looks at everything else: each costs 30 us."""
LOOK_S = 0.0005
"""The same while the rest of a message is on its way: the broker can send as much as the socket holds."""


class Grant:
    """Counts the steps that the learner lets this boot record, per learner session."""

    def __init__(self) -> None:
        self._session = ""
        self._until = 0  # this boot's recorded steps
        self._before = 0

    def assign(self, assignment: messages.Assignment, recorded: int) -> None:
        """Follows an assignment, `recorded` steps into this boot."""
        if assignment.session != self._session:
            self._session, self._before = assignment.session, recorded
        self._until = self._before + assignment.steps_granted

    def left(self, recorded: int) -> int:
        """Returns how many steps may be recorded now."""
        return self._until - recorded


class BurstLength:
    """Estimates how many rows take a given time, from the bursts before."""

    def __init__(self) -> None:
        self._row_s = BURST_S

    def rows(self, seconds: float = BURST_S) -> int:
        """Returns the rows that take about so long, at least one."""
        return max(1, int(seconds / self._row_s))

    def learn(self, rows: int, seconds: float) -> None:
        """Takes note that `rows` took `seconds`. Follows slowly: one slow reset must not shorten the next bursts."""
        if rows > 0:
            self._row_s += 0.1 * (seconds / rows - self._row_s)


class Metronome:
    """Holds a control rate by an absolute schedule on the monotonic clock.

    Attributes:
        missed: Periods in which no step began.
    """

    def __init__(self, rate_hz: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = 1.0 / rate_hz
        self._clock = clock
        self._due = clock()
        self.missed = 0

    def restart(self) -> None:
        """Begins anew with a step that is due now; a pause on purpose is no miss."""
        self._due = self._clock()

    @property
    def slack_s(self) -> float:
        """Seconds until the next step is due."""
        return self._due - self._clock()

    def vitals(self) -> dict[str, Any]:
        """Returns how the rate was held, by fields of `messages.Vitals`."""
        return {"deadlines_missed": self.missed}

    def has_room(self, seconds: float) -> bool:
        """Returns whether that fits before the next step. What fits into no period needs half of one."""
        return self.slack_s > min(seconds, self._period_s / 2)

    def wait(self, wake: threading.Event) -> bool:
        """Waits for the next step.

        Returns:
            False if `wake` was set first; then call again.
        """
        slack = self.slack_s
        if slack > 0 and wake.wait(slack):
            return False
        late = -self.slack_s
        skipped = int(late / self._period_s) if late > 0 else 0
        self.missed += skipped
        self._due += (1 + skipped) * self._period_s
        return True
