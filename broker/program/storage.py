"""Errors of a disk that is full, read-only or failing, in words that a user can act on."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from broker.contract import errors

_WHAT = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of disk space is used up",
    errno.EFBIG: "a file has reached the largest size that is allowed",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk does not read or write (input/output error)",
    errno.ESTALE: "the network file system has lost the file",
}
_WHAT_NAMED = {errno.EACCES: "access is denied", errno.EPERM: "access is denied"}  # a socket has these, too
_NO_TEMPORARY = "No usable temporary directory"  # as tempfile says it, under ENOENT
_TODO = {
    errno.EROFS: "mount it writable, or choose a place on another; a failing disk is often made read-only",
    errno.EIO: "look at the kernel's log (dmesg), and choose a place on another disk",
    errno.EFBIG: "raise the limit (ulimit -f), or choose a place on another file system",
    errno.EACCES: "change its owner or mode, or choose another place",
    errno.EPERM: "change its owner or mode, or choose another place",
}


def of_disk(error: OSError) -> bool:
    """Returns whether an error is about the place where files lie, and not about this program."""
    if error.errno in _WHAT_NAMED:
        return error.filename is not None
    return error.errno in _WHAT or _NO_TEMPORARY in str(error)


def explained(error: OSError) -> errors.StorageError:
    """Returns an error that is `of_disk` in words for people."""
    code = error.errno or 0
    if _NO_TEMPORARY in str(error):
        return errors.StorageError(
            "no directory for temporary files can be written to",
            where=str(error.strerror),
            todo="make room in one of them, or name another by TMPDIR",
        )
    where = "" if error.filename is None else os.fsdecode(error.filename)
    return at(_WHAT.get(code) or _WHAT_NAMED[code], where, todo=_TODO.get(code, ""))


def at(what: str, where: str, *, todo: str = "") -> errors.StorageError:
    """Returns an error about a file, or about one that a library did not name."""
    return errors.StorageError(
        what,
        where=f"{where or 'some file of this command'}{_free(Path(where or '.'))}",
        todo=todo or "make room there, or choose a place on another disk; then start again",
    )


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to errors within a `with` block: what fails while a file is written names none by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def scratch() -> Iterator[tuple[IO[bytes], str]]:
    """Yields a temporary file and its path within a `with` block; in memory where that can be, for /tmp may be full."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("actorq"), "w+b") as file:
            yield file, f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(prefix="actorq-") as file:
            yield file, file.name


def append(file: io.FileIO, line: bytes, path: Path) -> None:
    """Writes all of a line to the end of an unbuffered file, or nothing of it: what little room there is stays so.

    Raises:
        OSError: It cannot be written.
    """
    with naming(path):
        size = os.fstat(file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):  # what is said is why it could not be written
                file.truncate(size)
            raise


def _free(path: Path) -> str:
    """Returns how much room there is beside a file."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return f" ({shutil.disk_usage(place).free / 1e6:.1f} MB free)"
    return ""
