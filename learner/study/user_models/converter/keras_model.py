"""Converts any Keras model of one input and one output to .tflite, full-integer or in another precision.

What is done to it changes nothing in fp32: layer normalisation is written in operations that have int8 kernels
(`layer_norm`), and the input is scaled per feature in front of a first dense layer (`input_scaling`).
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.lite.python.convert import ConverterError

from broker.contract import errors
from learner.networks import layers
from learner.quantize import input_scaling, ptq
from learner.quantize.tflite import convert, graph_edits, stderr_filter
from learner.study.user_models.converter import layer_norm, operations

FloatArray = NDArray[np.float32]
Tensor = Any  # TensorFlow ships no types
_BATCH = 1024
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # Klambauer et al. 2017
BYTES_MAX = 1 << 30
"""The limit of a model's files, unpacked."""


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A model made ready for conversion, and the numbers it starts with.

    Attributes:
        model: Functional; shares its layers with the user's model.
        weights: Trainable weights, in the order of `model.trainable_variables`; for scaled inputs.
        affine: How inputs are scaled; None where they are not.
        form: How layer normalisation is written; None where it is not rewritten.
        centred: Whether what the outputs have in common is taken out of them (`ptq.centre_outputs`).
    """

    model: Any
    weights: list[FloatArray]
    affine: input_scaling.Affine | None
    form: layer_norm.Form | None
    centred: bool

    def scale(self, observations: NDArray[Any]) -> FloatArray:
        """Returns observations [N, *shape] as inputs of the model inside."""
        return self.affine.apply(observations) if self.affine else observations.astype(np.float32)

    def outputs(self, observations: NDArray[Any]) -> FloatArray:
        """Returns fp32 outputs [N, n] for raw observations: those of the user's model, or what is left if centred."""
        constants = [tf.constant(array) for array in self.weights]
        answer: FloatArray = self.forward(constants, tf.constant(self.scale(observations))).numpy()
        return answer

    def forward(self, weights: Sequence[Tensor], x: Tensor, model: Any = None) -> Tensor:
        """Returns outputs [B, n] for scaled inputs, by the model or by another with the same variables."""
        model = model or self.model
        place = {id(variable): k for k, variable in enumerate(self.model.trainable_variables)}
        own = [weights[place[id(variable)]] for variable in model.trainable_variables]
        others = [variable.value for variable in model.non_trainable_variables]
        return model.stateless_call(own, others, x, training=False)[0]


def _check_size(path: Path) -> None:
    """Raises PolicyError if a .keras archive would unpack to more than BYTES_MAX; others are Keras's to refuse."""
    try:
        with zipfile.ZipFile(path) as archive:
            size_bytes = sum(member.file_size for member in archive.infolist())
    except (OSError, ValueError, NotImplementedError, struct.error, zipfile.BadZipFile):
        return
    if size_bytes > BYTES_MAX:
        raise errors.PolicyError(
            f"the model would unpack to {size_bytes / 1e6:,.0f} MB, and {BYTES_MAX / 1e6:,.0f} MB are the limit",
            reason="model",
            where=str(path),
            todo="actors could not run it either: make the network smaller",
        )


def load(path: Path) -> Any:
    """Loads and checks a model; the result is functional, with all layers trainable.

    Raises:
        PolicyError: It cannot be read, or has not one input [N, *shape] and one output [N, n].
    """
    if not path.is_file():
        raise errors.PolicyError("there is no such model", reason="model", where=str(path), todo="name a .keras file")
    _check_size(path)
    try:
        loaded = keras.saving.load_model(path, compile=False)
    except Exception as error:  # Keras raises whatever a layer's constructor does
        first = str(error).strip().partition("\n")[0]
        raise errors.PolicyError(
            f"Keras cannot load the model: {first}",
            reason="model",
            where=str(path),
            todo="save it with model.save('NAME.keras') by Keras 3; layers of your own and Lambda layers cannot be "
            "rebuilt from a file: express them in Keras's own",
        ) from error
    inputs, outputs = loaded.inputs or [], loaded.outputs or []
    if len(inputs) != 1 or len(outputs) != 1:
        raise errors.PolicyError(
            f"the model has {len(inputs)} inputs and {len(outputs)} outputs, and a policy has one of each",
            reason="model",
            where=str(path),
            todo="wrap it in keras.Model(one_input, one_output), with Concatenate where needed; a Sequential model "
            "needs an Input layer",
        )
    if None in inputs[0].shape[1:] or len(outputs[0].shape) != 2 or None in outputs[0].shape[1:]:
        raise errors.PolicyError(
            f"the model maps {_shape(inputs[0])} to {_shape(outputs[0])}, not [N, ...] of fixed size to [N, outputs]",
            reason="model",
            where=str(path),
            todo="fix every dimension but the batch, and end in a flat output",
        )
    for layer in loaded._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and not layer.unroll:
            raise errors.PolicyError(
                f"the recurrent layer {layer.name!r} is a loop, and TFLiteConverter crashes on loops in int8",
                reason="model",
                where=str(path),
                todo="build it with unroll=True",
            )
    for layer in loaded._flatten_layers():
        if getattr(layer, "activation", None) is keras.activations.selu:
            layer.activation = selu
    model = keras.Model(inputs[0], outputs[0])
    model.trainable = True
    if not all(np.isfinite(variable.numpy()).all() for variable in model.trainable_variables):
        raise errors.PolicyError(
            "the model has weights that are NaN or infinite",
            reason="not_finite",
            where=str(path),
            todo="training has diverged: save an earlier state",
        )
    return model


