"""Quantization-aware distillation of a Keras model; `aware` does the same for policies of this project's learner.

Each layer is wrapped: its kernels are rounded as int8 rounds them, and its output, unless the converter fuses the
layer with the one behind it. The weights themselves stay the model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from learner.networks import fake_quant
from learner.quantize.distil import distillation
from learner.study.user_models.converter import keras_model, layer_norm

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types


def distil(
    network: keras_model.Network,
    calibration: NDArray[Any],
    exact: FloatArray,
    *,
    outputs: distillation.Outputs,
    steps: int = distillation.STEPS,
    seed: int = 0,
) -> Sequence[FloatArray]:
    """Trains a network's weights against its fp32 outputs, through simulated int8.

    Args:
        network: Result of `keras_model.prepare`.
        calibration: Raw observations [N, *shape]; a quarter of them only chooses among the results.
        exact: fp32 outputs [N, n] for them.
        outputs: `values` of actions of which the largest is taken, or continuous `actions`.
        steps: Gradient steps.
        seed: Determines the split and the order of observations; the same arguments give the same weights.

    Returns:
        The weights whose int8 model does best on that quarter: the network's own list unless others are better.
    """
    learn, choose = distillation.split(len(calibration), seed)
    x = network.scale(calibration)
    ranges = _Limits()
    simulated = keras_model.clone(network.model, lambda layer: _Int8(layer, ranges))
    simulated.trainable = True

    def judge(weights: Sequence[FloatArray]) -> FloatArray:
        model = keras_model.to_tflite(network, weights, calibration, "int8")
        return distillation.judge(model, calibration[choose], exact[choose], outputs)

    def refresh(weights: Sequence[FloatArray]) -> None:
        with ranges.measuring():
            network.forward([tf.constant(array) for array in weights], ranges("input", tf.constant(x)), simulated)

    return distillation.train(
        lambda weights, batch: network.forward(weights, ranges("input", batch), simulated),
        network.weights,
        None,
        x[learn],
        exact[learn],
        outputs=outputs,
        steps=steps,
        seed=seed,
        refresh=refresh,
        judge=judge,
    )


class _Limits:
    """Rounds named tensors to the ranges they had when last measured."""

    def __init__(self) -> None:
        self._limits: dict[str, Any] = {}
        self.measures = False

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measures tensors instead of rounding them, as long as the context lasts."""
        self.measures = True
        try:
            yield
        finally:
            self.measures = False

    def __call__(self, name: str, x: Tensor, limits: fake_quant.Range | None = None) -> Tensor:
        if self.measures:
            seen = tf.stack([tf.reduce_min(x), tf.reduce_max(x)])
            if name in self._limits:
                self._limits[name].assign(seen)
            else:
                self._limits[name] = tf.Variable(seen, trainable=False)
            return x
        if limits is None and name not in self._limits:  # while Keras builds the graph
            return x
        return fake_quant.activation(x, limits or (self._limits[name][0], self._limits[name][1]))


class _Int8(keras.layers.Layer):
    """A layer as int8 would run it."""

    def __init__(self, inner: Any, ranges: _Limits) -> None:
        super().__init__(name=f"int8_{inner.name}")
        self.inner = inner
        self._ranges = ranges
        self._rounds = not _fused_with_next(inner)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        inner, ranges, name = self.inner, self._ranges, self.inner.name
        own = [
            fake_quant.kernel(v.value) if "kernel" in v.name and not ranges.measures else tf.convert_to_tensor(v.value)
            for v in inner.trainable_variables
        ]
        is_norm = isinstance(inner, layer_norm.IntegerLayerNormalization)
        if is_norm:
            inner.through = lambda part, x, limits=None: ranges(f"{name}/{part}", x, limits)
        activation: Any = getattr(inner, "activation", None)
        splits = activation not in (None, keras.activations.linear, keras.activations.relu)
        if splits:
            inner.activation = keras.activations.linear
        try:
            others = [v.value for v in inner.non_trainable_variables]
            x, _ = inner.stateless_call(own, others, *args, **kwargs)
        finally:  # the layer is the user's model's, too
            if splits:
                inner.activation = activation
            if is_norm:
                inner.through = fake_quant.untouched
        if splits:
            x = activation(ranges(f"{name}/sum", x))
        return ranges(name, x) if self._rounds else x


def _fused_with_next(layer: Any) -> bool:
    """True if the converter makes one operation of this layer and what follows, so that nothing is rounded between."""
    following = [node.operation for node in layer._outbound_nodes]
    return bool(following) and all(
        isinstance(after, (keras.layers.ReLU, keras.layers.BatchNormalization))
        or (getattr(after, "activation", None) is keras.activations.relu and isinstance(after, keras.layers.Activation))
        for after in following
    )
