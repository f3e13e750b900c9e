"""Sensors of power: an INA2xx on the supply, the Pi 5's own PMIC, RAPL on a desktop.

Each function looks for one kind, and returns it, or one sentence why it cannot be used, or "" where there is none.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_INA = re.compile(r"ina(219|220|226|230|231|233|237|238|260|3221)")
_RAIL = re.compile(r"^\s*(\w+)_([AV])\s+(?:current|volt)\(\d+\)=([-+.\deE]+)[AV]\s*$", re.MULTILINE)
_PMIC_PERIOD_S = 0.1  # at 50 Hz, asking slowed a workload six-fold


@dataclass(slots=True)
class Ina:
    """An INA219, INA226 or relative that the kernel serves as a hwmon device."""

    directory: Path
    chip: str
    note: str = "whatever flows through its shunt"
    modelled: bool = False

    @property
    def name(self) -> str:
        return f"{self.chip.upper()} {self.directory.name}"

    def read_w(self) -> float | None:
        microwatts = _number(self.directory / "power1_input")
        if microwatts is not None:
            return microwatts / 1e6
        milliamperes, millivolts = (_number(self.directory / file) for file in ("curr1_input", "in1_input"))
        if milliamperes is None or millivolts is None:
            return None
        return milliamperes * millivolts / 1e6

    def close(self) -> None:
        """Does nothing: no file is kept open."""


def ina(root: Path, kind: str, period_s: float) -> Ina | str:
    """Finds the first INA2xx, by name; hwmon numbers change from boot to boot."""
    denied = ""
    for directory in sorted(root.glob("sys/class/hwmon/hwmon*")):
        chip = _text(directory / "name")
        if not _INA.fullmatch(chip):
            continue
        found = Ina(directory, chip)
        if found.read_w() is not None:
            return found
        denied = f"{found.name} answers neither power1_input nor curr1_input and in1_input"
    return denied


class Pmic:
    """The Pi 5's power management chip, asked by one long-lived loop outside Python, at 10 Hz or less.

    Its rails do not cover all that the board draws (one board's fit to a wall meter was 1.1451 x + 0.5879 W).
    """

    name = "Pi 5 PMIC"
    note = "a lower bound: the sum over the rails of the PMIC, without its own losses and what hangs on USB and 5 V"
    modelled = False

    def __init__(self, process: subprocess.Popen[bytes], pipe: int) -> None:
        self._process = process
        self._pipe = pipe
        self._rest = ""

    @classmethod
    def start(cls, program: str, period_s: float) -> Pmic:
        """Starts the loop that asks `program`."""
        # The loop ends by itself when this process is gone: then nobody reads what it writes (SIGPIPE)
        script = 'while "$0" pmic_read_adc && echo end; do sleep "$1"; done'
        process = subprocess.Popen(
            ["/bin/sh", "-c", script, program, f"{max(period_s, _PMIC_PERIOD_S):g}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        os.set_blocking(pipe, False)
        return cls(process, pipe)

    def read_w(self) -> float | None:
        """Mean of the answers that came since the last call."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._pipe, 65536):
                self._rest += chunk.decode(errors="replace")
        *answers, self._rest = self._rest.split("end\n")
        watts = [total for answer in answers if (total := rails_w(answer)) is not None]
        return sum(watts) / len(watts) if watts else None

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def rails_w(answer: str) -> float | None:
    """Volts times amperes over all rails that tell both; None where none does."""
    volts: dict[str, float] = {}
    amperes: dict[str, float] = {}
    for rail, unit, value in _RAIL.findall(answer):
        with contextlib.suppress(ValueError):
            (volts if unit == "V" else amperes)[rail] = float(value)
    both = volts.keys() & amperes.keys()
    return sum(volts[rail] * amperes[rail] for rail in both) if both else None


def pmic(root: Path, kind: str, period_s: float) -> Pmic | str:
    """The PMIC of a Pi 5."""
    if kind != "5":
        return ""
    program = shutil.which("vcgencmd")
    if program is None:
        return "the Pi 5's PMIC needs vcgencmd (apt install raspi-utils)"
    try:
        tried = subprocess.run(
            [program, "pmic_read_adc"],
            capture_output=True,
            text=True,
            timeout=5.0,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"vcgencmd does not answer: {error}"
    if rails_w(tried.stdout) is None:
        said = (tried.stderr or tried.stdout).strip().splitlines()
        return f"vcgencmd pmic_read_adc: {said[0] if said else 'no answer'} (the user must be in the group video)"
    return Pmic.start(program, period_s)


@dataclass(slots=True)
class Rapl:
    """Energy counters of an x86 processor, its packages and its memory controllers."""

    zones: tuple[Path, ...]
    ranges_uj: tuple[float, ...]
    name: str
    note: str = "processor and memory, without disks, boards and losses of the supply"
    modelled: bool = False
    clock: Callable[[], float] = time.monotonic
    _before: tuple[float, tuple[float, ...]] | None = field(default=None, repr=False)

    def read_w(self) -> float | None:
        """Mean since the last call. The counters wrap around, at 60 s or later by their ranges."""
        counts = [_number(zone / "energy_uj") for zone in self.zones]
        now_s = self.clock()
        values = tuple(count for count in counts if count is not None)
        if len(values) < len(counts):
            self._before = None
            return None
        before, self._before = self._before, (now_s, values)
        if before is None or now_s <= before[0]:
            return None
        steps = (
            new - old if new >= old else new - old + most
            for old, new, most in zip(before[1], values, self.ranges_uj, strict=True)
        )
        return sum(steps) / 1e6 / (now_s - before[0])

    def close(self) -> None:
        """Does nothing: no file is kept open."""


def rapl(root: Path, kind: str, period_s: float) -> Rapl | str:
    """Finds all packages, and the memory beside each where it is counted apart."""
    found: list[tuple[Path, float]] = []
    names: list[str] = []
    for zone in sorted(root.glob("sys/class/powercap/intel-rapl:*")):
        name = _text(zone / "name")
        if not (name.startswith("package") or name == "dram"):
            continue
        try:
            float((zone / "energy_uj").read_text())
        except PermissionError:
            return f"RAPL: only root may read {zone / 'energy_uj'} (run as root, or chmod a+r it at each boot)"
        except (OSError, ValueError) as error:
            return f"RAPL {name}: {error}"
        found.append((zone, _number(zone / "max_energy_range_uj") or 2.0**32))
        names.append(name)
    if not found:
        return ""
    zones, ranges = zip(*found, strict=True)
    return Rapl(zones, ranges, f"RAPL {'+'.join(names)}")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    try:
        return float(_text(path))
    except ValueError:
        return None
