"""Distils: a student learns what a teacher does, in simulated int8, from the states that it gets into itself.

Its weights are trained against the teacher's answers: for choices by the divergence of decisions, for actions by their
error within the bounds (`distillation.loss`). What int8 does on the way is simulated as the recipe does it
(`simulation`), with fewer bits or pruned weights where those are asked for. A student that errs sees other states than
its teacher, and calibration has none of them. So it plays between rounds of training, the teacher says what it would
have done there, and the next round learns from all that was seen (DAgger, Ross et al. 2011,
https://arxiv.org/abs/1011.0686).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.quantize.distil import goals, students, training
from learner.quantize.tflite import interpreter, quantizer

FloatArray = NDArray[np.float32]
_log = logging.getLogger(__name__)

BUDGET_S = 120.0
ROUNDS = 8
_CHOOSE_ROWS = 8192
_LOT_BYTES = 1 << 27
"""Bytes of the observations of one round; of more, every k-th is kept."""
_UNITS = {"values": "share of choices, weighted by what they cost", "actions": "mean error / range"}
_CONVERGED = 0.98
"""Without states of its own a student is done when a round leaves more than this share of its failings."""


def distil(
    teacher: goals.Teacher,
    rows: NDArray[Any],
    goal: goals.Goal,
    *,
    seed: int = 0,
    budget_s: float = BUDGET_S,
    rounds: int | None = None,
    explore: Callable[[bytes, int], NDArray[Any]] | None = None,
    accept: Callable[[students.Student], bool] | None = None,
) -> students.Student:
    """Trains a student, round by round.

    Args:
        teacher: What it is to do.
        rows: Calibration observations [N, *shape], in the order in which they were seen.
        goal: What it is to be.
        seed: Of all that is drawn. The same arguments give the same student, unless time ran short.
        budget_s: Seconds of training and exploring together; what `accept` takes is not counted.
        rounds: The most rounds; None is for ROUNDS.
        explore: Plays a model of a round of that number, from 0, and returns what it observed [N, *shape]. None where
            nothing can be played: training then ends when it no longer helps.
        accept: Asked after each round of which exploring tells something; True ends training. None is for nobody: then
            the last of all rounds plays nothing, since no student would learn from it.

    Returns:
        The student that was accepted, or the best by what was held back of all observations.

    Raises:
        ConfigError: The goal cannot be had of this teacher.
        PolicyError: Training came to weights that are not finite.
    """
    goals.check(teacher, goal)
    end = time.monotonic() + budget_s
    rng, maker, known = np.random.default_rng(seed), quantizer.Quantizer(), _Known(teacher)
    known.add(rows)
    policy = students.first(teacher, goal, students.spaced(rows, students.FIT_ROWS), rng)
    best: students.Student | None = None
    steps = 0
    ended: students.Ended = "rounds"
    rounds = rounds or ROUNDS
    for number in range(rounds):
        began = time.monotonic()
        sample = known.sample
        seen = training.Seen(known.rows, known.exact, sample)
        policy, taken = training.run(teacher, goal, policy, seen, number, rng, end)
        steps += taken
        compressed, params = students.fitted(teacher, policy, sample, goal)
        model = maker.quantize(compressed, params, sample)
        found = students.Student(compressed, params, model, known.failing(model), number + 1, steps, len(known.rows))
        before = known.failing(best.model) if best else math.inf
        best = found if best is None or found.failing < before else best
        _log.info(
            "distil, round %d: %d steps in %.0f s; off by %.4f (%s) on %d observations held back%s",
            number + 1, taken, time.monotonic() - began, found.failing, _UNITS[teacher.outputs], known.held_back,
            f"; {max(0.0, end - time.monotonic()):.0f} s are left" if math.isfinite(end) else "",
        )  # fmt: skip
        if explore is None:
            if not found.failing or found.failing > _CONVERGED * before:
                ended = "converged"
                break
        elif math.isfinite(found.failing) and (accept or number + 1 < rounds):  # else the runtime does not run it
            met = explore(found.model, number)
            asked = time.monotonic()
            if accept and accept(found):
                return found
            end += time.monotonic() - asked
            known.add(met)
        if time.monotonic() >= end:
            ended = "budget"
            break
    assert best is not None
    return dataclasses.replace(best, ended=ended, failing=known.failing(best.model))


class _Known:
    """Observations with the teacher's answers; the last quarter of each lot is held back, to choose by.

    Attributes:
        rows: What is learned from [N, *shape].
        exact: The teacher's outputs for that [N, n].
    """

    def __init__(self, teacher: goals.Teacher) -> None:
        self._teacher = teacher
        self._lots: list[NDArray[Any]] = []
        self._choose: list[tuple[NDArray[Any], FloatArray]] = []
        self.rows = np.zeros(0)
        self.exact = np.zeros((0, teacher.size), np.float32)

    def add(self, rows: NDArray[Any]) -> None:
        rows = students.spaced(rows, max(1, _LOT_BYTES // rows[0].nbytes))
        exact = self._teacher.exact(rows)
        cut = max(1, len(rows) * 3 // 4)
        self._lots.append(rows)
        self._choose.append((rows[cut:], exact[cut:]))
        self.rows = np.concatenate([self.rows, rows[:cut]]) if len(self.rows) else rows[:cut]
        self.exact = np.concatenate([self.exact, exact[:cut]])

    @property
    def sample(self) -> NDArray[Any]:
        """Some of each lot, to calibrate with."""
        each = students.FIT_ROWS // len(self._lots)
        return np.concatenate([students.spaced(rows, each) for rows in self._lots])

    @property
    def held_back(self) -> int:
        return sum(len(rows) for rows, _ in self._choose)

    def failing(self, model: bytes) -> float:
        rows, exact = (np.concatenate(part) for part in zip(*self._choose, strict=True))
        rows, exact = students.spaced(rows, _CHOOSE_ROWS), students.spaced(exact, _CHOOSE_ROWS)
        try:
            answer, _, _ = interpreter.run(model, rows)
        except RuntimeError:  # as in `distillation.judge`
            return math.inf
        return float(self._teacher.failings(answer, exact).mean())
