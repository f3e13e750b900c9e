"""Releases on this board's disk, as the launcher finds them: unpacked as a whole, put on trial, found good."""

from __future__ import annotations

import os
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from broker.contract import errors
from broker.program import storage
from edge_actor.updates import launcher

if TYPE_CHECKING:
    from broker.contract import release

PARTIAL = ".partial-"
_PROGRAM = "edge_actor/__main__.py"
_CHUNK_BYTES = 1 << 20
_MEMBER_DATA = ("purelib", "platlib")
_UNFIT = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
    FileExistsError,  # a file where another one needs a directory
    NotADirectoryError,
)


class ReleaseDirectory:
    """The releases of one actor.

    Args:
        root: Where they lie.
        running: The one that this process is; empty for the program that was set up on the board.
    """

    def __init__(self, root: Path, running: str) -> None:
        self.root = root
        self.running = running

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> ReleaseDirectory | None:
        """Returns that of an actor which the launcher started; None for any other."""
        root = environment.get(launcher.ROOT)
        return cls(Path(root), environment[launcher.NAME]) if root and launcher.NAME in environment else None

    # -- laying down --------------------------------------------------------------------------------------------------

    def partial(self, name: str) -> Path:
        """Returns where a release lies until all of it is there."""
        return self.root / f"{PARTIAL}{name}"

    def clear(self, keep: str) -> None:
        """Removes releases that nobody will run again; `keep` is one that is being taken."""
        kept = {self.running, launcher.current(self.root), keep, self.partial(keep).name}
        for one in self.root.iterdir() if self.root.exists() else ():
            if one.is_dir() and not one.is_symlink() and one.name not in kept:
                launcher.discard(one)

    def forget_partial(self, name: str) -> None:
        """Removes what was needed until a release was unpacked."""
        shutil.rmtree(self.partial(name), ignore_errors=True)

    def check_room(self, listed: release.Release, fetched_bytes: int, reserve_bytes: int) -> None:
        """Looks whether the disk takes a release, before any of it is asked for.

        Args:
            listed: The release.
            fetched_bytes: What of its pieces is here already.
            reserve_bytes: What must be left free.

        Raises:
            ReleaseError: There is too little room (`release_room`).
        """
        block = max(4096, os.statvfs(self.root).f_frsize)
        needed = listed.length - fetched_bytes + listed.unpacked_bytes + listed.files * block + reserve_bytes
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise errors.ReleaseError(
                f"the disk is too full: {free / 1e6:.0f} MB are free, {needed / 1e6:.0f} MB are needed, of which "
                f"{reserve_bytes / 1e6:.0f} MB have to stay free (update_reserve_bytes)",
                reason="release_room",
                where=str(self.root),
            )

    def leaves(self, reserve_bytes: int) -> bool:
        """Returns whether so much of the disk is free."""
        return shutil.disk_usage(self.root).free >= reserve_bytes

    def unpack(self, listed: release.Release, name: str, stream: Path) -> None:
        """Unpacks the wheels of a stream into NAME/site. It has its name once all of it is on the disk.

        Raises:
            ReleaseError: A wheel is damaged, larger than listed, or would write elsewhere.
            OSError: It cannot be written.
        """
        where = self.root / name
        if launcher.usable(self.root, name):
            return
        launcher.discard(where)  # of another program beneath
        made = self.partial(name) / "release"
        shutil.rmtree(made, ignore_errors=True)
        room = _Room(listed.files, listed.unpacked_bytes)
        start = 0
        with stream.open("rb") as file:
            for wheel in listed.wheels:
                try:
                    _unpack_wheel(_Part(file, start, wheel.length), made / "site", room)
                except _UNFIT as error:
                    raise _unfit(f"{wheel.name} cannot be unpacked: {error}") from error
                start += wheel.length
        if not (made / "site" / _PROGRAM).is_file():
            raise _unfit(f"it has no {_PROGRAM}: none of its wheels is actorq-fleet's")
        _write_synced(made / "base", launcher.base().encode())
        for directory, _, _ in os.walk(made):
            storage.sync_directory(Path(directory))
        made.replace(where)
        storage.sync_directory(self.root)

    # -- the trial ----------------------------------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """The serial of the newest release that was found good; 0 if none was.

        Raises:
            ReleaseError: It cannot be read.
        """
        try:
            return int(storage.read_regular(self.root / "serial", 64))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise errors.ReleaseError(
                f"which release was found good last cannot be read: {error}",
                where=str(self.root / "serial"),
                todo="set the board up again",
            ) from error

    def begin_trial(self, name: str, serial: int, number: int, limit_s: float) -> None:
        """Has the launcher try a release at the next start.

        Args:
            name: Of the release, which is unpacked.
            serial: That it was signed with.
            number: Of the order.
            limit_s: Within which it has to say that it acts.

        Raises:
            OSError: It cannot be written down.
        """
        storage.write_atomic(self.root / name / "serial", str(serial).encode())
        (self.root / "failed").unlink(missing_ok=True)
        launcher.write(self.root / "trial", {"name": name, "number": number, "limit_s": limit_s, "starts": 0})

    @property
    def trial(self) -> Mapping[str, Any]:
        """The trial that this process is, or that its release has passed; empty if there is none."""
        found = launcher.read(self.root / "trial")
        return found if found.get("name") == self.running else {}

    @property
    def failed(self) -> Mapping[str, Any]:
        """The trial that failed last, and `why`; empty if none did since `settled`."""
        return launcher.read(self.root / "failed")

    def confirm(self) -> bool:
        """Says that this process acts and reaches its learner; returns false if its release was given up before.

        Raises:
            OSError: It cannot be written down.
        """
        serial = int(storage.read_regular(self.root / self.running / "serial", 64))
        if serial > self.floor:  # first: none that is older may come after it, whenever the plug is pulled
            storage.write_atomic(self.root / "serial", str(serial).encode())
        return launcher.confirm(self.root, self.running)

    def forget_trial(self) -> None:
        """Forgets how the last trial ended: it was told. One that is still on keeps its note."""
        (self.root / "failed").unlink(missing_ok=True)
        if launcher.current(self.root) == self.running or not self.trial:
            (self.root / "trial").unlink(missing_ok=True)


class _Room:
    """The number of files and bytes that may still be unpacked."""

    def __init__(self, files: int, size: int) -> None:
        self.files, self.bytes = files, size

    def reserve(self, files: int, size: int) -> None:
        self.files -= files
        self.bytes -= size
        if self.files < 0 or self.bytes < 0:
            raise _unfit("it unpacks to more than its list says")


class _Part:
    """A part of an open file as a file of its own; reads alone."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


