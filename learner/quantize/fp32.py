"""The one fp32 pass over a policy's layers, with a hook per layer: calibration, the gate and distillation share it.

numpy and compiled loops do the dense layers (2 to 4 times as fast as eager TensorFlow at these sizes), TensorFlow the
convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from learner.networks import layers
from learner.quantize import kernels

FloatArray = NDArray[np.float32]
OnLayer = Callable[[layers.Weighted, FloatArray, FloatArray, FloatArray], object]
"""A hook: gets a layer with weights, its inputs, its outputs behind ReLU but in front of tanh, and its outputs."""


def outputs(
    policy: layers.PolicyLayers,
    observations: NDArray[Any],
    on_layer: OnLayer = lambda layer, inputs, linear, outputs: None,
) -> FloatArray:
    """Answers raw observations [N, *shape] of any dtype, in fp32: [N, n].

    NaN and infinities of a policy pass through: whoever publishes refuses them by name.
    """
    x: FloatArray = observations.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for layer in policy:
            if isinstance(layer, layers.Flatten):
                x = x.reshape(len(x), math.prod(x.shape[1:]))
            elif isinstance(layer, layers.Rescale):
                x = x * layer.gain + layer.offset
            else:
                inputs, linear = x, linear_outputs(layer, x)
                x = np.tanh(linear) if layer.activation == "tanh" else linear
                on_layer(layer, inputs, linear, x)
    return x


def linear_outputs(layer: layers.Weighted, x: FloatArray) -> FloatArray:
    """Runs one layer, ReLU included and tanh not."""
    if isinstance(layer, layers.Dense):
        y: FloatArray = kernels.product(x, layer.kernel)
    else:
        y = tf.nn.conv2d(x, layer.kernel.transpose(1, 2, 3, 0), strides=layer.stride, padding="VALID").numpy()
    y += layer.bias
    return np.maximum(y, 0, out=y) if layer.activation == "relu" else y
