"""Runtimes of others that can act in a fleet beside ours: which of them are installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
"""The source tree: peers are not part of what is installed."""
_FILE = ROOT / "tests" / "benchmarks" / "peers" / "__init__.py"
_CHECK_S = 60.0


def python() -> Path:
    """Returns the interpreter of the peers' environment, which `make peers` makes."""
    return Path(sys.prefix) / "peers" / "bin" / "python"


def known() -> Mapping[str, str]:
    """Returns MODULE:CLASS of each peer by its name; empty outside a source tree."""
    spec = importlib.util.spec_from_file_location("actorq_peers", _FILE) if _FILE.exists() else None
    if spec is None or spec.loader is None:
        return {}
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    runtimes: Mapping[str, str] = module.RUNTIMES
    return runtimes


def missing(names: Sequence[str]) -> dict[str, str]:
    """Returns those that cannot act here, each with the reason, as a line for people."""
    runtimes, found = known(), {}
    for name in names:
        if name not in runtimes:
            found[name] = f"unknown; use some of {', '.join(runtimes)}" if runtimes else "not installed: no source tree"
        elif not python().exists():
            found[name] = "not installed; `make peers` does it"
        elif why := _why_not(runtimes[name].partition(":")[0]):
            found[name] = f"not installed ({why}); `make peers` does it"
    return found


def _why_not(module: str) -> str:
    """Returns what the peers' own interpreter says when it imports one; empty if it does."""
    command = [str(python()), "-c", f"import importlib; importlib.import_module({module!r})"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=ROOT, timeout=_CHECK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if lines else f"it ends with {done.returncode}") if done.returncode else ""
