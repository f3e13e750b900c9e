"""Keras models that are a chain of known layers, as layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from learner.quantize import scales
from learner.quantize.distil import distillation
from learner.study.user_models.formats import chain

_ACTIVATIONS = {"linear": "none", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid"}
_NOTHING = (keras.layers.InputLayer, keras.layers.Dropout, keras.layers.GaussianNoise, keras.layers.Identity)


def read(
    model: Any, outputs: distillation.Outputs, low: NDArray[Any] | None, high: NDArray[Any] | None
) -> chain.Policy:
    """Reads a loaded model.

    Args:
        model: Functional, of one input and one output.
        outputs: What it puts out.
        low: Lower bounds of its actions [size].
        high: Upper bounds.

    Raises:
        Unmapped: It is no such chain; says which layer.
    """
    grown = chain.Chain(model.inputs[0].shape[1:])
    operations = _in_line(model)
    for layer in operations:
        is_last = layer is operations[-1]
        try:
            _add(grown, layer, skips_softmax=is_last and outputs == "values")
        except ValueError as error:
            raise scales.Unmapped(f"the layer {layer.name}: {error}") from error
    if len(grown.shape) != 1:
        raise scales.Unmapped("its output is no vector")
    if outputs == "values":
        return chain.Policy(grown.value(), tuple(model.inputs[0].shape[1:]), "values", None, None, False, "Keras")
    bounded, clips = grown.bounded(low, high)
    return chain.Policy(bounded, tuple(model.inputs[0].shape[1:]), "actions", low, high, clips, "Keras")


def _in_line(model: Any) -> list[Any]:
    """Returns the layers between input and output, each of which has one input and feeds one layer."""
    tensor, found, seen = model.inputs[0], [], 0
    nodes = [node for depth in model._nodes_by_depth.values() for node in depth if node.input_tensors]
    while tensor is not model.outputs[0]:
        taking = [node for node in nodes if any(x is tensor for x in node.input_tensors)]
        if len(taking) != 1 or len(taking[0].input_tensors) != 1 or seen > len(nodes):
            raise scales.Unmapped("its layers are not one after the other")
        (tensor,) = taking[0].output_tensors
        layer = taking[0].operation
        found.extend(_in_line(layer) if isinstance(layer, keras.Model) else [layer])
        seen += 1
    return found


def _add(grown: chain.Chain, layer: Any, *, skips_softmax: bool) -> None:
    if isinstance(layer, keras.layers.Dense) and layer.activation is keras.activations.softmax and skips_softmax:
        grown.dense(layer.kernel.numpy().T, layer.bias.numpy() if layer.use_bias else None)
        return
    for kinds, add in _ADDERS:
        if isinstance(layer, kinds):
            add(grown, layer)
            return
    if type(layer) in _NOTHING:
        return
    if isinstance(layer, keras.layers.Activation) and layer.activation is not keras.activations.softmax:
        _activate(grown, layer.activation)
        return
    if isinstance(layer, keras.layers.Activation | keras.layers.Softmax) and skips_softmax:  # it changes no choice
        return
    raise scales.Unmapped(f"the layer {layer.name} is a {type(layer).__name__}")


def _activate(grown: chain.Chain, activation: Any) -> None:
    name = getattr(activation, "__name__", str(activation))
    if name == "relu6":
        grown.activate("relu")
        grown.clip(0.0, 6.0)
        return
    grown.activate(_ACTIVATIONS.get(name, name))


def _dense(grown: chain.Chain, layer: Any) -> None:
    kernel = layer.kernel.numpy().T
    grown.dense(kernel, layer.bias.numpy() if layer.use_bias else None)
    _activate(grown, layer.activation)


def _convolution(grown: chain.Chain, layer: Any) -> None:
    height, width = layer.strides
    if layer.padding != "valid" or height != width or layer.groups != 1 or set(layer.dilation_rate) != {1}:
        raise scales.Unmapped(f"the layer {layer.name} is a convolution with padding, groups or unequal strides")
    if layer.data_format != "channels_last":
        raise scales.Unmapped(f"the layer {layer.name} has its channels first")
    kernel = layer.kernel.numpy().transpose(3, 0, 1, 2)
    grown.convolve(kernel, layer.bias.numpy() if layer.use_bias else None, height)
    _activate(grown, layer.activation)


def _batch_norm(grown: chain.Chain, layer: Any) -> None:
    if layer.axis not in (-1, len(grown.shape)):
        raise scales.Unmapped(f"the layer {layer.name} normalises another axis than the last")
    gain = 1 / np.sqrt(layer.moving_variance.numpy().astype(np.float64) + layer.epsilon)
    if layer.scale:
        gain = gain * layer.gamma.numpy()
    offset = -layer.moving_mean.numpy() * gain + (layer.beta.numpy() if layer.center else 0.0)
    grown.affine(gain, offset)


def _normalization(grown: chain.Chain, layer: Any) -> None:
    if layer.invert:
        raise scales.Unmapped(f"the layer {layer.name} inverts a normalisation")
    mean, variance = (np.asarray(a, np.float64).reshape(-1) for a in (layer.mean, layer.variance))
    gain = 1 / np.maximum(np.sqrt(variance), keras.config.epsilon())
    grown.affine(*(a if a.size > 1 else a[0] for a in (gain, -mean * gain)))


def _relu(grown: chain.Chain, layer: Any) -> None:
    if layer.negative_slope or layer.threshold:
        raise scales.Unmapped(f"the layer {layer.name} is a ReLU with a slope or threshold")
    grown.activate("relu")
    if layer.max_value is not None:
        grown.clip(0.0, float(layer.max_value))


_ADDERS: tuple[tuple[Any, Callable[[chain.Chain, Any], None]], ...] = (
    (keras.layers.Dense, _dense),
    (keras.layers.DepthwiseConv2D, lambda grown, layer: _unmapped(layer)),
    (keras.layers.Conv2D, _convolution),
    (keras.layers.BatchNormalization, _batch_norm),
    (keras.layers.Normalization, _normalization),
    (keras.layers.Flatten, lambda grown, layer: grown.flatten()),
    (keras.layers.ReLU, _relu),
    (keras.layers.Rescaling, lambda grown, layer: grown.affine(layer.scale, layer.offset)),
)


def _unmapped(layer: Any) -> None:
    raise scales.Unmapped(f"the layer {layer.name} is a {type(layer).__name__}")
