"""DQN: double, dueling, n-step, Huber, hard target updates, Adam with a clipped global norm.

Mnih et al. 2015 with van Hasselt et al. 2016 (double), Wang et al. 2016 (dueling), Hessel et al. 2018 (n-step) and
Schaul et al. 2016 (importance weights). Deviations: Huber loss instead of clipped rewards, Adam instead of RMSProp, and
gradients through the dueling streams are not rescaled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker import errors, specs
from learner import algorithms, config, layers, losses, networks, replay

Tensor = Any  # TensorFlow ships no types
METRICS = ("loss", "q_mean", "grad_norm", "td_abs_mean")

_ADAM_B1, _ADAM_B2, _ADAM_EPS = 0.9, 0.999, 1e-8  # Kingma and Ba 2015


class Dqn:
    """Learns action values from replay.

    Args:
        spec: Fixes the network's inputs and outputs.
        settings: See config.DqnConfig.
        seed: Of the initial weights; nothing else here is random.
    """

    name = "dqn"
    head: specs.Head = "q_values"

    @staticmethod
    def check(spec: specs.EnvSpec) -> None:
        """Raises SpecError unless actions are discrete."""
        if spec.action.kind != "discrete":
            raise errors.SpecError(
                "DQN chooses among discrete actions, and this environment takes continuous ones",
                where=spec.describe(),
                todo="use an environment with discrete actions, or wrap it so that it offers a list of them",
            )

    def __init__(self, spec: specs.EnvSpec, settings: config.DqnConfig, seed: int) -> None:
        self.check(spec)
        self._spec = spec
        self._settings = settings
        self._network = networks.QNetwork.build(spec, settings.hidden, settings.dueling, np.random.default_rng(seed))
        initial = self._network.initial()
        normalizer = networks.Normalizer.identity(spec.observation)
        self._weights = _variables("weights", initial)
        self._targets = _variables("targets", initial)
        self._moments1 = _variables("adam_m", {name: np.zeros_like(a) for name, a in initial.items()})
        self._moments2 = _variables("adam_v", {name: np.zeros_like(a) for name, a in initial.items()})
        self._gain = tf.Variable(normalizer.gain, trainable=False, name="normalizer/gain")
        self._offset = tf.Variable(normalizer.offset, trainable=False, name="normalizer/offset")
        self._updates = tf.Variable(np.int32(0), trainable=False, name="updates")
        # Compiled by XLA: 2.5 times the speed at width 64, for a second once. Traced anew only for another K or B.
        self._steps = tf.function(self._gradient_steps, jit_compile=True, autograph=False)

    @property
    def updates(self) -> int:
        return int(self._updates.numpy())

    def normalize(self, observations: NDArray[Any]) -> None:
        """Fixes the input normaliser from a sample of replay [N, *shape]. Once, before the first update."""
        normalizer = networks.Normalizer.fitted(self._spec.observation, observations, self._settings.normalizer_floor)
        self._gain.assign(normalizer.gain)
        self._offset.assign(normalizer.offset)

    def update(self, batch: replay.Batch) -> algorithms.Update:
        """Takes K gradient steps on minibatches [K, B, ...]."""
        metrics, td_error = self._steps(
            batch.observation, batch.action, batch.reward, batch.discount, batch.bootstrap, batch.weight
        )
        values = metrics.numpy()
        return algorithms.Update(dict(zip(METRICS, map(float, values), strict=True)), td_error.numpy())

    def _gradient_steps(self, *minibatches: Tensor) -> tuple[Tensor, Tensor]:
        """Loops `_gradient_step` over the leading axis with all state in registers; stores it once at the end."""
        k, b = minibatches[1].shape
        stored = (self._weights, self._targets, self._moments1, self._moments2)
        start = ([[v.read_value() for v in variables] for variables in stored], self._updates.read_value())

        def body(i: Tensor, state: Any, metrics: Tensor, td_errors: Tensor) -> tuple[Any, ...]:
            state, step_metrics, td_error = self._gradient_step(state, *(array[i] for array in minibatches))
            return i + 1, state, metrics + step_metrics, tf.tensor_scatter_nd_update(td_errors, [[i]], [td_error])

        _, (values, updates), metrics, td_errors = tf.while_loop(
            lambda i, *_: i < k, body, (0, start, tf.zeros(len(METRICS)), tf.zeros((k, b))), maximum_iterations=k
        )
        for variables, new in zip(stored, values, strict=True):
            for variable, value in zip(variables, new, strict=True):
                variable.assign(value)
        self._updates.assign(updates)
        return metrics / k, td_errors

    def _gradient_step(
        self,
        state: Any,
        observation: Tensor,  # [B, *shape]
        action: Tensor,  # [B] int32
        reward: Tensor,  # [B]
        discount: Tensor,  # [B]
        bootstrap: Tensor,  # [B, *shape]
        weight: Tensor,  # [B]
    ) -> tuple[Any, Tensor, Tensor]:
        """One step of Adam on the Huber loss. Returns the new state, metrics [4] and TD errors [B]."""
        settings, q_values = self._settings, self._network.q_values
        (weights, targets, moments1, moments2), updates = state

        q_t_value = q_values(targets, self._normalized(bootstrap))
        q_t_selector = q_values(weights, self._normalized(bootstrap)) if settings.double else q_t_value
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            q_tm1 = q_values(weights, self._normalized(observation))
            td_error = losses.q_learning(q_tm1, action, reward, discount, q_t_value, q_t_selector)
            loss = tf.reduce_mean(weight * losses.huber(td_error, settings.huber_delta))
        gradients = tape.gradient(loss, weights)

        grad_norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients]))
        scale = settings.max_grad_norm / tf.maximum(grad_norm, settings.max_grad_norm)
        gradients = [g * scale for g in gradients]

        updates = updates + 1
        t = tf.cast(updates, tf.float32)
        rate = settings.learning_rate * tf.sqrt(1 - tf.pow(_ADAM_B2, t)) / (1 - tf.pow(_ADAM_B1, t))
        moments1 = [m + (g - m) * (1 - _ADAM_B1) for m, g in zip(moments1, gradients, strict=True)]
        moments2 = [v + (tf.square(g) - v) * (1 - _ADAM_B2) for v, g in zip(moments2, gradients, strict=True)]
        weights = [w - rate * m / (tf.sqrt(v) + _ADAM_EPS) for w, m, v in zip(weights, moments1, moments2, strict=True)]

        refresh = tf.equal(updates % settings.target_period, 0)
        targets = [tf.where(refresh, w, target) for w, target in zip(weights, targets, strict=True)]

        metrics = tf.stack([loss, tf.reduce_mean(q_tm1), grad_norm, tf.reduce_mean(tf.abs(td_error))])
        return ([weights, targets, moments1, moments2], updates), metrics, td_error

    def _normalized(self, observation: Tensor) -> Tensor:
        x = tf.cast(observation, tf.float32)
        if not networks.is_image(self._spec.observation):
            x = tf.reshape(x, (-1, self._spec.observation.size))
        return x * self._gain + self._offset

    def policy_layers(self) -> layers.PolicyLayers:
        """From raw observations to advantages with mean 0: same greedy action as the Q-values."""
        normalizer = networks.Normalizer(self._gain.numpy(), self._offset.numpy())
        return self._network.policy_layers([w.numpy() for w in self._weights], normalizer)

    def state(self) -> algorithms.State:
        """Weights, targets, Adam's moments, the count of updates and the normaliser, by stable name."""
        return {variable.name.removesuffix(":0"): variable.numpy().copy() for variable in self._all()}

    def restore(self, state: algorithms.State) -> None:
        """Takes `state()` back.

        Raises:
            RunError: It is of another architecture.
        """
        own = {variable.name.removesuffix(":0"): variable for variable in self._all()}
        odd = sorted(own.keys() ^ state.keys())
        odd += [n for n in own.keys() & state.keys() if tuple(own[n].shape) != np.shape(state[n])]
        if odd:
            raise errors.RunError(
                f"the checkpoint is of another network: {odd[0]} does not fit",
                todo="resume with the hidden, dueling and environment that the run was started with",
            )
        for name, variable in own.items():
            variable.assign(state[name])

    def _all(self) -> list[Any]:
        lists = (self._weights, self._targets, self._moments1, self._moments2)
        return [variable for variables in lists for variable in variables] + [self._gain, self._offset, self._updates]


def _variables(prefix: str, initial: dict[str, NDArray[np.float32]]) -> list[Any]:
    return [tf.Variable(value, trainable=False, name=f"{prefix}/{name}") for name, value in initial.items()]
