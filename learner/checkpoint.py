"""Checkpoints: one .npz each, written whole or not at all, the newest readable one wins.

A checkpoint is a flat dict of arrays (parts joined by `/`) and one JSON text with counters and random state.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker import errors, identity, specs

KEEP = 3
FORMAT = 2
"""Of the arrays: since 2 dense kernels and convolutions have their outputs first."""
_META = "__meta__"
State = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run needs to go on: `meta` is JSON, `parts` are the arrays of each component."""

    meta: dict[str, Any]
    parts: dict[str, dict[str, NDArray[Any]]]

    def check(self, spec: specs.EnvSpec, env_id: str) -> None:
        """Raises SpecError unless it was made for this environment, which actors have."""
        if self.meta["fingerprint"] != spec.fingerprint:
            raise errors.SpecError(
                "the run was made for another environment",
                where=f"run: {self.meta['env_id']}; actors: {env_id}, {spec.describe()}",
                todo="start the actors with the run's environment, or start a new run",
            )


def save(directory: Path, updates: int, meta: Mapping[str, Any], parts: Mapping[str, State]) -> Path:
    """Writes checkpoint `updates` and removes all but the newest KEEP."""
    arrays = {f"{part}/{name}": array for part, state in parts.items() for name, array in state.items()}
    arrays[_META] = np.frombuffer(json.dumps({"format": FORMAT, **meta}).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path = directory / f"{updates:010d}.npz"
    identity.write_atomic(path, buffer.getvalue(), mode=0o644)
    for old in _newest_first(directory)[KEEP:]:
        old.unlink()
    return path


def load_newest(directory: Path, log: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; None where there is none at all.

    Args:
        directory: Where `save` wrote.
        log: Told about every broken checkpoint that is passed over.

    Raises:
        RunError: There are checkpoints, but all are broken, or the newest is of another release.
    """
    found = _newest_first(directory)
    for path in found:
        try:
            return _load(path)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            log(f"checkpoint {path} is broken ({error}); falling back to the one before")
    if found:
        raise errors.RunError(
            "no checkpoint of the run can be read",
            where=str(directory),
            todo="start a new run; policies/ still has the policies",
        )
    return None


def _load(path: Path) -> Checkpoint:
    parts: dict[str, dict[str, NDArray[Any]]] = {}
    with np.load(path, allow_pickle=False) as file:
        meta = json.loads(file[_META].tobytes())
        for key in file.files:
            if key != _META:
                part, _, name = key.partition("/")
                parts.setdefault(part, {})[name] = file[key]
    if (found := meta.pop("format", 1)) != FORMAT:
        raise errors.RunError(
            f"the checkpoint has format {found}, and this release of actorq-fleet reads format {FORMAT}",
            where=str(path),
            todo="go on with the release that wrote it, or start a new run",
        )
    return Checkpoint(meta, parts)


def _newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9]*.npz"), reverse=True)
