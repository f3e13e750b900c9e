"""Tells when an actor leaves what its policy was made for: observations, actions and returns, by what it sends.

* `outside`: a feature of its observations lies beyond what the policy's int8 input holds, and is clipped there.
* `saturated`: an action rests at one and the same bound. Bang-bang control rests at both by turns, and is no alarm.
* `returns`: its newest episodes return less than the first ones of the same policy on the same actor, by a rank test:
  returns have no bounds that hold for every task, and their order has.

Observations and actions are those of a sample, on a thread of its own that takes a small share of a core.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from broker.contract import messages, specs
from broker.program import logs, storage
from learner.audit import model_store, recompute
from learner.experience import whole_episodes
from learner.files import records, run_directory
from learner.quantize import input_scaling, scales
from learner.quantize.tflite import graph

_log = logging.getLogger(__name__)
OUTSIDE, SATURATED, RETURNS = "outside", "saturated", "returns"
OUTSIDE_SHARE = 0.2
"""Ranges come from 64 to 1024 observations, so that a feature is beyond them in 3 % of the steps where all is well."""
SATURATED_SHARE = 0.95
FALL_Z = 4.0
"""Standard errors by which ranks must have fallen: they are looked at again and again, for each actor."""
EPISODES = 32
"""The first ones of a policy, and the newest, that are compared."""
_EPISODES_ANEW = 4
_COUNTED_A_SECOND = 400
"""Messages whose episodes are counted on the learner's loop, 7 us each: so that ingest stays as fast as it is."""
STEPS_MIN = 256
PERIOD_S = 1.0
"""Between two samples of an actor, at least."""
DUTY = 0.005
"""The largest share of a core that samples may take. In a fleet for which that is too little, turns come later."""
_SAMPLES, _SAMPLE_STEPS, _SAMPLE_ELEMENTS = 16, 64, 1 << 17
_SILENCE_S = 60.0
"""An actor that sent nothing for so long has no drift: the page says that it is silent."""

FloatArray = NDArray[np.float32]
Ranges = tuple[FloatArray, FloatArray]


class Sample(NamedTuple):
    """What a sample of steps counted: outside, by feature [size]; at the lower and upper bound, by element [n]."""

    steps: int
    outside: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]


class _Returns:
    """Returns of the episodes that one policy played from beginning to end on one actor."""

    def __init__(self, order: messages.Order) -> None:
        self.order = order
        self.first: list[float] = []
        self.newest: deque[float] = deque(maxlen=EPISODES)
        self.episodes = whole_episodes.WholeEpisodes()
        self.fall_z: float | None = None
        self._anew = 0

    def add(self, experience: messages.Experience) -> None:
        """Takes in the episodes of a message."""
        for _, total in self.episodes.add(experience):
            self._anew += 1
            (self.first if len(self.first) < EPISODES else self.newest).append(total)

    def judge(self) -> None:
        """Compares the newest with the first, if there are enough, and some of them are new."""
        if len(self.newest) == EPISODES and self._anew >= _EPISODES_ANEW:
            self._anew, self.fall_z = 0, fall(np.array(self.first), np.array(self.newest))


class _Account:
    """What is known of one actor."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self.returns: _Returns | None = None
        self.sampled_at = self.heard_at = -np.inf

    def shares(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the shares of steps outside, by feature, and at the same bound, by element; empty before enough."""
        samples = list(self.samples)  # the thread adds to it
        steps = sum(one.steps for one in samples)
        if steps < STEPS_MIN:
            return np.zeros(0), np.zeros(0)
        at_bound = np.maximum(sum(one.low for one in samples), sum(one.high for one in samples))
        return np.asarray(sum(one.outside for one in samples)) / steps, np.asarray(at_bound) / steps


