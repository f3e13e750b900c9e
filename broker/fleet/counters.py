"""Counters on disk that only ever grow: epochs of a learner, and boots of an actor."""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path

from broker.contract import errors
from broker.program import storage

_FILE_BYTES = 64
_LIMIT = (1 << 63) - 1
"""One more than the largest number that ledger and spool can hold."""
_RANDOM_BITS = 28
"""The random bits of a boot's number: so many that it has 18 digits until 2088, which are decoded fastest (codec)."""

_log = logging.getLogger(__name__)


def next_count(path: Path, first: int = 1, *, may_be_lost: bool = False, limit: int = _LIMIT) -> int:
    """Adds one to a counter on disk and returns it; two processes never get the same number.

    Args:
        path: The counter's file.
        first: The least that it returns: a counter that does not exist yet begins with it.
        may_be_lost: A counter that cannot be used is logged, and begins with `first` as well; otherwise it is an error.
        limit: A larger number is no counter.

    Raises:
        IdentityError: The file does not hold a counter.
    """
    count = first
    try:
        with storage.locked(path):
            try:
                count = max(_counted(path, limit) + 1, first)
            except FileNotFoundError:
                pass
            except errors.IdentityError as error:
                if not may_be_lost:
                    raise
                _log.warning("%s (%s); it begins anew, with %d", error.what, path, first)
            storage.write_atomic(path, f"{count}\n".encode())
    except OSError as error:
        if not may_be_lost:
            raise
        _log.warning("a counter cannot be kept: %s", error)
    return count


def _counted(path: Path, limit: int) -> int:
    """Reads a counter file; raises FileNotFoundError if there is none, IdentityError if it holds no number."""
    try:
        text = storage.read_regular(path, _FILE_BYTES).strip()
        if not text.isdigit() or int(text) >= limit:
            raise ValueError(repr(text))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise errors.IdentityError(
            f"a counter file does not hold a number: {error}",
            where=str(path),
            todo="write the last number used into it",
        ) from error
    return int(text)


def next_boot(path: Path) -> int:
    """Returns a number for a process: higher than those of all before it on this machine, and no other machine's.

    The upper bits count up; they begin with, and never fall behind, the time of day in seconds, so that a counter that
    was lost, emptied by a power cut or put back makes a lower number only where the clock is wrong as well. The lower
    bits are random: two cards of one image, or one card copied, do not number their messages alike.

    Args:
        path: The counter's file. That it cannot be used is logged, and no error.
    """
    count = next_count(path, int(time.time()), may_be_lost=True, limit=_LIMIT >> _RANDOM_BITS)
    return count << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
