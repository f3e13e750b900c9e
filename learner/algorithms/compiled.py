"""The common base of all algorithms here: K gradient steps in one compiled call, and state for checkpoints.

All state is groups of tensors (`weights`, `targets`, Adam's moments). An algorithm gives its initial groups, and a
function from state and minibatch to new state; the loop around it, the normaliser, the counter and the checkpoint are
here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner import algorithms
from learner.algorithms import xla
from learner.networks import layers, networks, stored

Tensor = Any  # TensorFlow ships no types
_UPDATES_MAX = 1 << 31
Groups = dict[str, list[Tensor]]


class Minibatch(NamedTuple):
    """A batch of B transitions with normalised observations."""

    observation: Tensor  # [B, features], or [B, height, width, channels]
    action: Tensor  # [B] int32, or [B, *shape] float32
    reward: Tensor  # [B]
    discount: Tensor  # [B]
    bootstrap: Tensor  # as observation
    weight: Tensor  # [B]


def with_adam(weights: Mapping[str, NDArray[np.float32]]) -> dict[str, dict[str, NDArray[np.float32]]]:
    """Returns groups for weights, their target network, and Adam's two moments."""
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    return {"weights": dict(weights), "targets": dict(weights), "adam_m": zeros, "adam_v": zeros}


class Compiled:
    """An algorithm without its gradient step and its policy.

    Args:
        spec: Describes the environment.
        initial: Arrays by group and name.
        normalizer_floor: See `networks.Normalizer.fitted`.

    Attributes:
        updates: The number of gradient steps so far.
    """

    METRICS: ClassVar[tuple[str, ...]]

    def __init__(
        self, spec: specs.EnvSpec, initial: Mapping[str, Mapping[str, NDArray[np.float32]]], normalizer_floor: float
    ) -> None:
        self._spec = spec
        self._normalizer_floor = normalizer_floor
        self._groups = {
            group: [stored.Weight(f"{group}/{name}", value) for name, value in arrays.items()]
            for group, arrays in initial.items()
        }
        normalizer = networks.Normalizer.identity(spec.observation)
        self._gain = tf.Variable(normalizer.gain, trainable=False, name="normalizer/gain")
        self._offset = tf.Variable(normalizer.offset, trainable=False, name="normalizer/offset")
        self._updates = tf.Variable(np.int32(0), trainable=False, name="updates")
        self.updates = 0  # the same: a loop looks at it all the time, and to read a variable takes up to 300 us
        self._steps = xla.Program(self._gradient_steps)

    def _gradient_step(self, state: Groups, updates: Tensor, batch: Any) -> tuple[Groups, Sequence[Tensor], Any]:
        """Takes one gradient step.

        Args:
            state: Tensors by group.
            updates: Number of steps, this one included: int32 scalar.
            batch: The transitions to learn from: what `_minibatch` returns.

        Returns:
            The new state, a scalar per name in METRICS, and TD errors [B].
        """
        raise NotImplementedError

    @property
    def trained(self) -> list[Any]:
        """The variables that gradient steps change, without their count."""
        return [weight.variable for group in self._groups.values() for weight in group]

    @property
    def normalizer(self) -> networks.Normalizer:
        """The input normaliser as it is now."""
        return networks.Normalizer(self._gain.numpy(), self._offset.numpy())

    def normalize(self, observations: NDArray[Any]) -> None:
        """Fixes the input normaliser from a sample of replay [N, *shape]; called once, before the first update."""
        normalizer = networks.Normalizer.fitted(self._spec.observation, observations, self._normalizer_floor)
        self._keep_function(self.normalizer, normalizer)
        self._gain.assign(normalizer.gain)
        self._offset.assign(normalizer.offset)

    def _keep_function(self, old: networks.Normalizer, new: networks.Normalizer) -> None:
        """Rewrites the first layer of an adopted policy, so that it answers behind a new normaliser as before."""
        first = networks.Normalizer.identity(self._spec.observation)
        if np.array_equal(old.gain, first.gain) and np.array_equal(old.offset, first.offset):
            return  # nothing was adopted
        for group in ("weights", "targets"):
            kernel, bias = self._groups[group][:2]
            if kernel.name.partition("/")[2] != self._groups["weights"][0].name.partition("/")[2]:
                continue  # targets of critics alone
            ratio = old.gain / new.gain
            layer = layers.Dense(kernel.numpy(), bias.numpy(), "none")
            (rewritten,) = layers.absorb((layer,), ratio, old.offset - new.offset * ratio)
            assert isinstance(rewritten, layers.Dense)
            kernel.assign(rewritten.kernel)
            bias.assign(rewritten.bias)

    def adopt(
        self, weights: Sequence[NDArray[np.float32]], gain: NDArray[np.float32], offset: NDArray[np.float32]
    ) -> None:
        """Takes the numbers of a policy (see algorithms.Algorithm); a target network of it takes them as well."""
        named = {v.name.partition("/")[2]: v for v in self._groups.get("targets", ())}
        for variable, value in zip(self._groups["weights"], weights, strict=False):
            variable.assign(value)
            if (target := named.get(variable.name.partition("/")[2])) is not None:
                target.assign(value)
        self._gain.assign(gain)
        self._offset.assign(offset)

    def update(self, batch: Any) -> algorithms.Update:
        """Takes K gradient steps on the minibatches [K, B, ...] of a `replay.Batch`."""
        return self._take_steps(
            batch.observation, batch.action, batch.reward, batch.discount, batch.bootstrap, batch.weight
        )

    def _take_steps(self, *minibatches: NDArray[Any]) -> algorithms.Update:
        return self._told(*self._steps(*minibatches))

    def _told(self, metrics: Tensor, td_error: Tensor) -> algorithms.Update:
        """Returns what `_gradient_steps` computed, out of TensorFlow."""
        found = algorithms.Update(dict(zip(self.METRICS, metrics.numpy().tolist(), strict=True)), td_error.numpy())
        self.updates += len(found.td_error)
        return found

    def _gradient_steps(self, *minibatches: Tensor) -> tuple[Tensor, Tensor]:
        """Loops `_gradient_step` over the leading axis with all state in registers; stores it once at the end."""
        k, b = minibatches[2].shape  # a number for each transition
        start = {name: [weight.variable.read_value() for weight in group] for name, group in self._groups.items()}

        def body(i: Tensor, groups: Groups, updates: Tensor, metrics: Tensor, td_errors: Tensor) -> tuple[Any, ...]:
            batch = self._minibatch([array[i] for array in minibatches])
            updates = updates + 1
            groups, step_metrics, td_error = self._gradient_step(groups, updates, batch)
            td_errors = tf.tensor_scatter_nd_update(td_errors, [[i]], [td_error])
            return i + 1, groups, updates, metrics + tf.stack(step_metrics), td_errors

        state = 0, start, self._updates.read_value(), tf.zeros(len(self.METRICS)), tf.zeros((k, b))
        # One step needs no loop, behind whose border XLA would not find what was computed before it already
        ran = body(*state) if k == 1 else tf.while_loop(lambda i, *_: i < k, body, state, maximum_iterations=k)
        _, groups, updates, metrics, td_errors = ran
        for name, group in self._groups.items():
            for weight, value in zip(group, groups[name], strict=True):
                weight.variable.assign(value)
        self._updates.assign(updates)
        return metrics / k, td_errors

    def _minibatch(self, arrays: Sequence[Tensor]) -> Any:
        """Returns what `_gradient_step` learns from, of which `arrays` are what `update` handed over, without K."""
        batch = Minibatch(*arrays)
        return batch._replace(
            observation=self._normalized(batch.observation), bootstrap=self._normalized(batch.bootstrap)
        )

    def _normalized(self, observation: Tensor) -> Tensor:
        x = tf.cast(observation, tf.float32)
        if not networks.is_image(self._spec.observation):
            x = tf.reshape(x, (-1, self._spec.observation.size))
        return x * self._gain + self._offset

    def state(self) -> algorithms.State:
        """Returns all groups, the count of updates and the normaliser, by stable name."""
        return {variable.name.removesuffix(":0"): variable.numpy().copy() for variable in self._all()}

    def restore(self, state: algorithms.State) -> None:
        """Restores what `state()` returned.

        Raises:
            RunError: It is of another architecture.
        """
        own = {variable.name.removesuffix(":0"): variable for variable in self._all()}
        odd = sorted(own.keys() ^ state.keys())
        shared = own.keys() & state.keys()
        odd += sorted(n for n in shared if tuple(own[n].shape) != np.shape(state[n]) or own[n].dtype != state[n].dtype)
        if not odd and not 0 <= int(state["updates"]) < _UPDATES_MAX:
            odd = ["updates"]
        if odd:
            raise errors.RunError(
                f"the checkpoint is of another network: {odd[0]} does not fit",
                todo="resume with the algorithm, network and environment that the run was started with",
            )
        for name, variable in own.items():
            variable.assign(state[name])
        self.updates = int(self._updates.numpy())

    def _all(self) -> list[Any]:
        return [*itertools.chain(*self._groups.values()), self._gain, self._offset, self._updates]