def selu(x: Tensor) -> Tensor:
    """Does what keras.activations.selu does, and exp never sees what is above 0.

    The converter's own takes exp of everything: behind inputs of up to 5.4 its int8 tensor reaches 223, and all that is
    below 0 has one or two of its levels. MINIMUM would not do: it has one scale, and so the inputs lose what is above.
    """
    below = -1.0 * tf.nn.relu(-1.0 * x)  # MUL, as NEG has no int8 kernel
    return _SELU_SCALE * (tf.nn.relu(x) + _SELU_ALPHA * (tf.exp(below) - 1.0))


def outputs(model: Any, observations: NDArray[Any]) -> FloatArray:
    """Returns the model's fp32 outputs [N, n] for raw observations [N, *shape]."""
    chunks = [
        model(observations[at : at + _BATCH].astype(np.float32), training=False).numpy()
        for at in range(0, len(observations), _BATCH)
    ]
    answer: FloatArray = np.concatenate(chunks)
    return answer


def clone(model: Any, replace: Callable[[Any], Any]) -> Any:
    """Returns a functional model of the same connections, with each layer replaced by what `replace` returns for it."""
    return keras.models.clone_model(model, clone_function=replace)


def has_layer_norm(model: Any) -> bool:
    """Returns True if `prepare` has something to rewrite."""
    return any(layer_norm.IntegerLayerNormalization.fits(layer) for layer in model.layers)


def prepare(
    model: Any, calibration: NDArray[Any], *, form: layer_norm.Form | None = None, centred: bool = False
) -> Network:
    """Rewrites a loaded model without changing what it answers.

    Args:
        model: Result of `load`.
        calibration: Observations [N, *shape] whose ranges scale the input.
        form: How to write layer normalisation; None leaves it.
        centred: Take out of the outputs what they have in common, if the last layer is a linear dense one. That
            changes no argmax.
    """
    graph, stand_ins = model, layer_norm.IntegerLayerNormalization
    before = {id(norm): dense for norm, dense in _dense_before_norm(model)} if form else {}
    if form:
        graph = clone(
            model,
            lambda layer: stand_ins(layer, form, centred=id(layer) in before) if stand_ins.fits(layer) else layer,
        )
        graph.trainable = True
    weights = {id(variable): variable.numpy() for variable in graph.trainable_variables}
    first, last, affine = _first_dense(model), _last_dense(model), None
    if first is not None:
        affine = input_scaling.from_ranges(calibration)
        (scaled,) = input_scaling.compensate((_numbers(first, weights),), affine)
        _put(first, scaled, weights)
    for dense in before.values():
        _put(dense, layers.centred(_numbers(dense, weights)), weights)
    centred = centred and last is not None
    if centred:
        entry = next(node.input_tensors[0] for node in _nodes(model) if node.operation is last)
        hidden = outputs(keras.Model(model.inputs[0], entry), calibration)
        (rewritten,) = ptq.centre_outputs((_numbers(last, weights),), hidden, outputs(model, calibration))
        _put(last, rewritten, weights)
    return Network(graph, list(weights.values()), affine, form, centred)


