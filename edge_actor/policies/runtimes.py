"""Runtimes that policies are built on: TFLite, or a plug-in of the user's for another one (Hailo, Coral, ONNX).

A plug-in is a class that stands in for `interpreter.Interpreter`, named as MODULE:CLASS by a setting of this machine
and by nothing else: no message of the network can name one, since naming it runs its code.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, messages
from edge_actor.policies import interpreter

_INSTANCE = ("delegate", "input", "output", "invoke")


class Built(Protocol):
    """A model that is ready to run, as `interpreter.Interpreter` describes it.

    Attributes:
        runtime: Its text names the runtime and its version. A plug-in's is on the class: told before any policy.
        delegate: The kernels that run the model.
        input: float32 [batch, *shape]. Write here.
        output: float32 [batch, outputs]. Read here; the next `invoke` overwrites it.
        invoke: Runs the model.
    """

    @property
    def runtime(self) -> object: ...
    @property
    def delegate(self) -> str: ...
    @property
    def input(self) -> NDArray[np.float32]: ...
    @property
    def output(self) -> NDArray[np.float32]: ...
    @property
    def invoke(self) -> Callable[[], object]: ...


def is_plugin(name: str) -> bool:
    """Returns whether a setting names a plug-in, MODULE:CLASS."""
    return ":" in name


def describe(wanted: str) -> str:
    """Returns the name and version of the runtime that `build` would use.

    Raises:
        RuntimeMissing: It is not installed, cannot be imported, or is no class of that kind.
    """
    return str(_plugin(wanted).runtime if is_plugin(wanted) else interpreter.find(wanted))


def build(
    model: bytes,
    batch: int,
    *,
    runtime: str = "auto",
    threads: int = 1,
    delegated: bool = True,
    limit_bytes: int = messages.MAX_POLICY_BYTES,
) -> Built:
    """Builds a model, as `interpreter.Interpreter`; `delegated` is no matter of a plug-in.

    Raises:
        RuntimeMissing: There is no such runtime.
        PolicyError: It cannot run the model.
    """
    if not is_plugin(runtime):
        return interpreter.Interpreter(
            model, batch, runtime=runtime, threads=threads, delegated=delegated, limit_bytes=limit_bytes
        )
    made = _plugin(runtime)
    try:
        built = made(model, batch, threads=threads, limit_bytes=limit_bytes)
    except errors.ActorqError:
        raise
    except Exception as error:
        raise errors.PolicyError(
            f"the runtime cannot load the model: {type(error).__name__}: {error}", reason="model", where=runtime
        ) from error
    _check(built, batch, runtime)
    checked: Built = built
    return checked


@functools.cache
def _plugin(name: str) -> Any:
    """Imports a plug-in; returns its class."""
    module, _, leaf = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), leaf, None)
    except (Exception, SystemExit) as error:
        raise errors.RuntimeMissing(
            f"the runtime {name} cannot be imported: {type(error).__name__}: {error}",
            where="runtime",
            todo=f"install what holds {module} in this environment, or name its folder in PYTHONPATH",
        ) from error
    if not callable(found):
        raise errors.RuntimeMissing(
            f"the runtime {name} cannot be used: {module} has no class {leaf}",
            where="runtime",
            todo="name it as MODULE:CLASS",
        )
    if not hasattr(found, "runtime"):
        raise errors.RuntimeMissing(
            f"the runtime {name} cannot be used: the class has no attribute runtime",
            where="runtime",
            todo="give the class `runtime`, a text with its name and version",
        )
    return found


def _check(built: Any, batch: int, name: str) -> None:
    """Raises PolicyError if what a plug-in built cannot be used as an interpreter."""
    problem = ""
    if missing := [one for one in _INSTANCE if not hasattr(built, one)]:
        problem = f"has no {', '.join(missing)}"
    elif not isinstance(built.delegate, str):
        problem = f"has a {type(built.delegate).__name__} as delegate, not a text"
    elif not callable(built.invoke):
        problem = "has an invoke that cannot be called"
    else:
        for tensor in ("input", "output"):
            array = getattr(built, tensor)
            if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim < 2 or len(array) != batch:
                problem = f"has an {tensor} that is no float32 array [{batch}, ...]"
                break
    if problem:
        raise errors.PolicyError(
            f"what the runtime built {problem}", reason="runtime", where=name, todo="see edge_actor/README.md, Runtimes"
        )
