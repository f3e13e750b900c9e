"""Tells which kernels run a TFLite graph; without importing a runtime, for both sides."""

from __future__ import annotations

from typing import Any


def kernels(native: Any, graph_input: int, graph_output: int) -> str:
    """Returns "XNNPACK" if that took the whole graph, "built-in" if the runtime's own kernels run some of it.

    A delegate is listed last, behind the operations it replaced. That alone says little: tflite-runtime delegates the
    float32 scaling at the head of an int8 graph and runs all its layers itself. So it must reach from end to end. The
    details of all operations, which the runtime's own Python would ask for, take as long as building the rest.

    Args:
        native: The C++ interpreter behind a runtime's `Interpreter`, after its tensors were allocated.
        graph_input: Index of the graph's input tensor.
        graph_output: Index of its output tensor.
    """
    last = native.NumNodes() - 1
    delegated = last >= 0 and native.NodeName(last) == "DELEGATE"
    whole = delegated and graph_input in native.NodeInputs(last) and graph_output in native.NodeOutputs(last)
    return "XNNPACK" if whole else "built-in"
