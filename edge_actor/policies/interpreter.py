"""One TFLite interpreter over ai-edge-litert or tflite-runtime, and which kernels it really runs.

The only file that imports a runtime. Its callers write into `input`, call `invoke` and read `output`: both are views of
the tensors' own memory, which saves two calls and a copy each way, 0.6 us of 3.4 at 256x2. The runtime's own `invoke`
refuses while such views exist, because a later resize would leave them dangling; here the shape is final before the
first view is taken, so the call beneath it is used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, messages
from broker.program import amx, xnnpack
from edge_actor.policies import model_file

_MODULES = {"ai-edge-litert": "ai_edge_litert.interpreter", "tflite-runtime": "tflite_runtime.interpreter"}
"""Distribution and module, the better one first: only ai-edge-litert runs int8 through XNNPACK."""
_TRUSTS_FILES = "tflite-runtime"
"""It follows the offsets in a file without looking where they lead."""
_BUILT_FOR_NUMPY_1 = "tflite-runtime"
"""Beside numpy 2 it loads, and fails with the first model."""
_MAGIC = b"TFL3"


@dataclass(frozen=True, slots=True)
class Runtime:
    """A TFLite runtime that is installed and loads."""

    name: str
    version: str
    module: ModuleType

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@functools.cache
def find(wanted: str = "auto") -> Runtime:
    """The runtime named `wanted`, or the best one for `auto`.

    Raises:
        RuntimeMissing: It is not installed, or does not load.
    """
    tried = []
    for name, module in _MODULES.items():
        if wanted not in ("auto", name):
            continue
        try:
            version = importlib.metadata.version(name)
            if name == _BUILT_FOR_NUMPY_1 and not np.__version__.startswith("1."):
                raise ImportError(f"built against numpy 1, and numpy {np.__version__} is installed")
            return Runtime(name, version, importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            tried.append(f"{name}: {error}")
    raise errors.RuntimeMissing(
        "no TFLite runtime can be loaded", where="; ".join(tried) or wanted, todo="pip install 'actorq-fleet[actor]'"
    )


class Interpreter:
    """A model with a fixed batch size, for one thread at a time.

    Attributes:
        runtime: Which runtime runs it.
        delegate: "XNNPACK" if that took the whole graph, "built-in" if the runtime's own kernels run some of it.
        input: float32 [batch, *shape], the input tensor itself. Write here.
        output: float32 [batch, outputs], the output tensor itself. Read here; the next `invoke` overwrites it.
        invoke: Runs the model.
    """

    def __init__(
        self,
        model: bytes,
        batch: int,
        *,
        runtime: str = "auto",
        threads: int = 1,
        delegated: bool = True,
        limit_bytes: int = messages.MAX_POLICY_BYTES,
    ) -> None:
        """Builds it; holds Python's interpreter lock for 0.1 to 5 ms, by size.

        Args:
            model: A .tflite file.
            batch: Observations at once.
            runtime: One of config.RUNTIMES.
            threads: Of the runtime.
            delegated: Let XNNPACK take what it can; else the built-in kernels run everything.
            limit_bytes: The largest model to accept.

        Raises:
            RuntimeMissing: There is no runtime.
            PolicyError: The bytes are not a model of one float32 input and one float32 output.
        """
        self.runtime = find(runtime)
        if len(model) > limit_bytes:
            raise errors.PolicyError(f"the model has {len(model)} bytes, more than any actor takes", reason="size")
        if model[4:8] != _MAGIC:
            raise errors.PolicyError("not a TFLite model", reason="model", todo="give a .tflite file")
        if self.runtime.name == _TRUSTS_FILES:
            model_file.check(model)
        try:
            with amx.refused():
                resolvers = self.runtime.module.OpResolverType
                built = self.runtime.module.Interpreter(
                    model_content=model,
                    num_threads=threads,
                    experimental_op_resolver_type=resolvers.AUTO
                    if delegated
                    else resolvers.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
                )
                inputs, outputs = built.get_input_details(), built.get_output_details()
                if len(inputs) != 1 or len(outputs) != 1:
                    raise errors.PolicyError(
                        f"the model has {len(inputs)} inputs and {len(outputs)} outputs, not one of each",
                        reason="model",
                    )
                if not inputs[0]["dtype"] == outputs[0]["dtype"] == np.float32:
                    raise errors.PolicyError(
                        "input and output of the model are not float32",
                        reason="dtype",
                        todo="convert it with float32 input and output; QUANTIZE belongs inside the graph",
                    )
                built.resize_tensor_input(inputs[0]["index"], [batch, *inputs[0]["shape"][1:].tolist()])
                built.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise errors.PolicyError(f"the runtime cannot load the model: {error}", reason="model") from error
        self._built = built  # holds the model's bytes, which the kernels read in place
        raw = built._interpreter
        self.delegate = xnnpack.kernels(raw, inputs[0]["index"], outputs[0]["index"])
        self.input: NDArray[np.float32] = raw.tensor(raw, inputs[0]["index"])
        self.output: NDArray[np.float32] = raw.tensor(raw, outputs[0]["index"])
        self.invoke: Callable[[], None] = raw.Invoke
        if self.output.ndim != 2 or self.output.shape[0] != batch:
            raise errors.PolicyError(
                f"the model's output has shape {self.output.shape}, not [{batch}, outputs]", reason="model"
            )
