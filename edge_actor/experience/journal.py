"""The files behind the spool: they hold experience on its way, so that it survives this process.

A segment file is a row of records:

    "AQ01" | length of body u32 | boot u64 | seq u64 | oldest u64 | steps u32 | CRC-32 of body | CRC-32 so far | body

all little endian. A record counts once its write has returned: it is then in the kernel, and kill -9 cannot take it.
Where the files lie in memory (tmpfs) that is all. On a disk each write and each new file is synced too, so that a power
failure takes nothing either; that costs the disk's latency once a message, which is why memory is the default.

What is torn at the end of a file was never accepted: it is cut off. A record that is damaged anywhere else is counted
and passed over. Files are deleted whole, when nothing in them is needed any longer. How far the learner is stands
nowhere: it recognises what it has.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from broker.contract import errors
from broker.program import storage

_log = logging.getLogger(__name__)
_MAGIC = b"AQ01"
_FIELDS = struct.Struct("<4sIQQQII")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECK.size
_SEGMENTS = 16
"""Files that a full spool is spread over: what goes at once when the oldest must go."""
_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class _Segment:
    path: Path
    file: int
    end: int = 0
    needed: int = 0  # records that were not released


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One message that is kept."""

    boot: int
    seq: int
    oldest: int  # as the message says
    steps: int
    length: int
    offset: int
    segment: _Segment


