"""Reads calibration observations from an .npz file."""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors

ROWS_MIN = 64
_BLOCKS = 16
_EPISODES_MIN = 4
BYTES_MAX = 1 << 30
"""The limit of observations in memory, at four bytes a number or more: networks run on float32. The size that a file
would have is read in its headers, before anything else of it is."""
_format: Any = np.lib.format  # without types in numpy 1.26
_HEADER_BYTES_MAX = 1 << 16  # of arrays of numbers, which numpy writes in version 1.0


_UNREADABLE = (
    OSError, ValueError, EOFError, KeyError, NotImplementedError, RuntimeError, OverflowError, SyntaxError,
    struct.error, tokenize.TokenError, zlib.error, zipfile.BadZipFile,
)  # fmt: skip
"""Exceptions of Python's zipfile and numpy for archives that were damaged or made to do harm."""


class _TooLarge(Exception):
    """The observations are too large; says how large."""


def _read(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Reads one array [N, *shape] of an archive, if its headers agree with each other and with the limit.

    Raises:
        _TooLarge: It would not fit.
        ValueError: It is no array of numbers, or not as long as it says.
    """
    if member.file_size > BYTES_MAX + _HEADER_BYTES_MAX:
        raise _TooLarge(f"{member.file_size / 1e6:,.0f} MB")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack all, and then count
        raise ValueError("it is packed in a way that numpy.savez does not pack")
    with file.open(member) as stream:
        if (version := _format.read_magic(stream)) != (1, 0):
            raise ValueError(f"its array has format {version}, as no array of numbers has")
        shape, _, dtype = _format.read_array_header_1_0(stream)
        if dtype.hasobject:
            raise ValueError("its array holds Python objects")
        size_bytes, begins = math.prod(shape) * dtype.itemsize, stream.tell()
        if (needed := math.prod(shape) * max(4, dtype.itemsize)) > BYTES_MAX:
            raise _TooLarge(f"{needed / 1e6:,.0f} MB")
        if member.file_size != begins + size_bytes:
            raise ValueError(f"its array has {member.file_size - begins} bytes, and should have {size_bytes}")
        stream.seek(0)
        array: NDArray[Any] = _format.read_array(stream, allow_pickle=False)
    return array


def has_episodes(episodes: NDArray[Any] | None) -> bool:
    """Returns whether there are enough episodes to hold some of them back."""
    return episodes is not None and len(np.unique(episodes)) >= _EPISODES_MIN


def split(episodes: NDArray[Any] | None, rows: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns indices of three quarters of the rows to calibrate with, and of the rest to judge by.

    Whole episodes go to either side: rows of one resemble each other, and a row beside one that set the ranges tells
    nothing of what fresh episodes bring. Without numbers of episodes, or with fewer than four of them, blocks of
    successive rows stand for them.

    Args:
        episodes: Number of the episode of each row [N]; None where it is not known.
        rows: N.
        seed: Of the choice.
    """
    groups = episodes if episodes is not None and has_episodes(episodes) else np.arange(rows) * _BLOCKS // rows
    known = np.random.default_rng(seed).permutation(np.unique(groups))
    held_out = np.isin(groups, known[: max(1, len(known) // 4)])
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def load(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Reads observations [N, *shape] from an .npz file: its array `observations`, or its only one.

    Returns:
        The observations, and the array `episode` [N] of the numbers of their episodes, where there is one.

    Raises:
        ConfigError: There is no such array, or it is too large, has too few rows, no numbers, or NaN.
    """
    todo = "save observations as your environment gives them: np.savez('OBS.npz', observations=array)"
    try:
        with zipfile.ZipFile(path) as file:
            names = [member.removesuffix(".npy") for member in file.namelist()]
            name = "observations" if "observations" in names else names[0] if len(names) == 1 else ""
            array = _read(file, file.infolist()[names.index(name)]) if name else np.empty(0)
            has_episodes = name == "observations" and "episode" in names
            episodes = _read(file, file.infolist()[names.index("episode")]) if has_episodes else None
    except _TooLarge as error:
        raise errors.ConfigError(
            f"the observations would take {error} in memory, and {BYTES_MAX / 1e6:,.0f} MB are the limit",
            where=str(path),
            todo="save fewer rows: a thousand or more are good",
        ) from error
    except _UNREADABLE as error:
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
    if episodes is not None and episodes.shape != (len(array),):
        raise errors.ConfigError(
            f"`episode` has the shape {episodes.shape}, and there are {len(array)} observations",
            where=str(path),
            todo="give each observation the number of its episode, or leave `episode` out",
        )
    return array, episodes