class Drift:
    """Follows each actor's experience. Its methods are for one thread.

    Args:
        spec: Of the environment.
        path: Of the run, whose `drift.json` has the alarms, by actor and kind, while it goes on.
        kept: Counts what the disk does not take.
        models: Has the policies.
        clock: Monotonic seconds.
        is_ours: Returns whether no other learner goes on with the run.

    Attributes:
        alarms: What is wrong with whom, by actor and kind, when `metrics` was called last.
    """

    def __init__(
        self,
        spec: specs.EnvSpec,
        path: Path,
        kept: records.Records,
        models: model_store.ModelStore,
        clock: Callable[[], float] = time.monotonic,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_ours, self._models = is_ours, models
        self._spec, self._file, self._kept, self._clock = spec, path / run_directory.DRIFT, kept, clock
        self._accounts: dict[str, _Account] = {}
        self._ranges: tuple[messages.Order, Ranges | None] | None = None  # the thread's
        self._rng = np.random.default_rng()
        self._worker = futures.ThreadPoolExecutor(1, "drift")
        self._job: futures.Future[None] | None = None
        self._resumes_at = 0.0
        self._counts_anew_at, self._counts_left = -np.inf, 0
        self.alarms: dict[str, dict[str, str]] = {}
        self._written: dict[str, dict[str, str]] | None = None  # not yet: a session before may have been killed

    def consider(self, actor_id: str, experience: messages.Experience) -> None:
        """Takes in the episodes of an accepted message, and has it sampled if it is its actor's turn."""
        if not experience.version:
            return
        now, order = self._clock(), messages.Order(experience.epoch, experience.version)
        account = self._accounts.get(actor_id) or self._accounts.setdefault(actor_id, _Account())
        account.heard_at = now
        if account.returns is None or account.returns.order < order:
            account.returns = _Returns(order)
        if account.returns.order == order:
            if self._may_count_episodes(now):
                account.returns.add(experience)
            else:
                account.returns.episodes.begun.clear()  # of what is passed over, an end is not known
        if self._job is not None and self._job.done():
            job, self._job = self._job, None
            if (error := job.exception()) is not None:  # training does not end for it
                _log.error("a sample of drift failed", exc_info=error, extra=logs.once("drift"))
        if self._job is None and now >= max(account.sampled_at + PERIOD_S, self._resumes_at):
            account.sampled_at = now
            self._job = self._worker.submit(self._sample, account, order, experience)

    def _may_count_episodes(self, now: float) -> bool:
        """Returns whether this message's episodes are counted: of a fast fleet the first ones of each second are."""
        if now >= self._counts_anew_at:
            self._counts_anew_at, self._counts_left = now + 1.0, _COUNTED_A_SECOND
        self._counts_left -= 1
        return self._counts_left >= 0

    def wait(self) -> None:
        """Waits for the sample under way."""
        if self._job is not None:
            self._job.result()

    def metrics(self) -> dict[str, float]:
        """Returns the largest figures of any actor for a row of metrics, and writes who has an alarm."""
        now = self._clock()
        alarms: dict[str, dict[str, str]] = {}
        most: dict[str, float] = {}
        for actor_id, account in list(self._accounts.items()):
            if now - account.heard_at > _SILENCE_S:
                del self._accounts[actor_id]
                continue
            figures, found = self._judge(account)
            for name, value in figures.items():
                most[name] = max(value, most.get(name, value))
            if found:
                alarms[actor_id] = found
        self._tell(alarms)
        return most | {"actors_drifting": len(alarms)}

    def summary(self) -> dict[str, object]:
        """Returns who drifts at the end, and how, for the summary."""
        return {"actors_drifting": self.alarms}

    def close(self) -> None:
        """Waits for the sample under way, ends the thread, and takes the file back."""
        self._worker.shutdown()
        with self._kept.attempt("alarms of drift"):
            if self._is_ours():
                self._file.unlink(missing_ok=True)

    def _judge(self, account: _Account) -> tuple[dict[str, float], dict[str, str]]:
        figures: dict[str, float] = {}
        found: dict[str, str] = {}
        outside, saturated = account.shares()
        if outside.size:
            figures["observations_outside"] = worst = float(outside.max())
            if worst > OUTSIDE_SHARE:
                found[OUTSIDE] = (
                    f"feature {int(outside.argmax())} of its observations is outside what the policy was calibrated "
                    f"for in {100 * worst:.0f} % of the steps"
                )
        if saturated.size:
            figures["actions_at_bound"] = worst = float(saturated.max())
            if worst > SATURATED_SHARE:
                found[SATURATED] = (
                    f"element {int(saturated.argmax())} of its action rests at one bound in {100 * worst:.0f} % "
                    "of the steps"
                )
        if (returns := account.returns) is not None:
            returns.judge()
            if returns.fall_z is not None:
                figures["return_fall_z"] = returns.fall_z
                if returns.fall_z > FALL_Z:
                    found[RETURNS] = (
                        f"its newest {EPISODES} episodes return {np.mean(returns.newest):.4g} on average, the first of "
                        f"the same policy (version {returns.order.version}) {np.mean(returns.first):.4g}"
                    )
        return figures, found

    def _tell(self, alarms: dict[str, dict[str, str]]) -> None:
        for actor_id, found in alarms.items():
            for kind in found.keys() - self.alarms.get(actor_id, {}).keys():
                _log.warning("actor %s drifts: %s", actor_id, found[kind])
        if alarms != self._written and self._is_ours():
            self._written = alarms
            with self._kept.attempt("alarms of drift"):
                storage.write_atomic(self._file, (json.dumps(alarms, indent=2) + "\n").encode(), mode=0o644, sync=False)
        self.alarms = alarms

    # -- the thread's job -------------------------------------------------------------------------------------------

    def _sample(self, account: _Account, order: messages.Order, experience: messages.Experience) -> None:
        began = time.thread_time()
        observation, action = self._spec.observation, self._spec.action
        steps = min(len(experience.reward), _SAMPLE_STEPS, max(1, _SAMPLE_ELEMENTS // observation.size))
        chosen = np.sort(self._rng.choice(len(experience.reward), steps, replace=False)).astype(np.int64)
        outside = np.zeros(0, np.int64)
        if observation.dtype != "uint8" and (ranges := self._ranges_of(order)) is not None:
            outside = count_outside(recompute.observed(experience, chosen, observation.stack), ranges)
        low = high = np.zeros(0, np.int64)
        if action.kind == "continuous":
            low, high = count_at_bounds(experience.action[chosen], action)
        sample = Sample(steps, outside, low, high)
        if account.samples and account.samples[-1].outside.shape != outside.shape:
            account.samples.clear()  # ranges are known that were not, or the other way round
        account.samples.append(sample)
        self._resumes_at = self._clock() + (time.thread_time() - began) / DUTY

    def _ranges_of(self, order: messages.Order) -> Ranges | None:
        if self._ranges is None or self._ranges[0] != order:
            model = self._models.get(order)
            self._ranges = order, input_ranges(model, self._spec.observation.size) if model is not None else None
        return self._ranges[1]


def input_ranges(model: bytes, size: int) -> Ranges | None:
    """Returns the lowest and the highest value [size] of each feature that a model's int8 input holds unclipped.

    They are those of calibration, and what it left as a margin. None where the model quantizes no input, or a graph is
    not as ours are.
    """
    read, operators = graph.Graph(bytearray(model)), schema.BuiltinOperator
    gain, offset = np.ones(size), np.zeros(size)
    try:
        walk = read.operators()
        for code, operator in walk:
            if code == operators.MUL:
                factor = read.constant(operator.Inputs(1)).astype(np.float64)
                gain, offset = gain * factor, offset * factor
            elif code == operators.ADD:
                offset = offset + read.constant(operator.Inputs(1)).astype(np.float64)
            elif code == operators.QUANTIZE:
                scale, zero_point = (float(of(operator.Outputs(0))[0]) for of in (read.scale, read.zero_point))
                ends = np.array([-128.0 - zero_point, 127.0 - zero_point]) * scale
                is_hi_lo = next(walk, (None, None))[0] == operators.DEQUANTIZE
                # The lower of two numbers reaches beyond the ends of the higher; one alone is rounded to its ends
                ends += ends / input_scaling.LO_GAIN if is_hi_lo else np.array([-0.5, 0.5]) * scale
                one, another = ((end - offset) / gain for end in ends)
                return np.minimum(one, another).astype(np.float32), np.maximum(one, another).astype(np.float32)
            elif code != operators.RESHAPE:
                return None
    except (scales.Unmapped, ValueError, IndexError):
        return None
    return None


def count_outside(observations: NDArray[Any], ranges: Ranges) -> NDArray[np.int64]:
    """Returns in how many of the observations [N, *shape] each feature [size] lies outside."""
    flat, (low, high) = observations.reshape(len(observations), -1), ranges
    counts: NDArray[np.int64] = ((flat < low) | (flat > high)).sum(0)
    return counts


def count_at_bounds(actions: NDArray[Any], spec: specs.ActionSpec) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns how many of the actions [N, *shape] have each element [n] at its lower bound, and at its upper one."""
    flat = actions.reshape(len(actions), -1)
    low, high = np.array(spec.low, np.float32), np.array(spec.high, np.float32)
    margin = (high - low) / 256  # less than a step of int8
    return (flat <= low + margin).sum(0), (flat >= high - margin).sum(0)


def fall(first: NDArray[np.float64], newest: NDArray[np.float64]) -> float:
    """Returns by how many standard errors the newest returns rank lower than the first ones (Mann and Whitney).

    Ties count half, and lessen the error as they should; 0 where all returns are equal.
    """
    n, m = len(first), len(newest)
    _, counts = np.unique(np.concatenate([first, newest]), return_counts=True)
    wins = float((np.sign(first[:, None] - newest[None, :]) + 1).sum() / 2)
    total = n + m
    ties = float((counts.astype(np.float64) ** 3 - counts).sum()) / (total * (total - 1))
    variance = n * m / 12 * (total + 1 - ties)
    return (wins - n * m / 2) / variance**0.5 if variance > 0 else 0.0
