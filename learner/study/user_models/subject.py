"""What is quantized, whichever way it goes: a chain of layers (`recipe`), or any Keras model (`converted`)."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from learner.quantize.distil import distillation

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A converted model.

    Attributes:
        model: Bytes of the .tflite.
        exact: Gives the fp32 outputs [N, n] to judge it by, for observations [N, *shape].
        notes: What is special about it, by name of the report.
    """

    model: bytes
    exact: Callable[[NDArray[Any]], FloatArray]
    notes: dict[str, Any]


class Subject(abc.ABC):
    """A policy to quantize.

    Attributes:
        way: How its first candidate is made: `recipe` as the learner's own, `plain` by TFLiteConverter.
        source: What kind of file and algorithm it is, for people.
        shape: Of one observation.
        size: Number of outputs.
        outputs: What they are.
        low, high: Bounds of continuous actions [size]; None where they are not known.
    """

    way: ClassVar[str]
    source: str
    shape: tuple[int, ...]
    size: int
    outputs: distillation.Outputs
    low: NDArray[Any] | None = None
    high: NDArray[Any] | None = None

    @abc.abstractmethod
    def float32(self) -> bytes:
        """Returns the policy as it is, as a float32 .tflite for raw observations."""

    @abc.abstractmethod
    def exact(self, observations: NDArray[Any]) -> FloatArray:
        """Returns its fp32 outputs [N, n] for raw observations [N, *shape]."""

    @abc.abstractmethod
    def make(self, calibration: NDArray[Any], precision: str, *, beyond: float) -> Made:
        """Converts it; `beyond` is the headroom of the input's features (`ptq.Calibrator`), where they have any."""

    @abc.abstractmethod
    def make_aware(self, calibration: NDArray[Any], steps: int, seed: int) -> Made:
        """Trains its weights through simulated int8, and converts them."""

    def action(self, exact: FloatArray) -> specs.ActionSpec:
        """Returns the unit of errors of continuous actions: their bounds, or the range of what fp32 answers."""
        low, high = (self.low, self.high) if self.low is not None else (exact.min(0), exact.max(0))
        assert low is not None
        assert high is not None
        low, high = np.broadcast_to(low, (self.size,)), np.broadcast_to(high, (self.size,))
        high = np.where(high > low, high, low + 1)
        return specs.ActionSpec(
            "continuous", shape=(self.size,), low=tuple(map(float, low)), high=tuple(map(float, high))
        )

    @property
    def head(self) -> specs.Head:
        """The head by which actors read its outputs."""
        return "q_values" if self.outputs == "values" else "deterministic"
