"""Networks of SAC: an actor that puts out a squashed Gaussian, and twin critics of observation and action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import specs
from learner.networks import actor_critic, distributions, forward, layers, networks

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types


@dataclass(frozen=True, slots=True, eq=False)
class SoftActorCritic:
    """The layers of all three. Inside, every action lies in -1..1; actors themselves bring actions to the bounds.

    Attributes:
        actor_layers: From normalised observations to mean and deviation, as the head `squashed_gaussian` has them.
        twins: Two critics of one architecture.
        bounds: From -1..1 to the environment's bounds.
    """

    actor_layers: layers.PolicyLayers
    twins: tuple[actor_critic.Critic, actor_critic.Critic]
    bounds: layers.Rescale

    @staticmethod
    def build(
        spec: specs.EnvSpec,
        hidden: Sequence[int],
        critic_hidden: Sequence[int],
        outputs: int,
        rng: np.random.Generator,
        network: str = "auto",
    ) -> SoftActorCritic:
        """Returns the initial layers; arguments as of `actor_critic.ActorCritic.build`."""
        body, width = networks.torso(spec.observation, hidden, rng, network)
        last = networks.dense(width, 2 * spec.action.size, "none", rng, scale=actor_critic.SMALL)
        first, second = (actor_critic.Critic.build(spec, critic_hidden, outputs, rng, network) for _ in range(2))
        return SoftActorCritic((*body, last), (first, second), actor_critic.rescale(spec.action))

    def initial_actor(self) -> dict[str, FloatArray]:
        """Returns the actor's weights by stable name."""
        return {f"actor/{name}": array for name, array in layers.arrays(self.actor_layers).items()}

    def initial_critics(self) -> dict[str, FloatArray]:
        """Returns the weights of the twins by stable name, in the order of `critics`."""
        return {f"{at}/{name}": a for at, critic in enumerate(self.twins) for name, a in critic.initial().items()}

    def distribution(self, actor_weights: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log deviation [B, size] before the tanh, for normalised observations."""
        return distributions.squashed_gaussian(forward.run_stored(self.actor_layers, actor_weights, x))

    def mode_rounded(self, actor_weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """Returns the tanh of the mean [B, size], rounded as `actor_critic.run_rounded` says."""
        mean, _ = distributions.squashed_gaussian(actor_critic.run_rounded(self.actor_layers, actor_weights, x))
        return tf.tanh(mean)

    def critics(self, critic_weights: Sequence[Tensor], x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Returns either twin's outputs [B, outputs] for normalised observations and actions [B, size] in -1..1."""
        half, (first, second) = len(critic_weights) // 2, self.twins
        return first.run(critic_weights[:half], x, action), second.run(critic_weights[half:], x, action)

    def policy_layers(
        self, actor_weights: Sequence[FloatArray], normalizer: networks.Normalizer
    ) -> layers.PolicyLayers:
        """Returns the actor alone, from raw observations to mean and deviation."""
        actor = layers.with_arrays(self.actor_layers, actor_weights)
        return layers.absorb(actor, normalizer.gain, normalizer.offset)
