"""A comparison's directory: what was asked for, what every run came to, and what is made of it.

plan.json  paces.jsonl  runs.jsonl (one line a run that ended)  rows.jsonl (one line a ratio)  report.html  runs/NAME/
logs/NAME.log
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from broker.contract import errors
from broker.program import storage
from learner.study.compare import headroom, plan

PLAN, PACES, RUNS, ROWS, REPORT = "plan.json", "paces.jsonl", "runs.jsonl", "rows.jsonl", "report.html"
_LARGE = ("checkpoints", "policies", "home", "ledger*.sqlite*")
Record = dict[str, Any]


class Directory:
    """An open comparison, locked against a second process.

    Args:
        path: Of the directory.
        lock: Its plan, open and locked as long as this lives.
        request: What is in there.
    """

    @classmethod
    def new(cls, path: Path, request: plan.Request) -> Directory:
        """Makes a directory for a comparison.

        Raises:
            RunError: It holds one already.
        """
        file = path / PLAN
        if file.exists():
            raise errors.RunError(
                "the directory holds a comparison already", where=str(path), todo=f"--resume {path}, or another -o"
            )
        path.mkdir(parents=True, exist_ok=True)
        storage.write_atomic(file, (json.dumps(dataclasses.asdict(request), indent=2) + "\n").encode(), mode=0o644)
        return cls(path, _locked(file), request)

    @classmethod
    def resume(cls, path: Path, given: Record) -> Directory:
        """Opens the directory of a comparison that was interrupted.

        Args:
            path: Of the directory.
            given: Fields of the request that are given once more.

        Raises:
            RunError: There is none, another process is at work on it, or its plan says otherwise.
        """
        file = path / PLAN
        try:
            request = _request(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise errors.RunError(
                f"there is no comparison to resume: {error}", where=str(path), todo="name the directory of one"
            ) from error
        others = [f"{name} {getattr(request, name)}, not {value}" for name, value in given.items()]
        others = [
            text for text, (name, value) in zip(others, given.items(), strict=True) if getattr(request, name) != value
        ]
        if others:
            raise errors.RunError(
                f"the comparison was begun with other arguments: {'; '.join(others)}",
                where=str(file),
                todo="leave them out, or begin another comparison",
            )
        return cls(path, _locked(file), request)

    def __init__(self, path: Path, lock: IO[bytes], request: plan.Request) -> None:
        self.path, self.request = path, request
        self._lock = lock

    def runs(self) -> list[Record]:
        """Returns the records of all runs that ended, oldest first."""
        return list(_lines(self.path / RUNS))

    def note_run(self, record: Record) -> None:
        """Keeps what a run came to: it will not be done again."""
        _append(self.path / RUNS, record)

    def pace(self, regime: str, hidden: tuple[int, ...]) -> headroom.Pace | None:
        """Returns what was decided for the runs of a regime and size; None if nothing was yet."""
        for line in _lines(self.path / PACES):
            if (line["regime"], tuple(line["hidden"])) == (regime, hidden):
                return headroom.Pace(**line["pace"])
        return None

    def note_pace(self, regime: str, hidden: tuple[int, ...], pace: headroom.Pace) -> None:
        """Keeps what was decided."""
        _append(self.path / PACES, {"regime": regime, "hidden": list(hidden), "pace": dataclasses.asdict(pace)})

    def clear(self, name: str) -> Path:
        """Returns the directory for a run, in which nothing is left of one that was interrupted."""
        run = self.path / "runs" / name
        if run.exists():
            shutil.rmtree(run, ignore_errors=True)  # a fleet that was killed may still be ending there
        attempt = 2
        while run.exists():
            run = run.with_name(f"{name}-{attempt}")
            attempt += 1
        return run

    def log(self, name: str) -> Path:
        """Returns the file for what a run says."""
        (self.path / "logs").mkdir(exist_ok=True)
        return self.path / "logs" / f"{name}.log"

    def slim(self, run: Path) -> None:
        """Removes what a run needs to go on, and no figure comes from: a large policy's checkpoints take gigabytes."""
        for found in [found for name in _LARGE for found in run.glob(name)]:
            if found.is_dir():
                shutil.rmtree(found, ignore_errors=True)
            else:
                found.unlink(missing_ok=True)

    def write_rows(self, rows: Iterable[Record]) -> None:
        """Writes the rows, in the place of earlier ones."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        storage.write_atomic(self.path / ROWS, text.encode(), mode=0o644)


def _request(table: Any) -> plan.Request:
    if not isinstance(table, dict):
        raise ValueError("its plan is no JSON object")
    lists = ("precisions", "regimes", "kinds", "peers", "settings")
    if lacks := [name for name in (*lists, "hidden") if name not in table]:
        raise ValueError(f"its plan lacks {', '.join(lacks)}")
    fixed = table | {name: tuple(table[name]) for name in lists}
    return plan.Request(**fixed | {"hidden": tuple(tuple(widths) for widths in table["hidden"])})


def _locked(file: Path) -> IO[bytes]:
    lock = open(file, "rb")  # noqa: SIM115  held, and thereby locked, until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise errors.RunError(
            "another process is at work on this comparison", where=str(file.parent), todo="wait for it, or stop it"
        ) from None
    return lock


def _lines(file: Path) -> Iterable[Record]:
    """Yields the lines that are whole: the last one may have been cut off by whatever ended the process."""
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _append(file: Path, record: Record) -> None:
    before = file.read_bytes() if file.exists() else b""
    whole = before[: before.rfind(b"\n") + 1]
    storage.write_atomic(file, whole + (json.dumps(record) + "\n").encode(), mode=0o644)