class Journal:
    """A directory of segment files, locked against a second process; made by `open`.

    Args:
        directory: Where they lie.
        limit_bytes: What the files shall hold at most; the caller keeps it, by releasing records.
        lock: A descriptor of the directory that holds its lock.
        synced: Whether each write is synced to a disk.

    Attributes:
        records: What was found at the start, by boot and seq.
        size_bytes, limit_bytes: Of all files; what they shall hold at most.
        damaged: Records that were found unreadable at the start, or files of them.
    """

    def __init__(self, directory: Path, limit_bytes: int, lock: int, *, synced: bool) -> None:
        self._directory = directory
        self._lock = lock
        self.limit_bytes = limit_bytes
        self._segment_bytes = limit_bytes // _SEGMENTS
        self._segments: list[_Segment] = []
        self._current: _Segment | None = None
        self._synced = synced
        self.records: list[Record] = []
        self.size_bytes = self.damaged = 0

    @classmethod
    def open(cls, directory: Path, limit_bytes: int) -> Journal:
        """Opens a directory, and finds what earlier boots left there.

        Args:
            directory: Made if missing, for its owner alone.
            limit_bytes: As for the class.

        Raises:
            ConfigError: The directory cannot be written, or another process uses it.
        """
        try:
            made = cls(directory, limit_bytes, _locked(directory), synced=not in_memory(directory))
        except BlockingIOError:
            raise errors.ConfigError(
                "another process is using the spool",
                where=str(directory),
                todo="stop the other actor, or give this one a --state-dir and a --spool-dir of its own",
            ) from None
        except OSError as error:
            raise errors.ConfigError(
                f"the spool cannot be opened: {error}", where=str(directory), todo="choose another --spool-dir"
            ) from error
        made.records = made._recover()
        if made.damaged:
            _log.warning("%d damaged records of the spool are lost (%s)", made.damaged, directory)
        return made

    def has_room(self, size_bytes: int) -> bool:
        """Returns whether a message of that size fits the limit."""
        return self.size_bytes + HEADER_BYTES + size_bytes <= self.limit_bytes

    def append(self, boot: int, seq: int, oldest: int, steps: int, body: bytes) -> Record:
        """Writes one record with one system call.

        Raises:
            OSError: It cannot be written; the files are then as they were.
        """
        fields = _FIELDS.pack(_MAGIC, len(body), boot, seq, oldest, steps, zlib.crc32(body))
        header = fields + _CHECK.pack(zlib.crc32(fields))
        segment = self._current
        if segment is None or segment.end >= self._segment_bytes:
            segment = self._roll(f"{boot:020}-{seq:020}.segment")
        start = segment.end
        try:
            _write(segment.file, [header, body], start)
            if self._synced:
                os.fdatasync(segment.file)
        except OSError:
            self._current = None  # the next attempt takes another file: this one may be what is wrong
            if not segment.needed:
                self._delete(segment)
            else:
                with contextlib.suppress(OSError):  # else the torn tail is found, and cut off, at the next start
                    os.ftruncate(segment.file, start)
            raise
        segment.end = start + HEADER_BYTES + len(body)
        segment.needed += 1
        self.size_bytes += segment.end - start
        return Record(boot, seq, oldest, steps, len(body), start + HEADER_BYTES, segment)

    def read(self, record: Record) -> bytes:
        """Returns the body of a record that was not released.

        Raises:
            OSError: It is not there any longer.
        """
        body = os.pread(record.segment.file, record.length, record.offset)
        if len(body) != record.length:
            raise OSError("the file has been cut")
        return body

    def release(self, record: Record) -> None:
        """Lets go of a record that is not needed any longer."""
        segment = record.segment
        segment.needed -= 1
        if not segment.needed and (segment is not self._current or segment.end >= self._segment_bytes):
            self._delete(segment)

    def close(self) -> None:
        """Unlocks the directory; one in memory is removed if nothing is in it that is needed."""
        for segment in list(self._segments):
            if segment.needed:
                os.close(segment.file)
            else:
                self._delete(segment)
        if not self._segments and not self._synced:  # on a disk that is full it could not be made again
            with contextlib.suppress(OSError):  # it is the user's directory, and holds something else
                self._directory.rmdir()
        self._segments = []
        os.close(self._lock)

    def _roll(self, name: str) -> _Segment:
        path = self._directory / name
        segment = _Segment(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
        if self._current is not None and not self._current.needed:
            self._delete(self._current)
        self._segments.append(segment)
        self._current = segment
        if self._synced:
            os.fsync(self._lock)
        return segment

    def _delete(self, segment: _Segment) -> None:
        if segment is self._current:
            self._current = None
        self._segments.remove(segment)
        self.size_bytes -= segment.end
        os.close(segment.file)
        with contextlib.suppress(OSError):  # what stays is sent again some day, and recognised
            segment.path.unlink()

    # -- at the start -----------------------------------------------------------------------------------------------

    def _recover(self) -> list[Record]:
        found: dict[tuple[int, int], Record] = {}
        for path in sorted(self._directory.glob("*.segment")):
            try:
                segment = _opened(path)
            except OSError:
                self.damaged += 1
                continue
            try:
                with os.fdopen(segment.file, "rb", closefd=False) as file:
                    records, segment.end = self._scan(segment, file.read())
                os.ftruncate(segment.file, segment.end)
            except OSError:
                os.close(segment.file)
                self.damaged += 1
                continue
            self._segments.append(segment)
            self.size_bytes += segment.end
            fresh = {(r.boot, r.seq): r for r in records if (r.boot, r.seq) not in found}
            segment.needed = len(fresh)
            found |= fresh
            if not fresh:
                self._delete(segment)
        return [found[key] for key in sorted(found)]

    def _scan(self, segment: _Segment, data: bytes) -> tuple[list[Record], int]:
        """Returns the records of a file that are whole, and where the last of them ends."""
        records: list[Record] = []
        at = end = 0
        while (at := data.find(_MAGIC, at)) >= 0:
            header = data[at : at + HEADER_BYTES]
            if len(header) < HEADER_BYTES or zlib.crc32(header[: _FIELDS.size]) != _CHECK.unpack(header[-4:])[0]:
                at += 1  # torn, damaged, or no header at all: perhaps another one follows
                continue
            _, length, boot, seq, oldest, steps, check = _FIELDS.unpack(header[: _FIELDS.size])
            start = at + HEADER_BYTES
            if start + length > len(data):
                break
            self.damaged += at > end  # what lies between was at least one record
            at = end = start + length
            if zlib.crc32(memoryview(data)[start:end]) == check:
                records.append(Record(boot, seq, oldest, steps, length, start, segment))
            else:
                self.damaged += 1
        return records, end


def _opened(path: Path) -> _Segment:
    """Opens a segment that is there. No pipe, which would block, and no link: the file behind it would be cut off."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError("not a file")
    return _Segment(path, file)


def default_directory(state_dir: Path, asked: str) -> Path:
    """Returns where the spool lies.

    Args:
        state_dir: Of the actor.
        asked: The setting `spool_dir`: a path, `disk` for the state directory, or empty for memory where there is some.
    """
    if asked and asked != "disk":
        return Path(asked)
    home = _MEMORY / f"actorq-{os.getuid()}"
    if asked == "disk" or not in_memory(_MEMORY) or not _is_ours(home):
        return state_dir / "spool"
    # By the path of the state directory: two actors of the same name on one machine are two actors
    own = f"{zlib.crc32(str(state_dir.resolve()).encode()):08x}"
    return home / f"{state_dir.name}-{own}"


def _is_ours(directory: Path) -> bool:
    """Returns whether a directory at a place where everybody may write is there, and closed to everybody else."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _locked(directory: Path) -> int:
    """Makes the directory, and returns a descriptor of it that holds its lock; BlockingIOError if another one does."""
    while True:
        storage.make_directory(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if directory.exists() and os.path.samestat(os.fstat(descriptor), directory.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever held it until now has just removed it


def in_memory(directory: Path) -> bool:
    """Returns whether a directory lies in memory (tmpfs), where syncing means nothing."""
    directory = directory.resolve()
    try:
        mounts = [(line.split()[1], line.split()[2]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    kinds = dict(mounts)  # of two mounts at one place, the later one counts
    at = next((p for p in (directory, *directory.parents) if str(p) in kinds), None)
    return at is not None and kinds[str(at)] in ("tmpfs", "ramfs")


def _write(file: int, parts: list[bytes], offset: int) -> None:
    """Writes all of it, or raises OSError; nearly always with one call."""
    written = os.pwritev(file, parts, offset)
    rest = memoryview(b"".join(parts))[written:] if written < sum(map(len, parts)) else b""
    while rest:
        offset += written
        written = os.pwrite(file, rest, offset)
        rest = rest[written:]
