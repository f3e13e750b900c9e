"""`actorq-learner quantize`: a policy of any kind and observations in, a judged .tflite and a report out."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, specs
from broker.program import storage
from learner import config
from learner.files import run_directory
from learner.quantize import compare, gate, ptq
from learner.quantize.distil import dagger, distillation, goals, students
from learner.quantize.tflite import interpreter
from learner.study import play
from learner.study.user_models import distilled, reading, recipe, requests, returns, subject
from learner.study.user_models.converter import operations
from learner.study.user_models.formats import observations

FloatArray = NDArray[np.float32]
_log = logging.getLogger(__name__)

_WIDE = 0.5
"""Headroom of the input's features (`ptq.Calibrator`) where held-out episodes leave what was calibrated."""
_TRIES = 2
"""Candidates that are played, the second only where the first is inferior."""
_AGREEMENT_HIGH, _ERROR_SMALL = 0.98, 0.005
"""From where on a candidate is faithful enough not to be refined (`learner.quantize.channel_splitting`)."""
_OTHER_VALUES = ("compressed", "distilled")
"""Candidates whose values are comparable to each other only, not to fp32's."""
_OUTSIDE_MAX = 0.001
"""The share of held-out observations outside of the calibrated ranges from which on wide headroom is tried."""


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A converted model and how it was judged by what it answers.

    Attributes:
        name: `recipe`, `wide`, `refined` or `plain`, `compressed`, `aware` or `distilled`.
        made: The model.
        verdict: Decision of the gate.
        measures: What is reported beside that.
        failing: Mean of `distillation.failings` of values; mean error of actions.
    """

    name: str
    made: subject.Made
    verdict: gate.Verdict
    measures: dict[str, Any]
    failing: float


def run(request: requests.Request) -> dict[str, Any]:
    """Quantizes, judges and writes both files.

    Args:
        request: What `requests.check` has passed.

    Returns:
        The report.

    Raises:
        ConfigError: The files or observations that the command line names do not do.
        PolicyError: The model cannot be read or quantized, or acts otherwise than before.
        SpecError: It is not for this environment.
        EnvironmentFailure: The environment cannot be played.
    """
    began, playing = time.monotonic(), distilled.Clock()
    task = play.Task(request.env, request.env_kwargs, request.frame_stack)
    spec = task.spec() if request.env else None
    policy, said = _read(request, spec)
    if said:
        _log.info("%s", said)
    if spec is not None:
        _check_spec(policy, spec, request)
    _check_bounds(policy)
    if request.distil or not request.compressed.is_none:
        goals.check(distilled.teacher(policy), _goal(request))
    with tempfile.TemporaryDirectory(prefix="actorq-") as scratch:
        fp32 = Path(scratch, "fp32.tflite")
        fp32.write_bytes(policy.float32())
        rows, episodes, wanted = _observed(request, policy, task, fp32, playing)
        rows = _fitted(policy, rows, request)
        learn, judge = observations.split(episodes, len(rows), request.seed)
        candidates, outside = _candidates(request, policy, rows[learn], rows[judge])
        with playing:
            chosen, played = _played(request, policy, task, fp32, sorted(candidates, key=_rank))
        learned: distilled.Distilled | None = None
        if request.distil and (chosen is None or not _suffices(chosen, played)):
            learned = distilled.distil(
                policy,
                rows[learn],
                _goal(request, _WIDE if outside > _OUTSIDE_MAX else ptq.BEYOND),
                _playground(request, policy, task, fp32, wanted) if request.env else None,
                seed=request.seed,
                budget_s=60 * request.distil_minutes if request.distil_minutes else dagger.BUDGET_S,
            )
            candidates.append(_judge(policy, "distilled", distilled.made(policy, learned.student), rows[judge]))
            student = candidates[-1] if request.env else min(candidates, key=_rank)
            if not _is_worse(learned.verdict, played):
                chosen, played = student, learned.verdict
        assert chosen is not None
        float32_bytes = fp32.stat().st_size
    passed = chosen.verdict.passed if played is None else played.passed
    if not passed and not request.force_publish:
        raise _refusal(request, policy, chosen, played)
    model = chosen.made.model
    result = {
        "model": str(request.model),
        "source": policy.source,
        "said": said,
        "output": str(request.output),
        "precision": request.precision,
        "outputs": policy.outputs,
        "written": chosen.name,
        "passed": passed,
        **chosen.made.notes,
        "sha256": hashlib.sha256(model).hexdigest(),
        "bytes": {"float32": float32_bytes, "model": len(model)},
        "rows": {
            "calibration": len(learn),
            "judged": len(judge),
            "split": "episodes" if observations.has_episodes(episodes) else "blocks",
            "outside": outside,
        },
        "candidates": {one.name: {**dataclasses.asdict(one.verdict), **one.measures} for one in candidates},
        "returns": played.measured() if played else None,
        "weight_bits": request.weight_bits,
        "distil": learned.measured if learned else None,
        "seconds": _seconds(began, playing, learned),
        "runtime": f"ai-edge-litert {importlib.metadata.version('ai-edge-litert')}",
        "delegate": interpreter.kernels(model) if chosen.verdict.reason != "unrunnable" else "",
        "operations": [dataclasses.asdict(operation) for operation in operations.list_operations(model)],
        "versions": run_directory.versions(),
    }
    storage.write_atomic(request.output, model, mode=0o644)
    storage.write_atomic(request.report, (json.dumps(result, indent=1) + "\n").encode(), mode=0o644)
    return result


def _seconds(began: float, playing: distilled.Clock, learned: distilled.Distilled | None) -> dict[str, float]:
    """Returns the seconds that it took: total, episodes (of a student that learns aside), distil."""
    judged, trained = (learned.measured["judged_s"], learned.measured["wall_s"]) if learned else (0.0, 0.0)
    found = {"total": time.monotonic() - began, "episodes": playing.wall_s + judged, "distil": trained}
    return {name: round(seconds, 1) for name, seconds in found.items()}


def _observed(
    request: requests.Request, policy: subject.Subject, task: play.Task, fp32: Path, playing: distilled.Clock
) -> tuple[NDArray[Any], NDArray[Any] | None, FloatArray]:
    """Returns observations [N, *shape], the number of the episode of each where it is known, and fp32's returns."""
    if request.calibration is not None:
        return *observations.load(request.calibration), np.zeros(0, np.float32)
    gathered = fp32.with_name("observations.npz")
    _log.info("playing %d episodes of %s to calibrate on", request.calibration_episodes, request.env)
    with playing:
        played = play.score(fp32, task, request.calibration_episodes, request.seed, policy.head, gathered)
    return *observations.load(gathered), played.episode_return


