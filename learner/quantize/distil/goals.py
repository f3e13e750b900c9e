"""What a student is to do, the choices or the actions of a policy of any kind; and what it is to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors
from learner.networks import layers
from learner.quantize import fp32, ptq
from learner.quantize.distil import compression, distillation

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """What a student is to do.

    Attributes:
        exact: Gives the outputs [N, n] for raw observations [N, *shape].
        outputs: What they are.
        shape: Of one observation.
        size: n.
        own: Its layers, where it is a chain of them: a student of the same shape begins with those.
        clips: Whether actors clip what the last layer puts out to -1 and 1, in front of `rescale`.
        last: Activation of the last layer.
        rescale: Brings -1 and 1 to the bounds of the action; None where there are none.
    """

    exact: Callable[[NDArray[Any]], FloatArray]
    outputs: distillation.Outputs
    shape: tuple[int, ...]
    size: int
    own: layers.PolicyLayers | None = None
    clips: bool = False
    last: layers.Activation = "none"
    rescale: layers.Rescale | None = None

    @classmethod
    def of(
        cls, policy: layers.PolicyLayers, shape: tuple[int, ...], outputs: distillation.Outputs, *, clips: bool = False
    ) -> Teacher:
        """Makes one of layers for raw observations."""
        last, end = layers.weighted(policy)[-1], policy[-1]
        return cls(
            exact=lambda rows: fp32.outputs(policy, rows),
            outputs=outputs,
            shape=shape,
            size=last.bias.size,
            own=policy,
            clips=clips,
            last=last.activation,
            rescale=end if isinstance(end, layers.Rescale) else None,
        )

    def target(self, exact: FloatArray) -> FloatArray:
        """Returns outputs [N, n] as a student's last layer is to have them: in front of `rescale`, in like units."""
        if self.outputs == "values":
            return exact
        if self.rescale is None:
            return exact / distillation.spread(exact)
        inner: FloatArray = (exact - self.rescale.offset) / self.rescale.gain
        return np.clip(inner, -1, 1) if self.clips else inner

    def failings(self, answer: FloatArray, exact: FloatArray) -> FloatArray:
        """Returns how badly a student's outputs [N, n] stand for `exact`, per observation [N]; 0 is perfect.

        See `distillation.failings`. Of actions with bounds it is the mean error within them, in their range.
        """
        if self.outputs == "values" or self.rescale is None:
            return distillation.failings(answer, exact, self.outputs)
        ends = self.rescale.offset - self.rescale.gain, self.rescale.offset + self.rescale.gain
        low, high = np.minimum(*ends), np.maximum(*ends)
        failing: FloatArray = (np.abs(np.clip(answer, low, high) - np.clip(exact, low, high)) / (high - low)).mean(1)
        return failing


@dataclass(frozen=True, slots=True)
class Goal:
    """What the student is to be.

    Attributes:
        hidden: Sizes of its hidden layers, dense with ReLU; None for the teacher's own shape.
        compressed: What weights are left to it.
        beyond: Headroom of its input's features (`ptq.Calibrator`).
    """

    hidden: tuple[int, ...] | None = None
    compressed: compression.Compression = field(default_factory=compression.Compression)
    beyond: float = ptq.BEYOND

    @property
    def is_free(self) -> bool:
        """True where weights have far to go."""
        return self.hidden is not None or self.compressed.weight_bits < 5 or self.compressed.prune > 0


def check(teacher: Teacher, goal: Goal) -> None:
    """Raises ConfigError if no such student can be had of this teacher."""
    goal.compressed.check()
    if goal.hidden is None and teacher.own is None:
        raise errors.ConfigError(
            "the policy is no chain of layers, so that no student can have its shape, nor weights can be taken from it",
            todo="train a student of another shape: --distil --hidden 64,64",
        )
    if goal.hidden is not None and (not goal.hidden or min(goal.hidden) < 1 or max(goal.hidden) > 1 << 13):
        raise errors.ConfigError("the hidden layers of a student have 1 to 8192 units each", todo="--hidden 64,64")
    if goal.hidden is not None and len(teacher.shape) > 2:
        raise errors.ConfigError(
            "a student of dense layers takes vectors, and the policy takes images", todo="leave --hidden out"
        )
