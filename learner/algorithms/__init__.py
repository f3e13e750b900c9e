"""What every algorithm offers the training loop. One file each, reads top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from learner.experience import replay
from learner.networks import layers

State = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What K gradient steps gave: metrics as means over them, and the TD error of every sample [K, B]."""

    metrics: dict[str, float]
    td_error: NDArray[np.float32]


class Algorithm(Protocol):
    """A learner of one kind of policy. Same seed and same batches give the same bits."""

    name: str
    head: specs.Head

    @staticmethod
    def check(spec: specs.EnvSpec) -> None:
        """Raises SpecError if this algorithm cannot learn in such an environment."""

    @property
    def updates(self) -> int:
        """Gradient steps taken so far."""

    def normalize(self, observations: NDArray[Any]) -> None:
        """Fixes the input normaliser from a sample of replay [N, *shape]. Once, before the first update."""

    def update(self, batch: replay.Batch) -> Update:
        """Takes K gradient steps, one per minibatch, in one TensorFlow call. A new K is compiled anew."""

    def policy_layers(self) -> layers.PolicyLayers:
        """The policy as it is now, from raw observations to the outputs of `head`."""

    def state(self) -> State:
        """Copies of everything that the next update depends on."""

    def restore(self, state: State) -> None:
        """Takes `state()` back. Raises RunError if it is of another architecture."""
