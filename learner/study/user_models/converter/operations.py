"""Lists the operations of a .tflite file, and those that keep it from being full-integer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tensorflow.lite.python import schema_py_generated as schema

_NAMES = {code: name for name, code in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
_TYPES = {code: name.lower() for name, code in vars(schema.TensorType).items() if not name.startswith("_")}
_FLOATS = {"float16", "float32", "float64"}
_UNKNOWN = (r"'tf\.(\w+)' op is neither", r"(?:Custom|Flex) ops: ([\w, ]+)", r"failed to legalize operation '([\w.]+)'")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a .tflite file.

    Attributes:
        name: TFLite's, such as FULLY_CONNECTED.
        inputs, outputs: dtypes of its tensors.
        tensor: Name of its first output; tells which layer it comes from.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensor: str


def list_operations(model: bytes) -> list[Operation]:
    """Returns all operations in the order in which they run, subgraphs included."""
    root = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(model, 0))
    found = []
    for graph in root.subgraphs:
        for operator in graph.operators:
            code = root.operatorCodes[operator.opcodeIndex]
            inputs, outputs = (
                tuple(_TYPES[graph.tensors[i].type] for i in ends if i >= 0)
                for ends in (operator.inputs, operator.outputs)
            )
            name = _NAMES[max(code.builtinCode, code.deprecatedBuiltinCode)]
            tensor = graph.tensors[operator.outputs[0]].name.decode()
            found.append(Operation(name, inputs, outputs, tensor))
    return found


def not_integer(operations: list[Operation]) -> list[Operation]:
    """Returns the operations that calculate in float after the first QUANTIZE, or anywhere if there is none."""
    names = [operation.name for operation in operations]
    start = names.index("QUANTIZE") if "QUANTIZE" in names else 0
    return [
        operation
        for operation in operations[start:]
        if operation.name not in ("QUANTIZE", "DEQUANTIZE") and _FLOATS & {*operation.inputs, *operation.outputs}
    ]


def unknown(text: str) -> list[str]:
    """Returns the TensorFlow operations that TFLite lacks, from the converter's error message."""
    found = [name.strip() for pattern in _UNKNOWN for names in re.findall(pattern, text) for name in names.split(",")]
    return list(dict.fromkeys(name.removeprefix("tf.") for name in found if name.strip()))
