"""Updates on devices that are named: on one, or on several whose networks become their mean after each call.

    draw N x K minibatches ─▶ K steps on each of N devices, each in a thread of its own ─▶ mean of all that was trained

A replica is a whole algorithm, with weights, targets and moments on its own device. Within a call none hears of
another: TensorFlow refuses an all-reduce inside the compiled loop. So this is local SGD (Stich 2019,
https://arxiv.org/abs/1805.09767) with K local steps, and Adam's moments are averaged like the weights. After a call all
replicas are the same, and their state is that of one: a checkpoint is gone on from on any number of devices.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner import algorithms, config
from learner.algorithms import registry
from learner.experience.buffers import replay
from learner.networks import layers

_T = TypeVar("_T")
_CUDA = "; TensorFlow sees no GPU: for those of NVIDIA, pip install 'tensorflow[and-cuda]'"


def prepare(names: Sequence[str]) -> None:
    """Looks for devices, and divides the CPU into as many as are named; before TensorFlow's first operation.

    Args:
        names: As `config.check` lets them pass.

    Raises:
        ConfigError: One is not there. Of the CPU there is one for each core.
    """
    cpus, gpus = (tf.config.list_physical_devices(kind) for kind in ("CPU", "GPU"))
    there = {"CPU": os.cpu_count() or 1, "GPU": len(gpus)}
    numbers = [(kind, int(number)) for kind, _, number in (name.partition(":") for name in names)]
    if missing := [f"{kind}:{number}" for kind, number in numbers if number >= there[kind]]:
        known = " or ".join(f"{kind}:0 to {kind}:{count - 1}" for kind, count in there.items() if count)
        raise errors.ConfigError(
            f"there is no {' and no '.join(missing)} on this machine",
            where="learner_devices",
            todo=f"name devices from {known}" + (_CUDA if missing[0].startswith("GPU") and not gpus else ""),
        )
    if (wanted := 1 + max(number if kind == "CPU" else 0 for kind, number in numbers)) > 1:
        tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * wanted)


def make(settings: config.Settings, spec: specs.EnvSpec) -> algorithms.Algorithm:
    """Makes the algorithm that the settings name, on the devices that they name.

    Raises:
        SpecError: It cannot learn in such an environment.
    """
    if settings.train.learner_devices:
        return Replicas(settings, spec)
    return registry.make(settings, spec)


class Replicas:
    """An algorithm on each of several devices, or on one.

    Args:
        settings: Name devices and algorithm. Of several replicas each has a seed of its own, for what is drawn in an
            update; the first weights are those of the first.
        spec: Fixes the networks' inputs and outputs.
    """

    def __init__(self, settings: config.Settings, spec: specs.EnvSpec) -> None:
        train = settings.train
        self._devices = train.learner_devices
        seeds = [dataclasses.replace(train, seed=train.seed + at) for at in range(len(self._devices))]
        self._replicas = self._each(lambda at: registry.make(settings._replace(train=seeds[at]), spec))
        first = self._replicas[0]
        self.name, self.head = first.name, first.head
        for other in self._replicas[1:]:
            other.restore(first.state())
        self._threads = futures.ThreadPoolExecutor(len(self._devices), "device")
        self._average = tf.function(self._take_mean, autograph=False)

    @staticmethod
    def check(spec: specs.EnvSpec) -> None:
        """Each replica looks by itself when it is made."""

    @property
    def updates(self) -> int:
        """The number of gradient steps behind the weights: of several at once, one of each replica counts."""
        return self._replicas[0].updates

    @property
    def trained(self) -> Sequence[Any]:
        """The variables of the first replica; those of the others are the same between two calls."""
        return self._replicas[0].trained

    def normalize(self, observations: NDArray[Any]) -> None:
        self._each(lambda at: self._replicas[at].normalize(observations))

    def update(self, batch: Any) -> algorithms.Update:
        """Takes K gradient steps on each of N devices, with N x K minibatches [N * K, B, ...], and then the mean.

        Returns:
            Metrics as means over all of them, and TD errors [N * K, B].
        """
        if len(self._replicas) == 1:
            return self._on(0, lambda at: self._replicas[at].update(batch))
        parts = _divided(batch, len(self._replicas))
        computing = [
            self._threads.submit(self._on, at, lambda at: self._replicas[at].update(parts[at]))
            for at in range(len(parts))
        ]
        futures.wait(computing)  # a checkpoint must not see half an update
        updates = [one.result() for one in computing]
        self._average()
        metrics = {name: sum(one.metrics[name] for one in updates) / len(updates) for name in updates[0].metrics}
        return algorithms.Update(metrics, np.concatenate([one.td_error for one in updates]))

    def _take_mean(self) -> None:
        """Gives each replica's variables the mean over all replicas, which the first device computes."""
        for variables in zip(*(replica.trained for replica in self._replicas), strict=True):
            with tf.device(variables[0].device):
                mean = tf.add_n([variable.read_value() for variable in variables]) / len(variables)
            for variable in variables:
                variable.assign(mean)

    def adopt(
        self, weights: Sequence[NDArray[np.float32]], gain: NDArray[np.float32], offset: NDArray[np.float32]
    ) -> None:
        self._each(lambda at: self._replicas[at].adopt(weights, gain, offset))

    def policy_layers(self) -> layers.PolicyLayers:
        return self._replicas[0].policy_layers()

    def state(self) -> algorithms.State:
        return self._replicas[0].state()

    def restore(self, state: algorithms.State) -> None:
        self._each(lambda at: self._replicas[at].restore(state))

    def _each(self, call: Callable[[int], _T]) -> list[_T]:
        return [self._on(at, call) for at in range(len(self._devices))]

    def _on(self, at: int, call: Callable[[int], _T]) -> _T:
        with tf.device(self._devices[at]):
            return call(at)


def _divided(batch: replay.Batch, n: int) -> list[replay.Batch]:
    """Returns n batches, each with an n-th of the minibatches, in their order."""
    fields = [np.split(getattr(batch, field.name), n) for field in dataclasses.fields(batch)]
    return [replay.Batch(*arrays) for arrays in zip(*fields, strict=True)]
