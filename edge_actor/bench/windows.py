"""Energy per inference, and control rates, in windows of time.

Energy: windows of the idle board and of each precision in turn, flat out and at each control rate. A window whose
throttle bits changed, or that readings do not cover, is dropped, and said. Gross counts all that the board drew; net
leaves out what it draws when idle. Control: a rate held beside busy cores.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_actor.bench import child, models, records
from edge_actor.bench.config import BenchConfig
from edge_actor.board import board, energy_meter

_WARM_UP_S = 2.0
FLAT_OUT = 0.0
IDLE = "idle"
Wait = Callable[[float], object]


@dataclass(frozen=True, slots=True)
class Window:
    """The record of one window of time."""

    row: records.Row
    start: energy_meter.Mark | None
    end: energy_meter.Mark | None
    seconds: float
    held_s: float
    throttled: tuple[int | None, int | None]

    def measured(self, measures: energy_meter.Gauge | None) -> records.Row:
        """Returns its row, with joules, or why there are none."""
        joules = measures.joules(self.start, self.end) if measures and self.start and self.end else None
        changed = self.throttled[0] != self.throttled[1]
        dropped = "throttle bits changed" if changed else "readings are missing" if joules is None else ""
        return {
            "kind": "window",
            **self.row,
            "window_s": self.seconds,
            "held_s": self.held_s,
            "joules": joules,
            "dropped": dropped if measures else "",
        }


class Measurement:
    """Takes windows of policies that are loaded and wait.

    Args:
        settings: What to measure.
        scratch: Directory for models.
        measures: Energy; None where nothing does.
        emit: Gets the rows.
        progress: Gets what is being measured.
        wait: Waits for so many seconds.
    """

    def __init__(
        self,
        settings: BenchConfig,
        scratch: Path,
        measures: energy_meter.Gauge | None,
        emit: records.Sink,
        progress: Callable[[str], None],
        wait: Wait,
    ) -> None:
        self._settings = settings
        self._scratch = scratch
        self._gauge = measures
        self._emit = emit
        self._progress = progress
        self._wait = wait

    def energy(self) -> None:
        """Makes rows of kind `window`, and one of kind `energy` per policy, precision and rate."""
        settings, windows = self._settings, []
        with contextlib.ExitStack() as stack:
            loaded = self._load(stack, settings.precisions)
            order = [(IDLE, FLAT_OUT), *itertools.product(loaded, (FLAT_OUT, *settings.rates_hz))]
            for repeat, (number, (who, rate_hz)) in itertools.product(range(settings.windows), enumerate(order)):
                self._progress(
                    f"energy: round {repeat + 1} of {settings.windows}; {number + 1} of {len(order)}, "
                    f"{who if who == IDLE else ' '.join(who)} {f'at {rate_hz:g} Hz' if rate_hz else ''}"
                )
                windows.append(self._window(loaded.get(who), who, rate_hz, settings.window_s))
        assert self._gauge is not None
        measured = [window.measured(self._gauge) for window in windows]
        for row in measured:
            self._emit(row | self._gauge.source)
        for row in summarize(measured):
            self._emit(row | self._gauge.source | {"faults": self._gauge.faults()})

    def control(self) -> None:
        """Makes rows of kind `control`."""
        settings, held = self._settings, []
        with contextlib.ExitStack() as stack:
            loaded = self._load(stack, [one for one in settings.precisions if one in ("float32", "int8")])
            stack.enter_context(child.busy(settings.busy))
            for who, rate_hz in itertools.product(loaded, settings.rates_hz):
                self._progress(
                    f"control: {' '.join(who)} at {rate_hz:g} Hz for {settings.control_s:g} s "
                    f"beside {settings.busy} busy"
                )
                held.append(self._window(loaded[who], who, rate_hz, settings.control_s))
        source = self._gauge.source if self._gauge else {}
        for window in held:
            row = window.measured(self._gauge) | {"kind": "control", "busy": settings.busy}
            joules = None if row["dropped"] else row["joules"]
            watts = None if joules is None else joules / window.held_s
            self._emit(row | {"power_w": watts} | source)

    def _load(self, stack: contextlib.ExitStack, precisions: Any) -> dict[Any, child.Child]:
        loaded = {}
        for name, precision in itertools.product(self._settings.shapes, precisions):
            width, layers = map(int, name.split("x"))
            shape = models.Shape(width, layers)
            file = self._scratch / f"{name}-{precision}.tflite"
            file.write_bytes(models.tflite(models.make(shape), precision))
            process = child.Child.start(
                shape,
                file,
                runtime=self._settings.runtime,
                delegated=True,
                threads=1,
                log=self._scratch / f"{name}-{precision}.log",
            )
            loaded[(name, precision)] = stack.enter_context(process)
        return loaded

    def _window(self, process: child.Child | None, who: Any, rate_hz: float, seconds: float) -> Window:
        row: records.Row = {"policy": IDLE, "precision": "", "kernels": "", "rate_hz": rate_hz}
        if process is not None:
            row |= {"policy": who[0], "precision": who[1], "kernels": process.facts["delegate"]}
            row["runtime"] = process.facts["runtime"]
            process.ask({"hold_s": min(_WARM_UP_S, seconds), "rate_hz": FLAT_OUT})
        before, start = board.throttled(), self._gauge.mark() if self._gauge else None
        if process is None:
            self._wait(seconds)
        else:
            row |= process.ask({"hold_s": seconds, "rate_hz": rate_hz})
        end, after = self._gauge.mark() if self._gauge else None, board.throttled()
        held_s = end.unix_s - start.unix_s if start and end else seconds
        return Window(row | records.moment(), start, end, seconds, held_s, (before, after))


def summarize(windows: list[records.Row]) -> Iterator[records.Row]:
    """Yields per policy, precision and rate the median over its windows, with the lowest and the highest."""
    kept = [row for row in windows if not row["dropped"]]
    idle = records.median(
        [{"w": row["joules"] / row["held_s"]} for row in kept if row["policy"] == IDLE] or [{"w": None}]
    )

    def key(row: records.Row) -> tuple[Any, ...]:
        return row["policy"], row["precision"], row["rate_hz"]

    for which in dict.fromkeys(key(row) for row in windows if row["policy"] != IDLE):
        of_it = [row for row in windows if key(row) == which]
        figures = [_figures(row, idle["w"]) for row in of_it if not row["dropped"]]
        merged = (
            records.median(figures, spread=("gross_uj", "net_uj")) if figures else {"gross_uj": None, "net_uj": None}
        )
        yield {
            "kind": "energy",
            **{name: of_it[-1][name] for name in ("policy", "precision", "kernels", "runtime", "rate_hz", "window_s")},
            **records.moment(),
            **merged,
            "idle_w": idle["w"],
            "windows": len(figures),
            "windows_dropped": len(of_it) - len(figures),
        }


def _figures(row: records.Row, idle_w: float | None) -> records.Row:
    """Returns microjoules per inference, with all and without what the idle board draws."""
    joules, inferences, seconds = row["joules"], row["inferences"], row["held_s"]
    return {
        "gross_uj": joules / inferences * 1e6,
        "net_uj": None if idle_w is None else (joules - idle_w * seconds) / inferences * 1e6,
        "power_w": joules / seconds,
        "inferences_per_s": inferences / seconds,
    }
