"""Compares an int8 model with its fp32 twin on held-back observations, before anything is published.

The int8 model runs as .tflite on the runtime that actors use, so what is judged is what ships.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from ai_edge_litert import interpreter as litert
from numpy.typing import NDArray

from learner import chatter, config

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found. `reason` is empty when the policy may be published.

    Attributes:
        passed: May be published.
        reason: Slug under which refusals are counted: `identical` (nothing new, a skip rather than a failure),
            `unrunnable` (the runtime refuses the model), `not_finite`, `dead`, `disagrees`, `ties` or `saturated`.
        agreement: Share of observations where both choose the same action.
        agreement_weighted: The same, each observation weighted by fp32's gap between its best two actions: near-ties,
            where either choice is as good, hardly count.
        ties: Share of observations where the best two int8 outputs are equal.
        error_max: Largest difference of an output, in its own unit.
        error_mean: Mean absolute difference.
        saturation: Share of observations where the range ends too early: the best two int8 outputs are equal, at an end
            of it. A single output there is as good as any that is clear.
    """

    passed: bool
    reason: str
    agreement: float = 0.0
    agreement_weighted: float = 0.0
    ties: float = 0.0
    error_max: float = 0.0
    error_mean: float = 0.0
    saturation: float = 0.0


def judge(
    int8: bytes,
    exact: FloatArray,
    observations: NDArray[Any],
    settings: config.GateConfig,
    previous: bytes | None = None,
) -> Verdict:
    """Decides whether a policy with action values or advantages as outputs may be published.

    Args:
        int8: The model to judge.
        exact: Outputs [N, n] of the same policy in fp32 (networks.outputs).
        observations: Sample [N, *shape] that took no part in calibration.
        settings: Thresholds.
        previous: The model that was published last.
    """
    if int8 == previous:
        return Verdict(False, "identical", agreement=1.0, agreement_weighted=1.0)
    try:
        quantized, low, high = run(int8, observations)
    except RuntimeError:  # XNNPACK takes no rescaling factor beyond its range, as behind a layer that is nearly dead
        return Verdict(False, "unrunnable")
    if not (np.isfinite(quantized).all() and np.isfinite(exact).all()):
        return Verdict(False, "not_finite")

    same = quantized.argmax(1) == exact.argmax(1)
    best, second = np.partition(exact, -2, axis=1)[:, :-3:-1].T
    gap = (best - second).astype(np.float64)
    best8, second8 = np.partition(quantized, -2, axis=1)[:, :-3:-1].T
    error = np.abs(quantized - np.clip(exact, low, high))  # what is clear may saturate (`refine.decisive_range`)
    verdict = Verdict(
        passed=True,
        reason="",
        agreement=float(same.mean()),
        agreement_weighted=float(gap[same].sum() / gap.sum()) if gap.any() else 1.0,
        ties=float((best8 == second8).mean()),
        error_max=float(error.max()),
        error_mean=float(error.mean()),
        saturation=float(((best8 == second8) & ((best8 <= low) | (best8 >= high))).mean()),
    )
    reason = _reason(verdict, settings, dead=not np.ptp(quantized, axis=0).any())
    return dataclasses.replace(verdict, passed=not reason, reason=reason)


def _reason(verdict: Verdict, settings: config.GateConfig, dead: bool) -> str:
    if dead:
        return "dead"
    if verdict.agreement_weighted < settings.gate_agreement_min:
        return "disagrees"
    if verdict.saturation > settings.gate_saturation_max:
        return "saturated"
    if verdict.ties > settings.gate_ties_max:
        return "ties"
    return ""


def run(model: bytes, observations: NDArray[Any]) -> tuple[FloatArray, float, float]:
    """Outputs [N, n] of one batched call, and the least and greatest value that int8 can give (else -inf, inf)."""
    interpreter = litert.Interpreter(model_content=model, num_threads=1)
    entry = interpreter.get_input_details()[0]["index"]
    exit_ = interpreter.get_output_details()[0]["index"]
    try:
        outputs = _invoke(interpreter, entry, exit_, observations)
    except RuntimeError:  # the graph reshapes to a fixed batch
        outputs = np.concatenate([_invoke(interpreter, entry, exit_, row[None]) for row in observations])
    low, high = -np.inf, np.inf
    for operator in interpreter._get_ops_details():
        if operator["op_name"] == "DEQUANTIZE" and exit_ in operator["outputs"]:
            (details,) = [t for t in interpreter.get_tensor_details() if t["index"] == operator["inputs"][0]]
            scale, zero_point = details["quantization"]
            low, high = scale * (-127.5 - zero_point), scale * (126.5 - zero_point)  # half a step inside the ends
    return outputs, low, high


def _invoke(interpreter: Any, entry: int, exit_: int, observations: NDArray[Any]) -> FloatArray:
    if not np.array_equal(interpreter.get_input_details()[0]["shape"], observations.shape):
        interpreter.resize_tensor_input(entry, observations.shape)
    with chatter.hidden():
        interpreter.allocate_tensors()
    interpreter.set_tensor(entry, observations.astype(np.float32))
    interpreter.invoke()
    outputs: FloatArray = interpreter.get_tensor(exit_)
    return outputs
