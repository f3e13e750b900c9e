"""The interface between algorithms and the training loop. Each algorithm is one file that reads top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import layers

State = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The result of K gradient steps: metrics as means over them, and the TD error of every sample [K, B]."""

    metrics: dict[str, float]
    td_error: NDArray[np.float32]


class Algorithm(Protocol):
    """A learner of one kind of policy. The same seed and the same batches give the same bits."""

    name: str
    head: specs.Head

    @staticmethod
    def check(spec: specs.EnvSpec) -> None:
        """Raises SpecError if this algorithm cannot learn in such an environment."""

    @property
    def updates(self) -> int:
        """The number of gradient steps so far."""

    @property
    def trained(self) -> Sequence[Any]:
        """The TensorFlow variables that gradient steps change, without their count; the same order in all of a kind."""

    def normalize(self, observations: NDArray[Any]) -> None:
        """Fixes the input normaliser from a sample of replay [N, *shape]; called once, before the first update."""

    def update(self, batch: Any) -> Update:
        """Takes K gradient steps, one per minibatch, in one TensorFlow call. A new K is compiled anew.

        Args:
            batch: A `replay.Batch`, or for algorithms that learn once from each step a `rollouts.Phase`.
        """

    def adopt(
        self, weights: Sequence[NDArray[np.float32]], gain: NDArray[np.float32], offset: NDArray[np.float32]
    ) -> None:
        """Takes the numbers of a policy, in place of the first ones of its own network; before any update.

        Args:
            weights: As `layers.arrays` has those of `policy_layers`.
            gain: Of the inputs in front of them, as in `networks.Normalizer`.
            offset: The same.

        Raises:
            ValueError: They are of another architecture.
        """

    def policy_layers(self) -> layers.PolicyLayers:
        """Returns the policy as it is now, from raw observations to the outputs of `head`."""

    def state(self) -> State:
        """Returns copies of everything that the next update depends on."""

    def restore(self, state: State) -> None:
        """Restores what `state()` returned. Raises RunError if that is of another architecture."""