def _is_worse(student: returns.Verdict | None, plain: returns.Verdict | None) -> bool:
    """Returns whether both were played, and the student is refused with the greater loss."""
    if student is None or plain is None or student.passed:
        return False
    return student.compared.difference < plain.compared.difference


def _played(
    request: requests.Request, policy: subject.Subject, task: play.Task, fp32: Path, ranked: list[_Candidate]
) -> tuple[_Candidate | None, returns.Verdict | None]:
    """Returns the first of the best candidates that is non-inferior, or the last that was tried; None if none is."""
    if not ranked or not request.env:
        return (ranked[0] if ranked else None), None
    chosen, played = ranked[0], None
    for turn, chosen in enumerate(_worth_playing(ranked)[: 1 if request.distil else _TRIES]):
        played = _judged_by_returns(request, policy, task, fp32, chosen.made.model, turn)
        if played.passed:
            break
    return chosen, played


def _judged_by_returns(
    request: requests.Request, policy: subject.Subject, task: play.Task, fp32: Path, model: bytes, turn: int
) -> returns.Verdict:
    file = fp32.with_name(f"{turn}.tflite")
    file.write_bytes(model)
    seed = request.seed + (turn + 1) * returns.FRESH  # none that an earlier one has failed on
    return returns.judge(fp32, file, task, request.episodes, seed, policy.head)


def _playground(
    request: requests.Request, policy: subject.Subject, task: play.Task, fp32: Path, wanted: FloatArray
) -> distilled.Playground:
    turns = itertools.count(1)  # the first were those of the policy itself
    return distilled.Playground(
        task, lambda model: _judged_by_returns(request, policy, task, fp32, model, next(turns)), wanted, fp32.parent
    )


def _suffices(chosen: _Candidate, played: returns.Verdict | None) -> bool:
    """True where there is nothing to distil for; without returns that takes more than to pass the gate."""
    return played.passed if played else chosen.verdict.passed and _is_faithful(chosen)


def _rank(one: _Candidate) -> tuple[bool, float]:
    return not one.verdict.passed, one.failing


def _read(request: requests.Request, spec: specs.EnvSpec | None) -> tuple[subject.Subject, str]:
    """Reads the policy; what its file does not tell of its actions is the environment's to say, or the user's."""
    low, high = (np.array(ends) if ends else None for ends in (request.action_low, request.action_high))
    if low is not None and high is not None:
        try:
            low, high = np.broadcast_arrays(low, high)
        except ValueError as error:
            raise errors.ConfigError("--action-low and --action-high have unlike numbers of elements") from error
        if not (np.isfinite([low, high]).all() and (low < high).all()):
            raise errors.ConfigError("--action-low must be below --action-high, both finite")
    outputs = request.outputs
    if spec is not None and spec.action.kind == "continuous":
        outputs = outputs or "actions"
        if low is None and request.model.suffix != ".zip":  # an agent has its own
            low, high = np.array(spec.action.low), np.array(spec.action.high)
    return reading.read(
        request.model, outputs=outputs, low=low, high=high, normaliser=request.normaliser, verbose=request.verbose
    )