def to_tflite(
    network: Network, weights: Sequence[FloatArray], calibration: NDArray[Any], precision: str, *, verbose: bool = False
) -> bytes:
    """Converts a network; the result takes raw float32 observations [1, *shape] and gives float32 outputs [1, n].

    Args:
        network: Result of `prepare`.
        weights: Weights in the order of the network.
        calibration: Observations whose ranges are what int8 can represent.
        precision: One of config.PRECISIONS.
        verbose: Let the converter print what it likes.

    Raises:
        PolicyError: The converter lacks an operation, or 'int8' did not become full-integer; names each operation.
    """
    constants = [tf.constant(array) for array in weights]
    model = convert_function(
        lambda x: network.forward(constants, x), network.scale(calibration), precision, verbose=verbose
    )
    return graph_edits.insert_scaling(model, network.affine) if network.affine else model


def convert_function(
    forward: Callable[[Tensor], Tensor], rows: FloatArray, precision: str, *, verbose: bool = False
) -> bytes:
    """Converts a function of one tensor [1, *shape] to one [1, n], as it is.

    Args:
        forward: Its weights are constants.
        rows: Inputs [N, *shape] whose ranges are what int8 can represent.
        precision: One of config.PRECISIONS.
        verbose: Let the converter print what it likes.

    Raises:
        PolicyError: The converter lacks an operation, or 'int8' did not become full-integer; names each operation.
    """
    try:
        with stderr_filter.filtered(everything=not verbose):
            model = convert.from_function(
                forward,
                rows.shape[1:],
                precision,
                [rows[k : k + 1] for k in range(len(rows))],  # one by one: a graph may reshape to its batch of one
            )
    except (ConverterError, RuntimeError, ValueError, NotImplementedError) as error:
        missing = operations.unknown(str(error))
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise errors.PolicyError(
            f"TFLite has no operation for {', '.join(missing)}" if missing else f"it cannot be converted: {lines[0]}",
            reason="not_convertible",
            todo="write the layers they come from in other operations; -v shows all that the converter says",
        ) from error
    if precision == "int8" and (floats := operations.not_integer(operations.list_operations(model))):
        raise errors.PolicyError(
            "the model cannot become full-integer; these operations have no int8 kernel: "
            + "; ".join(f"{operation.name} ({operation.tensor})" for operation in floats),
            reason="not_integer",
            todo="use layers that have one (relu, relu6, leaky_relu, tanh, sigmoid, gelu, swish, softmax, ...), or "
            "--precision dynamic",
        )
    return model


def _shape(tensor: Any) -> str:
    return "[" + ", ".join("N" if k == 0 else str(size) for k, size in enumerate(tensor.shape)) + "]"


def _dense_before_norm(model: Any) -> list[tuple[Any, Any]]:
    """Finds layer normalisations, each with the linear dense layer that feeds it alone: that can subtract the mean."""
    nodes, found = _nodes(model), []
    for node in nodes:
        if layer_norm.IntegerLayerNormalization.fits(node.operation):
            (tensor,) = node.input_tensors
            dense = tensor._keras_history.operation
            uses = sum(x is tensor for other in nodes for x in other.input_tensors)
            if uses == 1 and _is_dense(dense, nodes) and dense.activation is keras.activations.linear:
                found.append((node.operation, dense))
    return found


def _nodes(model: Any) -> list[Any]:
    return [node for depth in model._nodes_by_depth.values() for node in depth]


def _first_dense(model: Any) -> Any | None:
    """Finds the dense layer that alone has the input, perhaps behind Flatten, so that it can undo a scaling."""
    tensor, nodes = model.inputs[0], _nodes(model)
    while True:
        taking = [node for node in nodes if any(x is tensor for x in node.input_tensors)]
        if len(taking) != 1:
            return None
        if not isinstance(taking[0].operation, keras.layers.Flatten):
            break
        (tensor,) = taking[0].outputs
    layer = taking[0].operation
    return layer if _is_dense(layer, nodes) and len(tensor.shape) == 2 else None


def _last_dense(model: Any) -> Any | None:
    last = model.outputs[0]._keras_history.operation
    return last if _is_dense(last, _nodes(model)) and last.activation is keras.activations.linear else None


def _is_dense(layer: Any, nodes: list[Any]) -> bool:
    """Returns True for a dense layer with a bias that the model uses once."""
    uses = sum(node.operation is layer for node in nodes)
    return isinstance(layer, keras.layers.Dense) and layer.use_bias and uses == 1


def _numbers(layer: Any, weights: dict[int, FloatArray]) -> layers.Dense:
    return layers.Dense(weights[id(layer.kernel)].T, weights[id(layer.bias)], "none")


def _put(layer: Any, numbers: layers.Layer, weights: dict[int, FloatArray]) -> None:
    assert isinstance(numbers, layers.Dense)
    weights[id(layer.kernel)], weights[id(layer.bias)] = numbers.kernel.T, numbers.bias
