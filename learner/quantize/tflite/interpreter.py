"""Runs .tflite files on LiteRT, the runtime that actors use."""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert import interpreter as litert
from numpy.typing import NDArray

from broker.program import xnnpack
from learner.quantize.tflite import stderr_filter

FloatArray = NDArray[np.float32]


def kernels(model: bytes) -> str:
    """Returns which kernels run a model: "XNNPACK" only if that takes the graph from end to end, else "built-in"."""
    built = litert.Interpreter(model_content=model, num_threads=1)
    with stderr_filter.filtered():
        built.allocate_tensors()
    entry, exit_ = built.get_input_details()[0]["index"], built.get_output_details()[0]["index"]
    return xnnpack.kernels(built._interpreter, entry, exit_)


def shapes(model: bytes) -> tuple[tuple[int, ...], int]:
    """Returns the shape of one observation that a model takes, and how many outputs it gives.

    Raises:
        ValueError: It is no .tflite file of one input [N, *shape] and one output [N, n].
    """
    built = litert.Interpreter(model_content=model, num_threads=1)
    entries, exits = built.get_input_details(), built.get_output_details()
    if (len(entries), len(exits)) != (1, 1) or len(exits[0]["shape"]) != 2:
        raise ValueError(f"it has {len(entries)} inputs and {len(exits)} outputs")
    return tuple(int(n) for n in entries[0]["shape"][1:]), int(exits[0]["shape"][1])


def run(model: bytes, observations: NDArray[Any]) -> tuple[FloatArray, float, float]:
    """Runs a model on a batch of observations.

    Args:
        model: A .tflite file.
        observations: Raw observations [N, *shape] in any dtype.

    Returns:
        Outputs [N, n], and the least and greatest value that its int8 output can give; -inf and inf of other models.

    Raises:
        RuntimeError: The runtime does not run it: XNNPACK takes no rescaling factor beyond its range, as behind a layer
            that is nearly dead.
    """
    built = litert.Interpreter(model_content=model, num_threads=1)
    entry = built.get_input_details()[0]["index"]
    exit_ = built.get_output_details()[0]["index"]
    try:
        outputs = _invoke(built, entry, exit_, observations)
    except RuntimeError:  # the graph reshapes to a fixed batch
        outputs = np.concatenate([_invoke(built, entry, exit_, row[None]) for row in observations])
    scale, zero_point = _output_scale(built._interpreter, exit_)
    if not scale:
        return outputs, -np.inf, np.inf
    return outputs, scale * (-127.5 - zero_point), scale * (126.5 - zero_point)  # half a step inside the ends


def answer(model: bytes, observations: NDArray[Any], *, delegated: bool = True) -> tuple[FloatArray, float]:
    """Runs a model as actors do. Leaves stderr alone, so that it may be called from any thread.

    Args:
        model: A .tflite file.
        observations: Raw observations [N, *shape] in any dtype.
        delegated: Let XNNPACK take what it can; else the built-in kernels run everything.

    Returns:
        Outputs [N, n], and the step between two values of its int8 output; 0 of other models.

    Raises:
        RuntimeError, ValueError: The runtime does not run it.
    """
    kinds = litert.OpResolverType
    resolver = kinds.AUTO if delegated else kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    built = litert.Interpreter(model_content=model, num_threads=1, experimental_op_resolver_type=resolver)
    entry, exit_ = built.get_input_details()[0]["index"], built.get_output_details()[0]["index"]
    try:
        outputs = _answer(built, entry, exit_, observations)
    except RuntimeError:  # the graph reshapes to a fixed batch
        outputs = np.concatenate([_answer(built, entry, exit_, row[None]) for row in observations])
    return outputs, _output_scale(built._interpreter, exit_)[0]


def _output_scale(native: Any, exit_: int) -> tuple[float, int]:
    """Returns scale and zero point of an int8 output before it becomes float32; zeros where it is none."""
    for node in reversed(range(native.NumNodes())):  # the last ones; details of all take longer than running it
        if native.NodeName(node) == "DEQUANTIZE" and exit_ in native.NodeOutputs(node):
            scale, zero_point = native.TensorQuantization(int(native.NodeInputs(node)[0]), 0)
            return scale, zero_point
    return 0.0, 0


def _invoke(built: Any, entry: int, exit_: int, observations: NDArray[Any]) -> FloatArray:
    with stderr_filter.filtered():
        return _answer(built, entry, exit_, observations)


def _answer(built: Any, entry: int, exit_: int, observations: NDArray[Any]) -> FloatArray:
    if not np.array_equal(built.get_input_details()[0]["shape"], observations.shape):
        built.resize_tensor_input(entry, observations.shape)
    built.allocate_tensors()
    built.set_tensor(entry, observations.astype(np.float32))
    built.invoke()
    outputs: FloatArray = built.get_tensor(exit_)
    return outputs