def _unpack_wheel(part: _Part, site: Path, room: _Room) -> None:
    with zipfile.ZipFile(part) as wheel:
        for member in wheel.infolist():
            path = _place(member)
            if path is None:
                continue
            room.reserve(1, 0)
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if target.exists():
                raise _unfit(f"it has {path} twice")
            with wheel.open(member) as source:
                _write_synced(target, _bounded(source, room))


def _place(member: zipfile.ZipInfo) -> Path | None:
    """Returns where in `site` a member goes; None for directories, and for what is not imported."""
    name = member.filename
    parts = name.split("/")
    if member.is_dir():
        return None
    if stat.S_ISLNK(member.external_attr >> 16) or name.startswith("/") or "\\" in name or "\0" in name:
        raise _unfit(f"it has {name[:80]!r}, which is no plain file")
    if any(part in ("", ".", "..") for part in parts):
        raise _unfit(f"it has {name[:80]!r}, which would lie elsewhere")
    if parts[0].endswith(".data"):
        if len(parts) < 3 or parts[1] not in _MEMBER_DATA:
            return None  # programs for people, headers
        parts = parts[2:]
    return Path(*parts)


def _bounded(source: IO[bytes], room: _Room) -> Iterator[bytes]:
    while chunk := source.read(_CHUNK_BYTES):
        room.reserve(0, len(chunk))
        yield chunk


def _write_synced(path: Path, data: bytes | Iterator[bytes]) -> None:
    with storage.naming(path), path.open("wb") as file:
        for chunk in [data] if isinstance(data, bytes) else data:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _unfit(what: str) -> errors.ReleaseError:
    return errors.ReleaseError(f"this release cannot be taken: {what}", reason="release_unfit")
