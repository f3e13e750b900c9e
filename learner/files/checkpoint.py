"""Checkpoints: one .npz each, written whole or not at all, the newest readable one wins.

A checkpoint is a flat dict of arrays (parts joined by `/`) and one JSON text with counters and random state. Behind the
archive (numpy passes over it) stands the SHA-256 of all before it: whatever became of a file, nothing reads it first.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, specs
from broker.program import storage

_log = logging.getLogger(__name__)
KEEP = 3
FORMAT = 3
"""Since 2 dense kernels and convolutions have their outputs first; since 3 there is a digest."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_END = b"PK\5\6"  # of an archive without comment: its last 22 bytes begin so
_END_BYTES = 22
_META = "__meta__"
State = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run needs to go on: `meta` is JSON, `parts` are the arrays of each component."""

    meta: dict[str, Any]
    parts: dict[str, dict[str, NDArray[Any]]]

    def check(self, spec: specs.EnvSpec, env_id: str) -> None:
        """Checks that it was made for this environment, which actors have.

        Raises:
            SpecError: It was not.
        """
        if self.meta["fingerprint"] != spec.fingerprint:
            raise errors.SpecError(
                "the run was made for another environment",
                where=f"run: {self.meta['env_id']}; actors: {env_id}, {spec.describe()}",
                todo="start the actors with the run's environment, or start a new run",
            )


def save(directory: Path, updates: int, meta: Mapping[str, Any], parts: Mapping[str, State]) -> Path:
    """Writes checkpoint `updates`, removes all but the newest KEEP, and returns its path.

    Newer ones go too: they were passed over, and the next resume must not prefer them.

    Raises:
        OSError: It cannot be written; those before are as they were.
    """
    arrays = {f"{part}/{name}": array for part, state in parts.items() for name, array in state.items()}
    arrays[_META] = np.frombuffer(json.dumps({"format": FORMAT, **meta}).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # they might be allow_pickle, for all that it knows
    buffer.write(hashlib.sha256(buffer.getbuffer()).digest())
    path = directory / f"{updates:010d}.npz"
    storage.write_atomic(path, buffer.getvalue(), mode=0o644)
    found = _newest_first(directory)
    at = found.index(path)
    for other in found[:at] + found[at + KEEP :]:
        with contextlib.suppress(OSError):  # a directory, say: it is passed over, as it was
            other.unlink()
    return path


def is_finite(state: State) -> bool:
    """Returns whether all of its numbers are finite. One pass of BLAS: NaN and infinity show in the sum of squares."""
    floats = (array.ravel() for array in state.values() if array.dtype.kind == "f")
    return all(math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all()) for array in floats)


def load_newest(directory: Path) -> Checkpoint | None:
    """Returns the newest checkpoint that is whole; None where there is none at all.

    Args:
        directory: Where `save` wrote.

    Raises:
        RunError: There are checkpoints, but all are broken, or the newest is of another release.
    """
    found = _newest_first(directory)
    for path in found:
        try:
            return _load(path)
        except (OSError, ValueError) as error:
            _log.warning("checkpoint %s is broken (%s); falling back to the one before", path, error)
    if found:
        raise errors.RunError(
            "no checkpoint of the run can be read",
            where=str(directory),
            todo="start a new run; policies/ still has the policies",
        )
    return None


def _load(path: Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not as it was written, or of no use.
        RunError: It is of another release.
    """
    data = path.read_bytes()
    archive, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.sha256(archive).digest() != digest:
        if data[-_END_BYTES:].startswith(_END):
            raise _foreign(f"{FORMAT - 1} or less", path)
        raise ValueError(f"the digest of its {len(data)} bytes is wrong")
    parts: dict[str, dict[str, NDArray[Any]]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as members:
            if sum(member.file_size for member in members.infolist()) > len(archive):
                raise ValueError("it is compressed, and may be of any size")
        with np.load(io.BytesIO(archive), allow_pickle=False) as file:
            meta = json.loads(file[_META].tobytes())
            for key in file.files:
                if key != _META:
                    part, _, name = key.partition("/")
                    parts.setdefault(part, {})[name] = file[key]
        found = meta.pop("format", 1)
    except (KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"it is whole, but no checkpoint: {error}") from error
    if found != FORMAT:
        raise _foreign(str(found), path)
    if not all(map(is_finite, parts.values())):
        raise ValueError("it holds NaN or infinite numbers")
    return Checkpoint(meta, parts)


def _foreign(found: str, path: Path) -> errors.RunError:
    return errors.RunError(
        f"the checkpoint has format {found}, and this release of actorq-fleet reads format {FORMAT}",
        where=str(path),
        todo="go on with the release that wrote it, or start a new run",
    )


def _newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9]*.npz"), reverse=True)
