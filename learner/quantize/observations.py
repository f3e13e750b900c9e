"""Calibration observations out of an .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker import errors

ROWS_MIN = 64


def load(path: Path) -> NDArray[Any]:
    """Observations [N, *shape] out of an .npz file: its array `observations`, or its only one.

    Raises:
        ConfigError: There is no such array, or it has too few rows, no numbers, or NaN.
    """
    todo = "save observations as your environment gives them: np.savez('OBS.npz', observations=array)"
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is one array, not an .npz archive")
            names = list(file.files)
            name = "observations" if "observations" in names else names[0] if len(names) == 1 else ""
            array: NDArray[Any] = file[name] if name else np.empty(0)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise errors.ConfigError(f"no observations can be read: {error}", where=str(path), todo=todo) from error
    if not name:
        raise errors.ConfigError(
            f"it holds {len(names)} arrays ({', '.join(sorted(names))}), and none is named `observations`",
            where=str(path),
            todo=todo,
        )
    if array.dtype.kind not in "fiu":
        raise errors.ConfigError(f"observations are {array.dtype}, not numbers", where=str(path), todo=todo)
    if array.ndim < 2 or len(array) < ROWS_MIN:
        raise errors.ConfigError(
            f"observations have the shape {array.shape}: {ROWS_MIN} rows are the least, a thousand or more are good",
            where=str(path),
            todo=todo,
        )
    if not np.isfinite(array).all():
        raise errors.ConfigError("observations hold NaN or infinite values", where=str(path), todo="leave those out")
    return array
