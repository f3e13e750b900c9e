"""Recovers when training computes NaN or infinity: back to the last good state, and the likely cause is quarantined.

Weights that are not finite stay so for ever, and whatever is saved or published of them is worthless. So each call of
updates is looked at (its metrics and TD errors: a gradient that is not finite shows in its norm), and each checkpoint.
"""

from __future__ import annotations

import logging
import math

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors
from learner import algorithms
from learner.experience import ingestion
from learner.experience.buffers import memory

_log = logging.getLogger(__name__)
IN_A_ROW_MAX = 3
"""Rollbacks to one and the same state, after which going on is no use."""
STANDS_OUT = 1000.0
"""Times the median of a batch, or 1 where that is more, from which on a number is a likely cause."""


class Recovery:
    """Keeps the last good state of an algorithm.

    Args:
        algorithm: What computes.
        good: Its state now.
        source: What its experience came by.

    Attributes:
        recoveries: Rollbacks to it so far.
        steps_quarantined: Steps in messages that were put aside.
    """

    def __init__(self, algorithm: algorithms.Algorithm, good: algorithms.State, source: ingestion.Ingestion) -> None:
        self._algorithm = algorithm
        self._good = good
        self._source = source
        self._in_a_row = 0
        self.recoveries = 0
        self.steps_quarantined = 0

    def keep(self, good: algorithms.State) -> None:
        """Notes a newer state, all of which is finite."""
        self._good, self._in_a_row = good, 0

    def metrics(self) -> dict[str, float]:
        """Returns the counts of rollbacks and of steps that were quarantined, for a row of metrics."""
        return {"steps_quarantined": self.steps_quarantined, "recoveries": self.recoveries}

    def roll_back(self, batch: memory.Batch | None) -> None:
        """Restores the last good state, and takes out of replay what stands out in the batch that spoilt the newest.

        Raises:
            RunError: It has come to this too often.
        """
        self.recoveries += 1
        self._in_a_row += 1
        spoilt = self._algorithm.updates
        self._algorithm.restore(self._good)
        done = self._quarantine(batch)
        _log.warning(
            "training computed NaN or infinity within %d updates; it goes on from the state after %d. %s",
            spoilt,
            self._algorithm.updates,
            done,
        )
        if self._in_a_row > IN_A_ROW_MAX:
            raise errors.RunError(
                f"training computed NaN or infinity {self._in_a_row} times from the same state on",
                where=f"after {self._algorithm.updates} updates",
                todo="lower learning_rate or max_grad_norm, or scale what the environment gives; the last good state "
                "is saved, and --resume goes on from it",
            )

    def _quarantine(self, batch: memory.Batch | None) -> str:
        """Quarantines the likely cause; returns what was done, in a sentence."""
        cause = outliers(batch) if batch is not None else np.zeros(0, np.int64)
        if not len(cause):
            return "Nothing stands out in what it learned from"
        put_aside = self._source.quarantine(cause)
        self.steps_quarantined += sum(one.steps for one in put_aside)
        named = ", ".join(
            f"{one.actor_id} (boot {one.boot}, message {one.seq}, {one.steps} steps)" for one in put_aside
        )
        return f"Put aside for what stands out in it: {named}"


def is_sound(update: algorithms.Update) -> bool:
    """Returns whether a call of updates computed with finite numbers alone."""
    return all(map(math.isfinite, update.metrics.values())) and bool(np.isfinite(update.td_error).all())


def outliers(batch: memory.Batch) -> NDArray[np.int64]:
    """Returns the ids of transitions with numbers far larger than those of the others."""
    ids = batch.ids.reshape(-1)
    odd = np.zeros(len(ids), bool)
    for values in batch.numbers:
        if values.dtype.kind == "f":
            largest = np.abs(values).reshape(len(ids), -1).max(1)
            odd |= ~(largest <= STANDS_OUT * max(1.0, float(np.median(largest))))
    cause: NDArray[np.int64] = np.unique(ids[odd])
    return cause
