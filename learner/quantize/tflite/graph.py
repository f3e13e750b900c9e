"""Reads the graph of a .tflite file in place: every array is a view of the file's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorflow.lite.python import schema_py_generated as schema

from learner.quantize import scales

_DTYPES = {
    schema.TensorType.FLOAT32: np.float32,
    schema.TensorType.FLOAT16: np.float16,
    schema.TensorType.INT8: np.int8,
    schema.TensorType.INT32: np.int32,
}


class Graph:
    """The first subgraph of a .tflite file, which is a policy's only one.

    Args:
        model: The file. Writing to its arrays changes it.
    """

    def __init__(self, model: bytearray) -> None:
        self._model = schema.Model.GetRootAs(model, 0)
        self._graph = self._model.Subgraphs(0)

    def operators(self) -> Iterator[tuple[int, Any]]:
        """Yields the code of each operator and the operator, in the order of execution."""
        for i in range(self._graph.OperatorsLength()):
            operator = self._graph.Operators(i)
            code = self._model.OperatorCodes(operator.OpcodeIndex())
            yield max(code.BuiltinCode(), code.DeprecatedBuiltinCode()), operator

    def weights_and_bias(self, operator: Any) -> tuple[int, int]:
        """Returns the tensors of a layer's weights and bias.

        Raises:
            Unmapped: It has no bias: the converter drops one that is 0 throughout.
        """
        if operator.InputsLength() != 3 or operator.Inputs(2) < 0:
            raise scales.Unmapped("a layer of the converted graph has no bias")
        return operator.Inputs(1), operator.Inputs(2)

    def constant(self, tensor: int) -> NDArray[Any]:
        """Returns the numbers of a constant in the order of the file: [elements] in its own dtype.

        Raises:
            Unmapped: It is no constant, or of no dtype that models of policies have.
        """
        found = self._graph.Tensors(tensor)
        buffer = self._model.Buffers(found.Buffer())
        if buffer.DataLength() == 0 or found.Type() not in _DTYPES:
            raise scales.Unmapped("a layer of the converted graph has weights that are no constants")
        view: NDArray[Any] = buffer.DataAsNumpy().view(_DTYPES[found.Type()])
        return view

    def scale(self, tensor: int) -> NDArray[np.float32]:
        """Returns the scale of a tensor, [1] or [channels]; empty where it is not quantized."""
        quantization = self._graph.Tensors(tensor).Quantization()
        scale: Any = quantization.ScaleAsNumpy() if quantization else 0
        return scale if isinstance(scale, np.ndarray) else np.zeros(0, np.float32)

    def zero_point(self, tensor: int) -> NDArray[np.int64]:
        """Returns the zero point of a tensor, as `scale`."""
        quantization = self._graph.Tensors(tensor).Quantization()
        zero_point: Any = quantization.ZeroPointAsNumpy() if quantization else 0
        return zero_point if isinstance(zero_point, np.ndarray) else np.zeros(0, np.int64)


def address(array: NDArray[Any]) -> int:
    """Returns where an array begins in memory."""
    return int(array.__array_interface__["data"][0])
