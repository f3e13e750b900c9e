"""`actorq-learner quantize`: a Keras model and observations in, a judged .tflite and a report out."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors
from broker.program import storage
from learner import config
from learner.files import run_directory
from learner.quantize import gate
from learner.quantize.distil import distillation
from learner.quantize.tflite import interpreter
from learner.quantize.user_models import keras_aware, keras_model, layer_norm, observations, operations

FloatArray = NDArray[np.float32]

ACTION_ERROR_MAX = 0.05
"""Largest mean error of a continuous output, relative to its range, that passes."""


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of the command line."""

    model: Path
    calibration: Path
    output: Path
    precision: str
    outputs: distillation.Outputs
    aware: bool
    steps: int
    seed: int
    force: bool
    verbose: bool

    @property
    def report(self) -> Path:
        """The path of the report, beside the model."""
        return self.output.with_suffix(".json")


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A converted model and how it was judged.

    Attributes:
        network: Network that was converted.
        model: Bytes of the .tflite.
        exact: fp32 outputs that it was judged by.
        verdict: Decision of the gate.
        relative_mean, relative_max: Error per output relative to that output's range.
        failing: Mean of `distillation.failings`.
    """

    network: keras_model.Network
    model: bytes
    exact: FloatArray
    verdict: gate.ChoiceVerdict
    relative_mean: list[float]
    relative_max: list[float]
    failing: float

    def measured(self) -> dict[str, Any]:
        """Returns its part of the report."""
        relative = {"relative_mean": self.relative_mean, "relative_max": self.relative_max}
        return {**dataclasses.asdict(self.verdict), **relative}


def run(request: Request) -> dict[str, Any]:
    """Quantizes, judges and writes both files.

    Returns:
        The report.

    Raises:
        ConfigError: The files or observations that the command line names do not do.
        PolicyError: The model cannot be quantized, or acts otherwise than before.
    """
    for path in (request.output, request.report):
        if path.exists() and not request.force:
            raise errors.ConfigError("the file exists", where=str(path), todo="--force overwrites it")
    if request.aware and request.precision != "int8":
        raise errors.ConfigError(
            f"--aware is for int8, and {request.precision} was asked for", todo="leave out one of the two"
        )
    rows = observations.load(request.calibration)
    model = keras_model.load(request.model)
    _check_shapes(model, rows, request)
    learn, judge = distillation.split(len(rows), request.seed)
    calibration, judged = rows[learn], rows[judge]
    if not np.isfinite(keras_model.outputs(model, rows)).all():
        raise errors.PolicyError(
            "the model answers NaN or infinite to some of the observations",
            reason="not_finite",
            where=str(request.model),
            todo="look at it in Keras first: model.predict(observations)",
        )
    plain = _plain(request, model, calibration, judged)
    aware = _aware(request, model, calibration, judged, plain) if request.aware else None
    chosen = min((plain, aware), key=lambda one: (not one.verdict.passed, one.failing)) if aware else plain
    if not chosen.verdict.passed:
        raise _refusal(request, chosen)
    result = _report(request, model, len(calibration), len(judged), plain, aware, chosen)
    storage.write_atomic(request.output, chosen.model, mode=0o644)
    storage.write_atomic(request.report, (json.dumps(result, indent=1) + "\n").encode(), mode=0o644)
    return result


def _check_shapes(model: Any, rows: NDArray[Any], request: Request) -> None:
    wanted, given = tuple(model.inputs[0].shape[1:]), rows.shape[1:]
    if wanted != given:
        raise errors.ConfigError(
            f"one observation has the shape {given}, and the model takes {wanted}",
            where=str(request.calibration),
            todo="calibrate with what the model is fed: raw observations, [N, *shape]",
        )
    if model.outputs[0].shape[1] < 2 and request.outputs == "values":
        raise errors.ConfigError(
            "the model has a single output, of which no best action can be taken",
            where=str(request.model),
            todo="--outputs actions judges continuous outputs",
        )


def _plain(request: Request, model: Any, calibration: NDArray[Any], judged: NDArray[Any]) -> _Candidate:
    """Converts the model as it is, with the form of layer normalisation that fails less on calibration data."""
    rewrites = request.precision == "int8" and keras_model.has_layer_norm(model)
    exact = keras_model.outputs(model, calibration) if rewrites else None
    tried: list[tuple[float, int, keras_model.Network, bytes]] = []
    for form in layer_norm.FORMS if rewrites else (None,):
        network = keras_model.prepare(model, calibration, form=form)
        converted = keras_model.to_tflite(
            network, network.weights, calibration, request.precision, verbose=request.verbose
        )
        failing = 0.0
        if exact is not None:
            failing = float(distillation.judge(converted, calibration, exact, request.outputs).mean())
        tried.append((failing, len(tried), network, converted))
    _, _, network, converted = min(tried)
    return _judge(request, network, converted, keras_model.outputs(model, judged), judged)


def _aware(
    request: Request, model: Any, calibration: NDArray[Any], judged: NDArray[Any], plain: _Candidate
) -> _Candidate:
    network = keras_model.prepare(model, calibration, form=plain.network.form, centred=request.outputs == "values")
    exact = network.outputs(calibration)
    weights = keras_aware.distil(
        network, calibration, exact, outputs=request.outputs, steps=request.steps, seed=request.seed
    )
    converted = keras_model.to_tflite(network, weights, calibration, "int8", verbose=request.verbose)
    return _judge(request, network, converted, network.outputs(judged), judged)


def _judge(
    request: Request, network: keras_model.Network, model: bytes, exact: FloatArray, judged: NDArray[Any]
) -> _Candidate:
    try:
        answer, low, high = interpreter.run(model, judged)
    except RuntimeError as error:
        raise errors.PolicyError(
            f"the runtime does not run the {request.precision} model: {error}",
            reason="unrunnable",
            where=str(request.model),
            todo="a layer may be nearly dead, its outputs almost constant: look at it, or take another --precision",
        ) from error
    off = np.abs(answer - exact)
    spread = distillation.spread(exact)
    relative = (off.mean(0) / spread).tolist()
    if request.outputs == "values":
        verdict = gate.judge(model, exact, judged, config.GateConfig())
    else:
        ends = float(((answer <= low) | (answer >= high)).mean())  # where tanh ends, so it refuses nothing
        reason = _reason_against_actions(answer, max(relative))
        verdict = gate.ChoiceVerdict(not reason, reason, float(off.max()), float(off.mean()), saturation=ends)
    failing = float(distillation.failings(answer, exact, request.outputs).mean())
    return _Candidate(network, model, exact, verdict, relative, (off.max(0) / spread).tolist(), failing)


def _reason_against_actions(answer: FloatArray, error: float) -> str:
    if not np.ptp(answer, axis=0).any():
        return "dead"
    return "disagrees" if error > ACTION_ERROR_MAX else ""


def _refusal(request: Request, chosen: _Candidate) -> errors.PolicyError:
    verdict = chosen.verdict
    if request.outputs == "values":
        found = (
            f"greedy actions agree on {verdict.agreement:.1%} of observations, {verdict.agreement_weighted:.1%} when"
            f" weighted by fp32's gap; the best two outputs are equal on {verdict.ties:.1%};"
            f" {verdict.saturation:.1%} of outputs are at an end of their range"
        )
    else:
        found = f"an output is off by {max(chosen.relative_mean):.1%} of its range on average"
    if request.precision == "int8" and not request.aware:
        todo = "--aware trains the weights against the fp32 outputs until int8 does as well"
    else:
        todo = "calibrate with more observations, of all that the policy meets; or --precision dynamic or float16"
    return errors.PolicyError(
        f"the {request.precision} model acts otherwise than the original ({verdict.reason}): {found}",
        reason=verdict.reason,
        where=str(request.model),
        todo=todo,
    )


def _report(
    request: Request,
    model: Any,
    calibrated: int,
    judged: int,
    plain: _Candidate,
    aware: _Candidate | None,
    chosen: _Candidate,
) -> dict[str, Any]:
    network = chosen.network
    unused = np.zeros((1, *model.inputs[0].shape[1:]))  # float32 needs no calibration
    float32 = keras_model.prepare(model, unused)
    return {
        "model": str(request.model),
        "output": str(request.output),
        "precision": request.precision,
        "outputs": request.outputs,
        "written": "aware" if chosen is aware else "plain",
        "levelled": network.centred,
        "layer_norm": network.form,
        "per_feature_input": network.affine is not None,
        "sha256": hashlib.sha256(chosen.model).hexdigest(),
        "bytes": {
            "float32": len(keras_model.to_tflite(float32, float32.weights, unused, "float32")),
            "model": len(chosen.model),
        },
        "rows": {"calibration": calibrated, "judged": judged},
        "plain": plain.measured(),
        "aware": aware.measured() if aware else None,
        "runtime": f"ai-edge-litert {importlib.metadata.version('ai-edge-litert')}",
        "delegate": interpreter.kernels(chosen.model),
        "operations": [dataclasses.asdict(operation) for operation in operations.list_operations(chosen.model)],
        "versions": run_directory.versions(),
    }
