"""Computes one cell of a study: makes a policy's model, compares it on held-out states, and has it played."""

from __future__ import annotations

import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors
from broker.program import storage
from learner.networks import layers
from learner.quantize import compare
from learner.quantize.tflite import interpreter
from learner.study import play
from learner.study.sweep import columns, opening, plan, policies
from learner.study.user_models import recipe, returns, subject

Record = dict[str, Any]
_BINS = 32


def compute(entry: policies.Entry, column: str, request: plan.Request, directory: Path) -> Record:
    """Computes a cell.

    Returns:
        Its figures: `returns` [episodes], what states tell, and the model's digest; or why there are none, `failed`.

    Raises:
        Unusable: The policy has no cells at all.
        OSError: Of the disk.
    """
    began = time.monotonic()
    ready = opening.opened(entry, request, directory)
    record: Record = {"policy": entry.name, "column": column, "failed": ""}
    try:
        record |= _figures(ready, column, request)
    except errors.ActorqError as error:
        record["failed"] = error.what
    except Exception as error:  # a converter's, or a runtime's: one cell less, and the study goes on
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and storage.of_disk(error)):
            raise
        record["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return record | {"wall_s": round(time.monotonic() - began, 2)}


def _figures(ready: opening.Opened, column: str, request: plan.Request) -> Record:
    found: Record = {}
    seed = request.seed + returns.FRESH  # none that calibration has seen, and the same ones for every column
    if column == plan.RANDOM:
        played = play.score(play.RANDOM, ready.task, request.episodes, seed)
    else:
        if column == plan.FP32:
            model, found = ready.fp32, _about(ready)
        else:
            means = columns.Means(ready.calibration, ready.task, request.steps, request.distil_rounds, request.seed)
            model = columns.make(column, ready.policy, means)
        found |= {"bytes": len(model), "sha256": hashlib.sha256(model).hexdigest()}
        found |= _on_states(ready, model)
        with tempfile.TemporaryDirectory(prefix="actorq-") as scratch:
            file = Path(scratch, "policy.tflite")
            file.write_bytes(model)
            played = play.score(file, ready.task, request.episodes, seed, ready.policy.head)
    if not np.isfinite(played.episode_return).all():
        raise errors.EnvironmentFailure("the environment gave rewards that are not finite")
    return found | {
        "returns": [float(value) for value in played.episode_return],
        "runtime": played.runtime,
        "delegate": played.delegate,
    }


def _about(ready: opening.Opened) -> Record:
    """Returns what the policy is; the cell of fp32 has it."""
    return {
        "env": ready.task.env_id,
        "source": ready.policy.source,
        "said": ready.said,
        "outputs": ready.policy.outputs,
        "states": {"calibration": len(ready.calibration), "judged": len(ready.judged)},
        "weights": _weights(ready.policy),
    }


def _on_states(ready: opening.Opened, model: bytes) -> Record:
    """Returns how far it acts as fp32 on states of held-back episodes."""
    answer, _, _ = interpreter.run(model, ready.judged)
    if not np.isfinite(answer).all():
        raise errors.PolicyError("it answers NaN or infinite", reason="not_finite")
    if ready.policy.outputs == "values":
        states = compare.states(ready.exact, answer)
        return {"agreement": states.agreement, "ties": states.ties}
    compared = compare.actions if ready.policy.low is None else compare.clipped_actions
    actions = compared(ready.exact, answer, ready.policy.action(ready.exact))
    return {"action_error_mean": actions.error_mean, "action_error_p99": actions.error_p99}


def _weights(policy: subject.Subject) -> list[Record]:
    """Returns how the weights of each layer are spread; nothing of a model that is no chain of layers."""
    if not isinstance(policy, recipe.ChainSubject):
        return []
    return [_spread(layer.kernel) for layer in layers.weighted(policy.policy.layers)]


def _spread(kernel: NDArray[np.float32]) -> Record:
    low, high = float(kernel.min()), float(kernel.max())
    counts, _ = np.histogram(kernel, _BINS, (low, high if high > low else low + 1))
    return {
        "shape": list(kernel.shape),
        "min": low,
        "max": high,
        "std": float(kernel.std(dtype=np.float64)),
        "histogram": counts.tolist(),
    }
