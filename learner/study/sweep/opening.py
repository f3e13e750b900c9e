"""Opens a policy of a study: as a subject of quantization, with its environment and the observations it made there."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, specs
from broker.program import storage
from learner.networks import layers
from learner.quantize import scales
from learner.study import play, trained
from learner.study.sweep import plan, policies
from learner.study.user_models import reading, recipe, subject
from learner.study.user_models.formats import chain, observations

_ROWS_MAX, _ROWS_MIN = 16_384, 256
_BYTES_MAX = 64 << 20
OBSERVATIONS = "observations"
"""The folder of a study that holds them until it is complete."""


class Unusable(Exception):
    """A policy has no cells at all; says why, in one line."""


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A policy that is ready for its cells.

    Attributes:
        policy: What is quantized.
        task: What it plays.
        fp32: Its bytes as it is.
        calibration: Observations [N, *shape] that set the ranges.
        judged: Others, of held-back episodes.
        exact: fp32 outputs [M, n] for those.
        said: What was found beside it, or does not map, in one line.
    """

    policy: subject.Subject
    task: play.Task
    fp32: bytes
    calibration: NDArray[Any]
    judged: NDArray[Any]
    exact: NDArray[np.float32]
    said: str


@functools.lru_cache(maxsize=2)
def opened(entry: policies.Entry, request: plan.Request, directory: Path) -> Opened:
    """Reads a policy, and has it played once, by whichever process comes first.

    Args:
        entry: Which one.
        request: What is asked for.
        directory: Of the study.

    Raises:
        Unusable: It has no environment, cannot be read, or is for another one.
    """
    try:
        return _opened(entry, request, directory)
    except errors.ActorqError as error:
        raise Unusable("; ".join(filter(None, (error.what, error.todo)))) from error
    except (scales.Unmapped, ValueError) as error:
        raise Unusable(f"it cannot be read: {error}") from error


def _opened(entry: policies.Entry, request: plan.Request, directory: Path) -> Opened:
    path = Path(entry.path)
    run = trained.load(path) if entry.kind == policies.RUN else None
    env = entry.env or (run.env_id if run else "")
    if not env:
        raise errors.ConfigError(
            "its environment is unknown", todo=f"call it ALGO-ENV{path.suffix}, as in dqn-CartPole-v1, or give --env"
        )
    task = play.Task(env, request.env_kwargs, request.frame_stack)
    spec = task.spec()
    if spec.action.kind == "multi_discrete":
        raise errors.SpecError(f"{env} takes several choices at once, and a study has no figures of those")
    policy, said = (recipe.ChainSubject(of_run(run, entry.algorithm)), "") if run else _read(path, spec)
    kind = "values" if spec.action.kind == "discrete" else "actions"
    if (policy.shape, policy.size, policy.outputs) != (spec.observation.shape, spec.action.size, kind):
        raise errors.SpecError(
            f"it maps {list(policy.shape)} to {policy.size} {policy.outputs}, and {env} has {spec.describe()}",
            todo="name the environment that it was trained for",
        )
    if kind == "values" and policy.size < 2:
        raise errors.SpecError("it has a single output, of which no best action can be taken")
    fp32 = policy.float32()
    rows, episodes = _observed(entry, policy, task, fp32, request, directory)
    learn, judge = observations.split(episodes, len(rows), request.seed)
    calibration, judged = _thinned(rows[learn]), _thinned(rows[judge])
    exact = policy.exact(judged)
    if not (np.isfinite(exact).all() and np.isfinite(policy.exact(calibration)).all()):
        raise errors.PolicyError("it answers NaN or infinite to what it sees", todo="its weights are damaged")
    return Opened(policy, task, fp32, calibration, judged, exact, said)


def _read(path: Path, spec: specs.EnvSpec) -> tuple[subject.Subject, str]:
    """Reads a file: what it does not tell of its actions is the environment's to say."""
    low, high = None, None
    is_continuous = spec.action.kind == "continuous"
    if is_continuous and path.suffix != ".zip":  # an agent has its own
        low, high = np.array(spec.action.low), np.array(spec.action.high)
    kind: Any = "actions" if is_continuous else None
    return reading.read(path, outputs=kind, low=low, high=high, normaliser=None, verbose=False)


def _observed(
    entry: policies.Entry,
    policy: subject.Subject,
    task: play.Task,
    fp32: bytes,
    request: plan.Request,
    directory: Path,
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Returns what fp32 saw [N, *shape], and the episode of each; from the study's own file once there is one."""
    file = directory / OBSERVATIONS / f"{hashlib.sha256(entry.name.encode()).hexdigest()[:16]}.npz"
    with storage.locked(file):
        if not file.exists():
            part = file.with_name(f".{file.stem}.part.npz")
            with tempfile.TemporaryDirectory(prefix="actorq-") as scratch:
                model = Path(scratch, "fp32.tflite")
                model.write_bytes(fp32)
                play.score(model, task, request.calibration_episodes, request.seed, policy.head, part)
            with open(part, "rb") as written:
                os.fsync(written.fileno())
            part.replace(file)
    return observations.load(file)


def _thinned(rows: NDArray[Any]) -> NDArray[Any]:
    """Returns as many rows, evenly spread, as there is time and memory for: convolutions take all of them at once."""
    size = 4 * int(np.prod(rows.shape[1:]))
    most = min(_ROWS_MAX, max(_ROWS_MIN, _BYTES_MAX // size))
    return rows[:: -(-len(rows) // most)]


def of_run(run: trained.Trained, algorithm: str) -> chain.Policy:
    """Returns what a run's policy does greedily: its choice, or the mode of the distribution that it samples from."""
    shape, source = run.observations.shape[1:], f"run, {algorithm or run.head}"
    if run.action.kind == "discrete":
        return chain.Policy(run.needed, shape, "values", None, None, False, source)
    low, high, size = np.array(run.action.low), np.array(run.action.high), run.action.size
    if run.head == "deterministic":
        return chain.Policy(run.needed, shape, "actions", low, high, False, source)
    grown, ends = chain.Chain(shape), (low, high)
    for layer in run.needed:
        if isinstance(layer, layers.Dense):
            last = layer is layers.weighted(run.needed)[-1]
            kernel, bias = (layer.kernel[:size], layer.bias[:size]) if last else (layer.kernel, layer.bias)
            grown.dense(kernel, bias)
            grown.activate(layer.activation)
        elif isinstance(layer, layers.Conv2D):
            grown.convolve(layer.kernel, layer.bias, layer.stride)
            grown.activate(layer.activation)
        elif isinstance(layer, layers.Flatten):
            grown.flatten()
        else:
            grown.affine(layer.gain[:size], layer.offset[:size])
    if run.head == "squashed_gaussian":
        grown.clip(-specs.SQUASHED_MEAN_MAX, specs.SQUASHED_MEAN_MAX)
        grown.activate("tanh")
        grown.affine((high - low) / 2, (high + low) / 2)
    found, clips = grown.bounded(*ends)
    return chain.Policy(found, shape, "actions", low, high, clips, source)
