"""Files on a disk that may be full, read-only or failing: how they are written, and errors that a user can act on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
import shutil
import stat
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


def make_directory(path: Path) -> None:
    """Makes a directory, and what is missing above it, for its owner alone: pathlib gives the mode to the last only."""
    for missing in reversed([one for one in (path, *path.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def write_atomic(path: Path, data: bytes, mode: int = 0o600, *, sync: bool = True) -> None:
    """Replaces `path` so that a reader finds the old or the new bytes and no others.

    With `sync` a machine that lost power does, too; that costs milliseconds.
    """
    make_directory(path.parent)
    # Never a file that is there: in a directory of someone else it may be a link to one of ours.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Reads a small file of ours. Whatever else a crash left in its place neither blocks nor leads elsewhere.

    Raises:
        FileNotFoundError: There is none.
        OSError: It is larger, cannot be read, or is no file: a pipe, a directory, a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        if found.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, where at most {limit_bytes} are meant", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process at a time into a `with` block about a file; makes its directory."""
    make_directory(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in its place must not block
    with open(os.open(path.with_name(f".{path.name}.lock"), flags, 0o600), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
