"""Makes of fp32 layers a model that the gate has judged, whose bytes go ahead meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner import config
from learner.networks import layers
from learner.policies import outgoing_policy
from learner.quantize import bits, fp32, gate, ptq
from learner.quantize.tflite import quantizer

LARGE = 400_000
"""Weights of a policy, from which on its digest or pieces take longer than a thread takes to begin."""
_FEW = 8
"""Observations that show whether a policy overflows or is dead, where the gate has nothing else to look for."""
Begin = Callable[[futures.Executor | None], outgoing_policy.OutgoingPolicy]
"""Returns what takes in the bytes of a policy, beside the thread that makes it where one is given."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A model, what the gate says of it, what has taken in its bytes, and what each stage took in ms.

    If it cannot be made, `model` is empty and there are no times.
    """

    model: bytes
    verdict: gate.Verdict
    outgoing: outgoing_policy.OutgoingPolicy
    times_ms: dict[str, float]


class PolicyMaker:
    """Quantizes policies and judges them. For one thread at a time.

    Args:
        spec: What policies are for.
        head: What their output means.
        settings: The gate's.
        precision: One of config.PRECISIONS.
        weight_bits: Bits of the weights, for studies.
    """

    def __init__(
        self,
        spec: specs.EnvSpec,
        head: specs.Head,
        settings: config.GateConfig,
        precision: str = "int8",
        weight_bits: int = bits.BITS_MAX,
    ) -> None:
        self._spec, self._head, self._settings = spec, head, settings
        self._precision, self._weight_bits = precision, weight_bits
        self._refines = precision == "int8" and weight_bits == bits.BITS_MAX
        self._keeps_calibration = head in ptq.HYSTERESIS_HEADS
        self._calibration: ptq.Calibration | None = None  # the newest policy's
        self._calibrator = ptq.Calibrator(ptq.STEPS_BY_HEAD[head], hysteresis=self._keeps_calibration)
        self._quantizer = quantizer.Quantizer()
        self._pieces = futures.ThreadPoolExecutor(1, "publisher-pieces")
        self._outputs = futures.ThreadPoolExecutor(1, "publisher-outputs")

    def prepare(self, policy: layers.PolicyLayers) -> None:
        """Does what policies of this architecture need once, before the first of them is urgent."""
        self._quantizer.prepare(policy, self._spec.observation.shape, self._precision)

    @property
    def is_calibrated(self) -> bool:
        """Returns whether ranges were made ahead, with the policy before."""
        return self._calibration is not None

    @property
    def converted(self) -> int:
        """The policies that TFLiteConverter had to make, since no template took their numbers."""
        return self._quantizer.fallbacks

    @property
    def keeps_ranges(self) -> bool:
        """Returns whether ranges of one policy serve the next."""
        return self._refines and self._keeps_calibration

    def make(
        self,
        policy: layers.PolicyLayers,
        calibration: NDArray[np.generic],
        held_back: NDArray[np.generic],
        begin: Begin,
        previous: bytes | None,
    ) -> Made:
        """Quantizes and judges. Ranges that were made ahead serve once.

        Args:
            policy: fp32 weights.
            calibration: [M, *shape] observations that set the ranges.
            held_back: [M', *shape] other observations, for the gate.
            begin: Returns what takes in the policy's bytes.
            previous: The model that was published before.
        """
        began, is_large = time.monotonic(), sum(a.size for a in layers.arrays(policy).values()) > LARGE
        if self._refines and self._calibration is None:
            self.calibrate(policy, calibration)
        calibrated, kept, self._calibration = time.monotonic(), self._calibration, None
        centred = kept.centred(policy) if kept else policy
        outgoing = begin(self._pieces if is_large else None)
        try:
            if kept:
                model = self._quantizer.quantize(centred, kept.params, calibration, outgoing.add)
            else:
                model = self._quantizer.convert(
                    policy, calibration, self._precision, outgoing.add, weight_bits=self._weight_bits
                )
        except errors.PolicyError as error:  # weights that are not finite; training may yet be resumed from before
            return Made(b"", gate.Verdict(False, error.reason), outgoing, {})
        if outgoing.size != len(model):  # TFLiteConverter made it
            outgoing.cancel()
            outgoing = begin(None)
            outgoing.add(model)
        quantized = time.monotonic()
        if self._quantizer.is_faithful:
            passed = quantized
            verdict = self._judge_faithful(model, policy, held_back, previous)
        else:
            outputs: gate.Exact
            if is_large:
                outputs = self._outputs.submit(fp32.outputs, centred, held_back)
            else:
                outputs = fp32.outputs(centred, held_back)
            passed = time.monotonic()
            verdict = gate.judge_policy(
                model, outputs, held_back, self._spec.action, self._settings, previous, self._head
            )
        times_ms = {
            "calibrate_ms": (calibrated - began + passed - quantized) * 1e3,
            "quantize_ms": (quantized - calibrated) * 1e3,
            "gate_ms": (time.monotonic() - passed) * 1e3,
        }
        return Made(model, verdict, outgoing, times_ms)

    def _judge_faithful(
        self, model: bytes, policy: layers.PolicyLayers, held_back: NDArray[np.generic], previous: bytes | None
    ) -> gate.Verdict:
        """Judges by a few observations; those may be equal, so that only all of them show that a policy is dead."""
        if model == previous:
            return gate.Verdict(False, "identical")
        verdict = gate.judge_faithful(fp32.outputs(policy, held_back[:_FEW]), self._head)
        if verdict.reason == "dead":
            verdict = gate.judge_faithful(fp32.outputs(policy, held_back), self._head)
        return verdict

    def calibrate(self, policy: layers.PolicyLayers, calibration: NDArray[np.generic]) -> None:
        """Makes the ranges that the next policy is quantized with."""
        self._calibration = self._calibrator.calibrate(policy, calibration)

    def close(self) -> None:
        """Ends the threads."""
        self._pieces.shutdown()
        self._outputs.shutdown()