def _check_bounds(policy: subject.Subject) -> None:
    if policy.low is not None and policy.low.size not in (1, policy.size):
        raise errors.ConfigError(
            f"{policy.low.size} bounds were given, and an action has {policy.size} elements",
            where="--action-low, --action-high",
        )


def _check_spec(policy: subject.Subject, spec: specs.EnvSpec, request: requests.Request) -> None:
    if spec.action.kind == "multi_discrete":
        raise errors.SpecError(
            f"{request.env} takes several choices at once, of which no file tells the outputs", where=str(request.model)
        )
    kind = "values" if spec.action.kind == "discrete" else "actions"
    if (policy.shape, policy.size, policy.outputs) != (spec.observation.shape, spec.action.size, kind):
        raise errors.SpecError(
            f"the policy maps {list(policy.shape)} to {policy.size} {policy.outputs}, and {request.env} has"
            f" {spec.describe()}",
            where=str(request.model),
            todo="name the environment that it was trained for, with its wrappers: --env FILE.py:make, --frame-stack",
        )


def _fitted(policy: subject.Subject, rows: NDArray[Any], request: requests.Request) -> NDArray[Any]:
    """Returns observations in the policy's shape, and checks what it answers."""
    if rows.ndim == 4 and rows.shape[1:] != policy.shape and (*rows.shape[2:], rows.shape[1]) == policy.shape:
        rows = np.ascontiguousarray(np.moveaxis(rows, 1, 3))  # as torch has images
    if rows.shape[1:] != policy.shape:
        raise errors.ConfigError(
            f"one observation has the shape {rows.shape[1:]}, and the model takes {policy.shape}",
            where=str(request.calibration or request.env),
            todo="calibrate with what the model is fed: raw observations, [N, *shape]",
        )
    if policy.size < 2 and policy.outputs == "values":
        raise errors.ConfigError(
            "the model has a single output, of which no best action can be taken",
            where=str(request.model),
            todo="--outputs actions judges continuous outputs",
        )
    if not np.isfinite(policy.exact(rows)).all():
        raise errors.PolicyError(
            "the model answers NaN or infinite to some of the observations",
            reason="not_finite",
            where=str(request.model),
            todo="its weights are NaN or too large, or the observations are not what it was trained on",
        )
    return rows


def _goal(request: requests.Request, beyond: float = ptq.BEYOND) -> goals.Goal:
    """Returns what a student is to be, or the policy itself where there is none."""
    return goals.Goal(request.hidden or None, request.compressed, beyond)


def _candidates(
    request: requests.Request, policy: subject.Subject, calibration: NDArray[Any], judged: NDArray[Any]
) -> tuple[list[_Candidate], float]:
    """Returns what is made without a student, judged, and the share of held-out rows outside of what was calibrated."""
    beyond = ptq.BEYOND
    found: list[_Candidate] = []
    outside = _outside(calibration, judged, beyond)
    if request.hidden:  # only a student has that shape
        return found, outside
    if not request.compressed.is_none:
        goal = _goal(request, _WIDE if outside > _OUTSIDE_MAX else beyond)
        compressed = students.plain(distilled.teacher(policy), calibration, goal)
        return [_judge(policy, "compressed", distilled.made(policy, compressed), judged)], outside
    found.append(_judge(policy, policy.way, policy.make(calibration, request.precision, beyond=beyond), judged))
    if isinstance(policy, recipe.ChainSubject) and request.precision == "int8":
        if outside > _OUTSIDE_MAX:
            beyond = _WIDE
            found.append(_judge(policy, "wide", policy.make(calibration, "int8", beyond=beyond), judged))
        if not _is_faithful(min(found, key=lambda one: one.failing)):
            refined = policy.make_refined(calibration, beyond=beyond)
            found += [_judge(policy, "refined", refined, judged)] if refined else []
    if request.aware:
        found.append(_judge(policy, "aware", policy.make_aware(calibration, request.steps, request.seed), judged))
    return found, outside


def _worth_playing(ranked: list[_Candidate]) -> list[_Candidate]:
    """Returns the best two of those that answer something: each try may pass by luck, so that there are few."""
    return [one for one in ranked if one.verdict.reason not in ("unrunnable", "not_finite", "dead")][:_TRIES]


