"""`actorq-actor bench`: runs the parts that were asked for, keeps every row as it comes, and draws the page."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import TextIO

from broker.contract import errors
from edge_actor.bench import latency, page, records, windows
from edge_actor.bench.config import BenchConfig
from edge_actor.board import energy_meter

ROWS, PAGE = "rows.jsonl", "page.html"


class Progress:
    """Writes over one line on a terminal; elsewhere it adds a line when the part changes or a minute went by."""

    _QUIET_S = 60.0

    def __init__(self, to: TextIO) -> None:
        self._to = to
        self._began = time.monotonic()
        self._part, self._said_at = "", -self._QUIET_S

    def __call__(self, doing: str) -> None:
        now = time.monotonic()
        line = f"[{now - self._began:5.0f} s] {doing}"
        if self._to.isatty():
            print(f"\r\033[K{line}", end="", file=self._to, flush=True)
            return
        part = doing.partition(";")[0]
        if part != self._part or now - self._said_at >= self._QUIET_S:
            self._part, self._said_at = part, now
            print(line, file=self._to, flush=True)

    def end(self) -> None:
        """Ends the line."""
        if self._to.isatty():
            print(file=self._to)


def run(settings: BenchConfig, emit: records.Sink, progress: Progress) -> None:
    """Measures; every row goes to `emit` as soon as it is known, with the board's facts."""
    fixed = records.conditions()

    def complete(row: records.Row) -> None:
        emit({**row, **fixed})

    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as directory:
        scratch = Path(directory)
        if "latency" in settings.parts:
            latency.run(settings, scratch, complete, progress)
        if not {"energy", "control"} & set(settings.parts):
            return
        measures = energy_meter.Gauge.open(settings.meter, settings.meter_offset_s)
        if measures is None:
            progress("energy: no source of power; `actorq-actor check` says more")
            _windows(settings, scratch, None, complete, progress)
        else:
            with measures:
                _windows(settings, scratch, measures, complete, progress)


def _windows(
    settings: BenchConfig, scratch: Path, measures: energy_meter.Gauge | None, emit: records.Sink, progress: Progress
) -> None:
    measurement = windows.Measurement(settings, scratch, measures, emit, progress, threading.Event().wait)
    if "energy" in settings.parts and measures is not None:
        measurement.energy()
    if "control" in settings.parts:
        measurement.control()


def read(files: Iterable[Path]) -> list[records.Row]:
    """Reads the rows of earlier benchmarks.

    Raises:
        ConfigError: A file is none.
    """
    found = []
    for file in files:
        try:
            found += [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise errors.ConfigError(f"the rows cannot be read: {error}", where=str(file)) from error
    if not all(isinstance(row, dict) and {"kind", "host", "board"} <= row.keys() for row in found) or not found:
        raise errors.ConfigError("there are no rows of a benchmark", where=", ".join(map(str, files)))
    return found


def write_page(found: list[records.Row], file: Path) -> None:
    """Draws the rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page.render(found), encoding="utf-8")


def to_directory(settings: BenchConfig, directory: Path, echo: TextIO | None) -> tuple[list[records.Row], bool]:
    """Measures into `directory`: rows.jsonl as it goes, page.html at the end, after Ctrl-C too.

    Args:
        settings: What to measure.
        directory: Made if need be.
        echo: Gets each row too, as a line of JSON.

    Returns:
        All rows, and whether it was interrupted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found: list[records.Row] = []
    progress = Progress(sys.stderr)
    signal.signal(signal.SIGTERM, _interrupt)
    interrupted = False
    with open(directory / ROWS, "w", encoding="utf-8") as file:

        def emit(row: records.Row) -> None:
            found.append(row)
            for to in (file, echo) if echo else (file,):
                print(json.dumps(row), file=to, flush=True)

        try:
            run(settings, emit, progress)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.end()
    if found:
        write_page(found, directory / PAGE)
    return found, interrupted


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
