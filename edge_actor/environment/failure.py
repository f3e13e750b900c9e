"""Exceptions as one line that may go to a log, a terminal and the learner."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from broker.contract import errors

LIMIT = 300
"""The most characters of such a line."""


def text(error: BaseException) -> str:
    """Returns type and message; without a message, the place it came from: the innermost one that is not ours."""
    if isinstance(error, errors.ActorqError):
        return line(error.what)
    try:
        message = str(error).strip()
    except Exception:  # of a class that somebody wrote
        message = ""
    frames = traceback.extract_tb(error.__traceback__)
    if not message:
        message = f"no message{_place(frames)}"
    elif "unpack" in message and frames and _is_adapter(frames[-1]):
        message += " (step must answer observation, reward, terminated, truncated, info; reset observation, info)"
    return line(f"{type(error).__name__}: {message}")


def line(words: str) -> str:
    """Returns one line of printable characters, shortened where it is too long."""
    printable = "".join(c if c.isprintable() else " " for c in words[: 8 * LIMIT])
    joined = " ".join(printable.split())
    return joined if len(joined) <= LIMIT else f"{joined[: LIMIT - 3]}..."


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    theirs = [frame for frame in frames if not _is_adapter(frame)]
    found = (theirs or list(frames))[-1:]
    return "".join(f", at {frame.filename}:{frame.lineno} in {frame.name}" for frame in found)


def _is_adapter(frame: traceback.FrameSummary) -> bool:
    """Returns whether it is in this package or in Gymnasium, which take what an environment answers apart."""
    return bool({"edge_actor", "gymnasium"} & set(Path(frame.filename).parts))
