"""Judges a model by the returns of paired episodes on fresh seeds, which actors on this machine play."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import errors, specs
from learner.quantize import compare
from learner.study import play

_log = logging.getLogger(__name__)
FRESH = 1_000_000
"""Added to the seed by callers, so that no episode that calibration has seen is played again."""
_ROUNDS = (1, 1, 2, 4)
"""Episodes of each round, in those that were asked for. Another follows while the interval holds the margin."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a model's returns with fp32's.

    Attributes:
        episodes: Of each policy.
        fp32, random: Mean returns.
        compared: The comparison of the model's.
        runtime, delegate: What it ran on.
    """

    episodes: int
    fp32: float
    random: float
    compared: compare.Returns
    runtime: str
    delegate: str

    @property
    def passed(self) -> bool:
        """Returns whether the model is non-inferior; where fp32 is no better than chance, whether it loses nothing."""
        if self.compared.non_inferior is None:
            return self.compared.low >= 0
        return self.compared.non_inferior

    @property
    def is_undecided(self) -> bool:
        """Whether the margin lies within the interval, so that more episodes may tell."""
        span = self.fp32 - self.random
        margin = -compare.MARGIN * span if span > 0 else 0.0
        return self.compared.low < margin < self.compared.high

    def measured(self) -> dict[str, Any]:
        """Returns its part of the report."""
        own = {"episodes": self.episodes, "fp32": self.fp32, "random": self.random, "passed": self.passed}
        return own | dataclasses.asdict(self.compared) | {"runtime": self.runtime, "delegate": self.delegate}


def judge(fp32: Path, model: Path, task: play.Task, episodes: int, seed: int, head: specs.Head) -> Verdict:
    """Plays fp32 and the model for the same episodes, and more of them while they do not decide it.

    Args:
        fp32: The original, a .tflite file.
        model: What is compared with it.
        task: What to play.
        episodes: Of the first round, and of random actions; eight times as many are the most.
        seed: Of the first episode; the k-th after it has `seed + k`.
        head: What both put out.

    Raises:
        ActorqError: As `play.score`.
    """
    chance = play.score(play.RANDOM, task, episodes, seed).episode_return
    exact, other = np.zeros((2, 0), np.float32)
    for rounds in _ROUNDS:
        played = play.at_once({"fp32": fp32, "int8": model}, task, rounds * episodes, seed + len(exact), head)
        exact = np.concatenate([exact, played["fp32"].episode_return])
        other = np.concatenate([other, played["int8"].episode_return])
        compared = compare.returns(exact, other, chance)
        _log.info(
            "%d episodes: return %.1f, fp32 %.1f, random %.1f", len(exact), compared.mean, exact.mean(), chance.mean()
        )
        one = played["int8"]
        means = float(exact.mean()), float(chance.mean())
        verdict = Verdict(len(exact), *means, compared, one.runtime, one.delegate)
        if not verdict.is_undecided:
            break
    if not np.isfinite([*exact, *other]).all():
        raise errors.EnvironmentFailure("the environment gave rewards that are not finite", where=task.env_id)
    return verdict
