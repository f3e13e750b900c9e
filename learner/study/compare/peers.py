"""Runtimes of others that can act in a fleet beside ours: which of them are installed."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.contract import errors

ROOT = Path(__file__).parents[3]
"""The source tree: peers are not part of what is installed."""
_NAME = "tests.benchmarks.peers"
_FILE = ROOT / "tests" / "benchmarks" / "peers" / "__init__.py"
_CHECK_S = 60.0


def python() -> Path:
    """Returns the interpreter of the peers' environment.

    Raises:
        RuntimeMissing: They are not installed.
    """
    return Path(_listed().python())


def known() -> Mapping[str, str]:
    """Returns MODULE:CLASS of each peer by its name.

    Raises:
        RuntimeMissing: This is no source tree.
    """
    runtimes: Mapping[str, str] = _listed().RUNTIMES
    return runtimes


def missing(names: Sequence[str]) -> dict[str, str]:
    """Returns those that cannot act here, each with the reason, as a line for people."""
    try:
        runtimes = known() if names else {}
        unknown = f"unknown; use some of {', '.join(runtimes)}"
        found = {name: unknown for name in names if name not in runtimes}
        if others := [name for name in names if name in runtimes]:
            interpreter = python()
            reasons = {name: _why_not(interpreter, runtimes[name].partition(":")[0]) for name in others}
            found |= {name: f"not installed ({why})" for name, why in reasons.items() if why}
        return found
    except errors.RuntimeMissing as error:
        return dict.fromkeys(names, f"not installed ({error.what}): {error.todo}")


def _listed() -> Any:
    """Returns the module that lists them, which is not imported by name: another package may be called `tests`."""
    spec = importlib.util.spec_from_file_location(_NAME, _FILE) if _FILE.exists() else None
    if spec is None or spec.loader is None:
        raise errors.RuntimeMissing("peers come with the source tree", where=str(_FILE), todo="run it from there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _why_not(interpreter: Path, module: str) -> str:
    """Returns what the peers' own interpreter says when it imports one; empty if it does."""
    command = [str(interpreter), "-c", f"import importlib; importlib.import_module({module!r})"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=ROOT, timeout=_CHECK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if lines else f"it ends with {done.returncode}") if done.returncode else ""