def _is_faithful(candidate: _Candidate) -> bool:
    """True where there is little to gain by `split_and_refit`, which makes a layer wider."""
    verdict = candidate.verdict
    if isinstance(verdict, gate.ActionVerdict):
        return verdict.action_error_mean < _ERROR_SMALL
    return isinstance(verdict, gate.ChoiceVerdict) and verdict.agreement > _AGREEMENT_HIGH


def _outside(calibration: NDArray[Any], judged: NDArray[Any], beyond: float) -> float:
    """Returns the share of observations of which a feature lies beyond what calibration saw, headroom included."""
    if calibration.dtype == np.uint8:
        return 0.0
    low, high = calibration.min(0).astype(np.float64), calibration.max(0).astype(np.float64)
    room = beyond * (high - low)
    return float(((judged < low - room) | (judged > high + room)).reshape(len(judged), -1).any(1).mean())


def _judge(policy: subject.Subject, name: str, made: subject.Made, judged: NDArray[Any]) -> _Candidate:
    exact = made.exact(judged)
    try:
        answer, _, _ = interpreter.run(made.model, judged)
    except RuntimeError as error:
        _log.warning("the runtime does not run the %s model: %s", name, error)
        nothing: dict[str, Any] = {"relative_mean": [], "relative_max": []}
        return _Candidate(name, made, gate.Verdict(False, "unrunnable"), nothing, math.inf)
    settings = config.GateConfig()
    verdict: gate.Verdict
    off: NDArray[Any]
    spread: NDArray[Any]
    if policy.outputs == "values":
        verdict = gate.judge(made.model, exact, judged, settings)
        off, spread = np.abs(answer - exact), distillation.spread(exact)
        failing = float(distillation.failings(answer, exact, "values").mean())
    else:
        action = policy.action(exact)
        compared = compare.actions if policy.low is None else compare.clipped_actions
        verdict = gate.judge_actions(made.model, exact, judged, action, settings, compared=compared)
        if not np.ptp(answer, axis=0).any() and np.ptp(exact, axis=0).any():
            verdict = dataclasses.replace(verdict, passed=False, reason="dead")
        clipped = [np.clip(one, action.low, action.high) if policy.low is not None else one for one in (answer, exact)]
        off, spread = np.abs(clipped[0] - clipped[1]), np.array(action.high) - action.low
        failing = float((off / spread).mean())
    if policy.outputs == "values" and name in _OTHER_VALUES:
        return _Candidate(name, made, verdict, {"relative_mean": [], "relative_max": []}, failing)
    measures = {"relative_mean": (off.mean(0) / spread).tolist(), "relative_max": (off.max(0) / spread).tolist()}
    return _Candidate(name, made, verdict, measures, failing)


def _refusal(
    request: requests.Request, policy: subject.Subject, chosen: _Candidate, played: returns.Verdict | None
) -> errors.PolicyError:
    verdict = chosen.verdict
    if played is not None:
        found = (
            f"it returns {played.compared.mean:.1f} where fp32 has {played.fp32:.1f} and chance {played.random:.1f},"
            f" mean of {played.episodes} episodes; the paired 95 % interval of the difference is"
            f" {played.compared.low:.1f} to {played.compared.high:.1f}, and {compare.MARGIN:.0%} of fp32 - chance may"
            " be lost"
        )
        reason = "inferior"
    elif verdict.reason == "unrunnable":
        found, reason = "the runtime does not run it: a layer may be nearly dead", "unrunnable"
    elif isinstance(verdict, gate.ChoiceVerdict):
        found = (
            f"greedy actions agree on {verdict.agreement:.1%} of observations, {verdict.agreement_weighted:.1%} when"
            f" weighted by fp32's gap; the best two outputs are equal on {verdict.ties:.1%};"
            f" {verdict.saturation:.1%} of outputs are at an end of their range"
        )
        reason = verdict.reason
    else:
        found = f"an output is off by {max(chosen.measures['relative_mean']):.1%} of its range on average"
        reason = verdict.reason
    if request.distil:
        todo = "more --distil-minutes, more units (--hidden), or more bits and fewer pruned weights"
    elif not request.compressed.is_none:
        todo = "--distil trains what is left of the weights"
    elif request.precision == "int8" and not request.aware:
        todo = "--aware trains the weights against the fp32 outputs until int8 does as well, --distil a student"
    else:
        todo = "calibrate with more observations, of all that the policy meets; or --precision dynamic or float16"
    if played is not None and played.is_undecided:
        todo = f"--episodes {4 * request.episodes} may decide it, since the interval holds that margin; or {todo}"
    if policy.outputs == "actions" and policy.low is None:
        todo += "; if actions are clipped, give --action-low and --action-high"
    return errors.PolicyError(
        f"the {request.precision} model acts otherwise than the original ({reason}): {found}",
        reason=reason,
        where=str(request.model),
        todo=f"{todo}; --force-publish writes it all the same",
    )
