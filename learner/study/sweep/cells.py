"""A study's directory: what was asked for, and a line for each cell that was computed, on the disk before the next one.

plan.json  cells.jsonl  study.md  study.csv  study.json  report.html  observations/ (until it is complete)
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import logging
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.program import storage
from learner.files import run_directory
from learner.study.sweep import opening, plan, policies

_log = logging.getLogger(__name__)
PLAN, CELLS = "plan.json", "cells.jsonl"
Record = dict[str, Any]
Key = tuple[str, str]
"""Policy and column."""


class Cells:
    """An open study, locked against a second process, as `new` and `resume` give it.

    Args:
        path: Of its directory.
        file: Its cells, open at their end and locked for as long as this lives.
        request: What was asked for.
        entries: Its policies.
        fingerprint: Of both; each cell has it.

    Attributes:
        done: The cells that were computed, by key; of one that was computed again the newest.
    """

    def __init__(
        self,
        path: Path,
        file: io.FileIO,
        request: plan.Request,
        entries: Sequence[policies.Entry],
        fingerprint: str,
    ) -> None:
        self.path, self.request, self.entries = path, request, entries
        self._file, self._fingerprint = file, fingerprint
        self.done: dict[Key, Record] = {}

    @classmethod
    def new(cls, path: Path, request: plan.Request, entries: Sequence[policies.Entry]) -> Cells:
        """Makes a directory for a study.

        Raises:
            RunError: It holds one already.
        """
        if (path / PLAN).exists() or (path / CELLS).exists():
            raise errors.RunError(
                "the directory holds a study already", where=str(path), todo=f"--resume {path}, or another -o"
            )
        path.mkdir(parents=True, exist_ok=True)
        table: Record = {"request": dataclasses.asdict(request), "policies": [dataclasses.asdict(e) for e in entries]}
        fingerprint = plan.fingerprint(json.loads(json.dumps(table)))
        table["versions"] = run_directory.versions()
        storage.write_atomic(path / PLAN, (json.dumps(table, indent=1) + "\n").encode(), mode=0o644)
        return cls._opened(path, request, entries, fingerprint)

    @classmethod
    def resume(cls, path: Path, given: Record) -> Cells:
        """Opens the directory of a study that was interrupted, and mends what a crash left of its last line.

        Args:
            path: Of the directory.
            given: Fields of the request that are given once more.

        Raises:
            RunError: There is none, another process is at work on it, it was begun with other settings, or its cells
                are of another one.
        """
        try:
            table = json.loads((path / PLAN).read_text())
            request = _request(table["request"])
            entries = [policies.Entry(**entry) for entry in table["policies"]]
            versions = dict(table["versions"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise errors.RunError(
                f"there is no study to resume: {error}", where=str(path), todo="name the directory of one"
            ) from error
        others = [
            f"{name} {getattr(request, name)!r}, not {value!r}"
            for name, value in given.items()
            if getattr(request, name) != value
        ]
        if others:
            raise errors.RunError(
                f"the study was begun with other settings: {'; '.join(others)}",
                where=str(path / PLAN),
                todo="leave them out, or begin another study: cells of both must not mix",
            )
        now = run_directory.versions()
        if other := [
            f"{name} {versions.get(name)}, now {now[name]}" for name in now if versions.get(name) != now[name]
        ]:
            _log.warning("the study was begun with other versions: %s", "; ".join(other))
        fingerprint = plan.fingerprint({"request": table["request"], "policies": table["policies"]})
        return cls._opened(path, request, entries, fingerprint)

    @classmethod
    def _opened(cls, path: Path, request: plan.Request, entries: Sequence[policies.Entry], fingerprint: str) -> Cells:
        name = path / CELLS
        # Held, and thereby locked, until the process ends
        file = io.FileIO(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644), "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise errors.RunError(
                "another process is at work on this study", where=str(path), todo="wait for it, or stop it"
            ) from None
        storage.sync_directory(path)
        held = cls(path, file, request, entries, fingerprint)
        held._read()
        return held

    def close(self) -> None:
        """Lets go of it."""
        self._file.close()

    def add(self, record: Record) -> None:
        """Keeps a cell: when this returns it is on the disk, and will not be computed again."""
        line = json.dumps({"study": self._fingerprint} | record) + "\n"
        storage.append(self._file, line.encode(), self.path / CELLS)
        os.fsync(self._file.fileno())
        self.done[record["policy"], record["column"]] = record

    def check_policies(self, names: Collection[str]) -> None:
        """Checks that policies are what they were when the study began.

        Raises:
            RunError: One is not, so that its cells would be of two policies.
        """
        for entry in self.entries:
            if entry.name in names and policies.digest(Path(entry.path), entry.kind) != entry.sha256:
                raise errors.RunError(
                    f"{entry.name} is not the policy that the study was begun with",
                    where=entry.path,
                    todo="put that one back, or begin another study; a run must not train on meanwhile",
                )

    def tidy(self) -> None:
        """Removes observations, which only cells that are still to be computed need."""
        shutil.rmtree(self.path / opening.OBSERVATIONS, ignore_errors=True)

    def _read(self) -> None:
        name = self.path / CELLS
        whole = name.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        lines = kept.splitlines(keepends=True)
        if lines and _parsed(lines[-1]) is None:  # a block of it may never have come to the disk
            kept = b"".join(lines := lines[:-1])
        if len(kept) < len(whole):
            self._file.truncate(len(kept))
            os.fsync(self._file.fileno())
            _log.warning(
                "%s: its last line was cut off, and is removed (%d bytes): that cell is computed again",
                name,
                len(whole) - len(kept),
            )
        known = {entry.name for entry in self.entries}
        for number, line in enumerate(lines, 1):
            record = _parsed(line)
            if record is None:
                raise errors.RunError(
                    f"line {number} is no cell: something else wrote into the file",
                    where=str(name),
                    todo="remove that line, and its cell is computed again",
                )
            if record["study"] != self._fingerprint or record["policy"] not in known:
                raise errors.RunError(
                    f"line {number} is a cell of a study with other settings or policies",
                    where=str(name),
                    todo=f"put back the {PLAN} and {CELLS} that belong together, or begin another study",
                )
            self.done[record["policy"], record["column"]] = record


def _parsed(line: bytes) -> Record | None:
    with contextlib.suppress(ValueError):  # of broken JSON, and of what is no text
        found = json.loads(line)
        if isinstance(found, dict) and {"study", "policy", "column", "failed"} <= found.keys():
            return found
    return None


def _request(table: Record) -> plan.Request:
    """Returns a request; JSON has lists where it has tuples."""
    fixed: Record = {name: tuple(v) if isinstance(v, list) else v for name, v in table.items()}
    request = plan.Request(**fixed)
    later = {"distil_rounds"}  # plans from before it have no column that it is for
    if lacks := [one.name for one in dataclasses.fields(request) if one.name not in table and one.name not in later]:
        raise ValueError(f"its plan lacks {', '.join(lacks)}")
    return request
