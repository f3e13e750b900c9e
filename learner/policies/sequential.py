"""Decides between two policies by the returns of their episodes, as they come: a test by betting.

Episodes of a challenger and of the incumbent are paired in the order in which they come. Of each pair only the better
one counts: returns have no bounds that hold for every task, and the sign of a difference has. Two hypotheses are tested
at the same time, each at level alpha:

* *as good*: the challenger wins as many pairs as it loses. Against it a bettor puts shares of his wealth on losses;
  when 1 has become 1 / alpha, the challenger is withdrawn; and promoted when the other one's has.
* *worse*: it loses more pairs than it wins, by `margin` of them. Against it another one bets on wins.

While its hypothesis holds, a wealth is a supermartingale, which ever reaches 1 / alpha with a probability of alpha at
most (Ville's inequality): at whatever time somebody looks, and as often as he likes. The wealth is the mean over
several shares, so that neither small nor large differences are waited for too long (Waudby-Smith and Ramdas 2024,
"Estimating means of bounded random variables by betting", section 4). A policy that loses by rare disasters alone
loses few pairs, and is not seen to be worse.
"""

from __future__ import annotations

import collections
import math
from typing import Literal

Decision = Literal["wait", "promote", "withdraw"]
ALPHA = 0.02
MARGIN = 0.25
_SHARES = (0.1, 0.3, 0.6, 0.9)


class Trial:
    """A challenger's trial.

    Args:
        alpha: The probability of withdrawing a challenger that is as good, and of promoting one that is worse.
        margin: Losses less wins, as a share of the pairs, from which on it is worse.

    Attributes:
        decision: The decision; once it is made it stays.
        pairs: How many led to it.
    """

    def __init__(self, alpha: float = ALPHA, margin: float = MARGIN) -> None:
        if not (0.0 < alpha < 1.0 and 0.0 < margin < 1.0):
            raise ValueError(f"alpha {alpha} and margin {margin} must lie between 0 and 1")
        self._goal, self._margin = math.log(len(_SHARES) / alpha), margin
        self._losing = [0.0] * len(_SHARES)  # logs of what each share has made of 1
        self._winning = [0.0] * len(_SHARES)
        self._challenger = collections.deque[float]()
        self._incumbent = collections.deque[float]()
        self.decision: Decision = "wait"
        self.pairs = 0

    def add_challenger(self, episode_return: float) -> Decision:
        """Takes in an episode of the challenger; returns the decision."""
        self._challenger.append(episode_return)
        return self._compare()

    def add_incumbent(self, episode_return: float) -> Decision:
        """Takes in an episode of the incumbent; returns the decision."""
        self._incumbent.append(episode_return)
        return self._compare()

    def _compare(self) -> Decision:
        while self._challenger and self._incumbent and self.decision == "wait":
            difference = self._challenger.popleft() - self._incumbent.popleft()
            won = (difference > 0) - (difference < 0)
            self.pairs += 1
            # What is bet on has a mean of 0 at most under the hypothesis, and lies above -1 / share
            self._losing = [log + math.log1p(-share * won) for log, share in zip(self._losing, _SHARES, strict=True)]
            gain = (won + self._margin) / (1.0 + self._margin)
            self._winning = [log + math.log1p(share * gain) for log, share in zip(self._winning, _SHARES, strict=True)]
            if _log_sum(self._losing) >= self._goal:
                self.decision = "withdraw"
            elif _log_sum(self._winning) >= self._goal:
                self.decision = "promote"
        return self.decision


def _log_sum(logs: list[float]) -> float:
    largest = max(logs)
    return largest + math.log(sum(math.exp(log - largest) for log in logs))
