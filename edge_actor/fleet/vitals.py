"""Vitals for the heartbeat: the board's own, and what each stage of the actor tells, in one."""

from __future__ import annotations

import collections
import functools
import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import psutil

from broker.contract import messages, specs
from broker.program import machine, stopwatch
from edge_actor.board import board, power

_ENERGY_WINDOW_S = _LOAD_WINDOW_S = 0.5
_STAGES_WINDOW_S = 0.2


class Energy:
    """The board's power, and its energy per step of this actor, between the last two heartbeats.

    All the board draws is counted, so of two actors on one board each tells the whole.

    Args:
        meter: Reads the board; None where nothing measures it.
        began: The first reading.
    """

    def __init__(self, meter: power.Meter | None, began: power.Total | None) -> None:
        self._meter = meter
        self._steps = 0
        self._total = self._began = began
        self.power_w: float | None = None
        self.step_energy_j: float | None = None

    @classmethod
    def start(cls, meter: power.Meter | None) -> Energy:
        """Takes the first reading."""
        return cls(meter, meter.read() if meter else None)

    @property
    def source(self) -> str:
        """The name of what measures or models it; empty where nothing does."""
        return self._meter.source.name if self._meter else ""

    @property
    def modelled(self) -> bool:
        """Returns whether it is modelled from load, not measured."""
        return self._meter is not None and self._meter.source.modelled

    @property
    def joules(self) -> float | None:
        """All that readings tell of the board since the start; None where nothing measures it."""
        return None if self._total is None or self._began is None else max(0.0, self._total.joules - self._began.joules)

    @property
    def read_s(self) -> float:
        """The seconds of which `joules` is."""
        if self._total is None or self._began is None:
            return 0.0
        return max(0.0, self._total.covered_s - self._began.covered_s)

    def update(self, steps: int) -> None:
        """Brings the figures up to date, `steps` into this boot. Beats in quick succession share one reading."""
        if self._meter is None or self._total is None:
            return
        now = self._meter.read()
        length_s = now.at_s - self._total.at_s
        if length_s < _ENERGY_WINDOW_S:
            return
        joules, done = now.since(self._total), steps - self._steps
        self._total, self._steps = now, steps
        self.power_w = None if joules is None else joules / length_s
        self.step_energy_j = None if joules is None or done <= 0 else joules / done

    def close(self) -> None:
        """Closes the meter."""
        if self._meter is not None:
            self._meter.close()


class Load:
    """Processor, memory, temperature and power. Asked in quick succession it looks once: that takes half a millisecond.

    Args:
        energy: The board's.
        steps: Returns this boot's steps, for the energy of one.
        process: This one.

    Attributes:
        cpu_percent: Of one core, by this process, between the last two looks.
    """

    def __init__(self, energy: Energy, steps: Callable[[], int], process: psutil.Process) -> None:
        self.energy = energy
        self._steps = steps
        self._process = process
        self._looked_at = -math.inf
        self.cpu_percent = 0.0
        self.rss_bytes = self.memory_available_bytes = 0
        self.temperature_c: float | None = None
        self.throttled: int | None = None

    def vitals(self) -> dict[str, Any]:
        """Looks if that is due, and returns what was seen, by fields of `messages.Vitals`."""
        if time.monotonic() - self._looked_at > _LOAD_WINDOW_S:
            self._look()
        self.energy.update(self._steps())
        return {
            "cpu_percent": self.cpu_percent,
            "rss_bytes": self.rss_bytes,
            "memory_available_bytes": self.memory_available_bytes,
            "temperature_c": self.temperature_c,
            "throttled": self.throttled,
            "power_w": self.energy.power_w,
            "step_energy_j": self.energy.step_energy_j,
            "power_source": self.energy.source,
            "power_modelled": self.energy.modelled,
            "energy_j": self.energy.joules,
            "energy_s": self.energy.read_s,
            "board_id": machine.identity(),
            "cpu_s": time.process_time(),
            "created_s": time.time(),
        }

    @classmethod
    def of_board(cls, period_s: float, steps: Callable[[], int]) -> Load:
        """Finds out what measures this board, which will be asked every `period_s`."""
        source = power.find(period_s=period_s).source
        process = psutil.Process()
        process.cpu_percent()  # the first call begins what the next one tells
        made = cls(Energy.start(power.Meter.start(source, period_s) if source else None), steps, process)
        made._look()
        return made

    def close(self) -> None:
        """Closes the meter of its energy."""
        self.energy.close()

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        self.cpu_percent = float(self._process.cpu_percent())
        self.rss_bytes = int(self._process.memory_info().rss)
        self.memory_available_bytes = int(psutil.virtual_memory().available)
        self.temperature_c = board.temperature_c()
        self.throttled = board.throttled()


class Stages:
    """Adds up what stopwatches measured. Asked in quick succession it looks once: a policy's first state is awaited.

    Args:
        measured: Stages of one name add up.
        clock: Monotonic seconds.
    """

    def __init__(self, measured: Sequence[stopwatch.Stopwatch], clock: Callable[[], float] = time.monotonic) -> None:
        self._measured, self._clock = measured, clock
        self._looked_at = -math.inf
        self._spent: dict[str, tuple[float, ...]] = {}

    def vitals(self) -> dict[str, Any]:
        """Returns where the time went, by fields of `messages.Vitals`; without stages that never ran."""
        if self._clock() - self._looked_at > _STAGES_WINDOW_S:
            self._looked_at = self._clock()
            added = stopwatch.added(times.totals() for times in self._measured)
            self._spent = {name: (one.runs, round(one.seconds, 6)) for name, one in added.items() if one.runs}
        return {"stages": self._spent}


def birth(
    env_id: str,
    spec: specs.EnvSpec,
    n_envs: int,
    runtime: str,
    delegate: str,
    rate_hz: float,
    ordered: tuple[str, ...] = (),
) -> messages.Birth:
    """Returns who this actor is, on this board."""
    return messages.Birth(
        env_id=env_id,
        spec=spec,
        n_envs=n_envs,
        board=_board(),
        python=platform.python_version(),
        runtime=runtime,
        delegate=delegate,
        rate_hz=rate_hz,
        ordered=ordered,
        release=release(),
    )


@functools.cache
def _board() -> str:
    return (board.model() or f"{platform.system()} {platform.machine()}")[: messages.MAX_NAME_CHARS]


@functools.cache
def release() -> str:
    """Returns the version of actorq-fleet that runs; empty where it is not installed."""
    try:
        return importlib.metadata.version("actorq-fleet")
    except importlib.metadata.PackageNotFoundError:
        return ""


class Source(Protocol):
    """A stage that tells of itself."""

    def vitals(self) -> Mapping[str, Any]:
        """Returns what it knows, by fields of `messages.Vitals`."""


def merge(sources: Iterable[Source]) -> messages.Vitals:
    """Asks each source in turn. Refusals are added up by reason, and a figure that is not finite is none."""
    figures: dict[str, Any] = {}
    refused: collections.Counter[str] = collections.Counter()
    for source in sources:
        for name, value in source.vitals().items():
            if name == "refused":
                refused += collections.Counter(value)
            else:
                figures[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return messages.Vitals(**figures, refused=dict(refused))
