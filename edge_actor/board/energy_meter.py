"""Energy between two moments, by the board's own source or by an external meter's log."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from edge_actor.board import power, power_log

PERIOD_S = 0.2
"""Five readings a second: a Pi 5's PMIC slows its board down at 50."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, with all energy up to it where the board is metered."""

    unix_s: float
    total: power.Total | None


class Gauge:
    """Reads the source in a thread, while others work.

    Args:
        meter: Of the board; None where an external one is used.
        log: CSV of an external meter, read when energy is first asked for: it may still be written.
        offset_s: Added to the log's times.
    """

    def __init__(self, meter: power.Meter | None, log: Path | None = None, offset_s: float = 0.0) -> None:
        self._meter, self._path, self._offset_s = meter, log, offset_s
        self._log: power_log.Log | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="gauge", daemon=True)

    @classmethod
    def open(cls, log: str, offset_s: float) -> Gauge | None:
        """Opens an external meter's log if there is one, else the board's source; None where nothing measures."""
        if log:
            return cls(None, Path(log), offset_s)
        source = power.find(period_s=PERIOD_S).source
        return cls(power.Meter.start(source, PERIOD_S)) if source else None

    @property
    def source(self) -> dict[str, str | bool]:
        """The name of what measures, and its notes, for rows."""
        source = self._meter.source if self._meter else self._read_log()
        return {"power_source": source.name, "power_note": source.note, "power_modelled": source.modelled}

    def mark(self) -> Mark:
        """Marks this moment, for `joules`."""
        with self._lock:
            return Mark(time.time(), self._meter.read() if self._meter else None)

    def joules(self, start: Mark, end: Mark) -> float | None:
        """Returns the energy between two moments; None where readings cover too little of the time."""
        if start.total is not None and end.total is not None:
            return end.total.since(start.total)
        return self._read_log().joules(start.unix_s, end.unix_s)

    def faults(self) -> dict[str, int]:
        """Returns how many readings did not count, by reason."""
        return dict(self._meter.faults) if self._meter else {}

    def __enter__(self) -> Gauge:
        if self._meter:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._meter:
            self._thread.join()
            self._meter.close()

    def _read(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.mark()

    def _read_log(self) -> power_log.Log:
        if self._log is None:
            assert self._path is not None
            self._log = power_log.read(self._path, self._offset_s)
        return self._log
