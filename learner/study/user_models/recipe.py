"""Policies that are chains of layers: the way of the learner's own, through the code that publishes them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import layers
from learner.quantize import calibrate, channel_splitting, fp32, ptq
from learner.quantize.distil import aware, distillation
from learner.quantize.tflite import convert, interpreter, quantizer
from learner.study.user_models import subject
from learner.study.user_models.formats import chain

FloatArray = NDArray[np.float32]
_log = logging.getLogger(__name__)
_ROWS_MAX = 16_384
_CLIPPED_STEPS: tuple[ptq.Step, ...] = ("clipped_outputs", *ptq.ACTION_STEPS[1:])


class ChainSubject(subject.Subject):
    """A policy that is a chain of layers."""

    way = "recipe"

    def __init__(self, policy: chain.Policy) -> None:
        self.policy = policy
        self.shape, self.outputs, self.size = policy.shape, policy.kind, policy.outputs
        self.source = policy.source
        self.low, self.high = policy.low, policy.high
        self._quantizer = quantizer.Quantizer()

    def float32(self) -> bytes:
        unused = np.zeros((1, *self.shape), np.float32)
        return convert.convert(self.policy.layers, unused, "float32", per_feature=False)

    def exact(self, observations: NDArray[Any]) -> FloatArray:
        return fp32.outputs(self.policy.layers, observations)

    def make(self, calibration: NDArray[Any], precision: str, *, beyond: float = ptq.BEYOND) -> subject.Made:
        return self._make(self.policy.layers, calibration, precision, beyond)

    def make_aware(self, calibration: NDArray[Any], steps: int, seed: int) -> subject.Made:
        def judge(candidate: layers.PolicyLayers, rows: NDArray[Any], exact: FloatArray) -> FloatArray:
            model = self._make(candidate, calibration, "int8", ptq.BEYOND).model
            wanted = np.clip(exact, self.low, self.high) if self.policy.clips else exact
            return distillation.judge(model, rows, wanted, self.outputs)

        trained = aware.distil(
            self.policy.layers, calibration, steps=steps, seed=seed, outputs=self.outputs, judge=judge
        )
        return self._make(trained, calibration, "int8", ptq.BEYOND)

    def make_refined(self, calibration: NDArray[Any], *, beyond: float = ptq.BEYOND) -> subject.Made | None:
        """Makes the int8 model with `split_and_refit`; None where no hidden layer could be refined."""
        original = self.policy.layers
        if len(layers.weighted(original)) < 2 or not isinstance(layers.weighted(original)[-1], layers.Dense):
            return None
        sample = calibration[:: -(-len(calibration) // _ROWS_MAX)]
        calibrated = calibrator(self.policy, beyond=beyond).calibrate(original, sample)
        params = dataclasses.replace(calibrated.params, hysteresis=False)

        def run(body: layers.PolicyLayers, inner: calibrate.QuantParams) -> FloatArray:
            model = self._quantizer.quantize(body, inner, sample)
            found: FloatArray = interpreter.run(model, sample)[0]
            return found

        centred = calibrated.centred(original)
        end = max(map(abs, params.outputs[-1])) if self.outputs == "actions" else np.inf
        try:
            refined, params = channel_splitting.split_and_refit(centred, params, sample, run, end=end)
        except (RuntimeError, np.linalg.LinAlgError) as error:  # of a runtime that does not run it, or a dead layer
            _log.info("not refined: %s", str(error).partition("\n")[0])
            return None
        model = self._quantizer.quantize(refined, params, sample)
        notes = {
            "levelled": centred is not original,
            "layer_norm": None,
            "per_feature_input": params.affine is not None,
        }
        return subject.Made(model, lambda rows: fp32.outputs(centred, rows), notes)

    def _make(
        self, policy: layers.PolicyLayers, calibration: NDArray[Any], precision: str, beyond: float
    ) -> subject.Made:
        sample = calibration[:: -(-len(calibration) // _ROWS_MAX)]
        has_features = isinstance(layers.weighted(policy)[0], layers.Dense)
        notes = {"levelled": False, "layer_norm": None, "per_feature_input": has_features}
        if precision != "int8":
            return subject.Made(self._quantizer.convert(policy, sample, precision), self.exact, notes)
        calibrated = calibrator(self.policy, beyond=beyond).calibrate(policy, sample)
        centred = calibrated.centred(policy)
        model = self._quantizer.quantize(centred, calibrated.params, sample)
        notes["levelled"] = centred is not policy
        original = self.policy.layers if policy is not self.policy.layers else centred
        return subject.Made(model, lambda rows: fp32.outputs(original, rows), notes)


def calibrator(policy: chain.Policy, *, beyond: float = ptq.BEYOND) -> ptq.Calibrator:
    """Returns what finds the ranges of such a policy, as of one that the learner publishes with its head."""
    steps = _CLIPPED_STEPS if policy.clips else ptq.STEPS_BY_HEAD[policy.head]
    return ptq.Calibrator(
        steps,
        hysteresis=policy.head in ptq.HYSTERESIS_HEADS,
        beyond=beyond,
        output_end=1.0 if policy.clips else specs.SQUASHED_MEAN_MAX,
    )
