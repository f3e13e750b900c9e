"""Distils a policy that is to be quantized: gives the student an environment to play in, and a judge."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.networks import layers
from learner.quantize.distil import compression, dagger, goals, students
from learner.study import play
from learner.study.user_models import recipe, returns, subject

_log = logging.getLogger(__name__)
_EPISODES = 10
"""Episodes that a student plays after each round."""
_TRIES = 2
"""Students that are judged: one on the way, and the one that there is when the time ends."""
_APART = 100
"""Episodes of exploring begin so many `returns.FRESH` after the seed: none is judged by, or calibrated on."""
_UNSEEN = (
    "learned from calibration observations only: nobody has seen how it acts where its own actions lead, and its"
    " teacher's did not"
)
Judge = Callable[[bytes], returns.Verdict]


@dataclass(frozen=True, slots=True, eq=False)
class Distilled:
    """A student, what the judge said of it (None where nothing could be played), and its part of the report."""

    student: students.Student
    verdict: returns.Verdict | None
    measured: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Playground:
    """A place where students play.

    Attributes:
        task: The environment.
        judge: Compares a model's returns with fp32's, in episodes that no other call has.
        wanted: Returns [episodes] of the teacher.
        directory: For files that are not kept.
    """

    task: play.Task
    judge: Judge
    wanted: NDArray[np.float32]
    directory: Path


def teacher(policy: subject.Subject) -> goals.Teacher:
    """Returns what a student of this policy is to do."""
    if isinstance(policy, recipe.ChainSubject):
        chain = policy.policy
        return goals.Teacher.of(chain.layers, chain.shape, chain.kind, clips=chain.clips)
    rescale = None
    if policy.outputs == "actions" and policy.low is not None and policy.high is not None:
        low, high = (np.broadcast_to(end, (policy.size,)).astype(np.float64) for end in (policy.low, policy.high))
        rescale = layers.Rescale(((high - low) / 2).astype(np.float32), ((high + low) / 2).astype(np.float32))
    return goals.Teacher(
        policy.exact, policy.outputs, policy.shape, policy.size, clips=rescale is not None, rescale=rescale
    )


def made(policy: subject.Subject, student: students.Student) -> subject.Made:
    """Returns a student as a converted model."""
    notes = {
        "levelled": policy.outputs == "values",
        "layer_norm": None,
        "per_feature_input": student.params.affine is not None,
        "nonzero": compression.nonzero(student.layers),
    }
    return subject.Made(student.model, policy.exact, notes)


def distil(
    policy: subject.Subject,
    rows: NDArray[Any],
    goal: goals.Goal,
    playground: Playground | None,
    *,
    seed: int = 0,
    budget_s: float = dagger.BUDGET_S,
) -> Distilled:
    """Trains a student until the judge finds it non-inferior, or the time ends.

    At most two students are judged, of those whose own episodes do not speak against it: whoever asks a judge often
    enough hears yes by luck.

    Args:
        policy: The teacher.
        rows: Observations [N, *shape] to begin with.
        goal: What the student is to be.
        playground: Where it plays; None trains on the rows alone.
        seed: Of all that is drawn.
        budget_s: Seconds of training and exploring; judging is not counted.

    Raises:
        ActorqError: As `dagger.distil` and `play.score`.
    """
    judged: list[tuple[bytes, returns.Verdict]] = []
    played: list[NDArray[np.float32]] = []
    judging = Clock()

    def ask(model: bytes) -> returns.Verdict:
        assert playground is not None
        with judging:
            judged.append((model, playground.judge(model)))
        return judged[-1][1]

    def explore(model: bytes, number: int) -> NDArray[Any]:
        assert playground is not None
        done, met = explored(model, number, policy, playground.task, playground.directory, seed)
        played.append(done)
        _log.info("distil, round %d: return %.1f, fp32 %.1f", number + 1, done.mean(), playground.wanted.mean())
        return met

    def accept(student: students.Student) -> bool:
        if playground is None or len(judged) >= _TRIES - 1 or not _is_plausible(played[-1], playground.wanted):
            return False
        return ask(student.model).passed

    whole = Clock()
    with whole:
        student = dagger.distil(
            teacher(policy),
            rows,
            goal,
            seed=seed,
            budget_s=budget_s,
            explore=explore if playground else None,
            accept=accept,
        )
    known = next((verdict for model, verdict in judged if model == student.model), None)
    wall_s, cpu_s = whole.wall_s - judging.wall_s, whole.cpu_s - judging.cpu_s
    if playground is not None and known is None:
        known = ask(student.model)
    measured = {
        "hidden": goal.hidden,
        "rounds": student.rounds,
        "steps": student.steps,
        "rows": student.rows,
        "ended": student.ended,
        "failing": None if math.isnan(student.failing) else student.failing,
        "judged": len(judged),
        "judged_s": round(judging.wall_s, 1),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "unseen": "" if playground else _UNSEEN,
    }
    return Distilled(student, known, measured)


def explored(
    model: bytes, number: int, policy: subject.Subject, task: play.Task, directory: Path, seed: int
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Plays a student after the round of that number, from 0, in episodes that nothing is judged by.

    Args:
        model: The student.
        number: Of the round.
        policy: The teacher.
        task: What to play.
        directory: For files that are not kept.
        seed: Of all that is drawn.

    Returns:
        Its returns [episodes], and what it observed [N, *shape].

    Raises:
        ActorqError: As `play.score`.
    """
    file, kept = directory / "student.tflite", directory / "student.npz"
    file.write_bytes(model)
    first = seed + _APART * returns.FRESH + number * _EPISODES
    done = play.score(file, task, _EPISODES, first, policy.head, kept)
    with np.load(kept) as met:
        found: NDArray[Any] = met["observations"]
    return done.episode_return, found


def _is_plausible(own: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    """Returns whether a student's returns may yet be as good as the teacher's: within two standard errors of those."""
    error = math.sqrt(float(own.var()) / len(own) + float(wanted.var()) / len(wanted))
    return float(own.mean()) + 2 * error >= float(wanted.mean())


class Clock:
    """Adds up wall time and processor time, that of processes which have ended included, while its context lasts."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self.wall_s -= time.monotonic()
        self.cpu_s -= _cpu_s()

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.monotonic()
        self.cpu_s += _cpu_s()


def _cpu_s() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
