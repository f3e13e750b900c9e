"""Facts and state of the board: model, clock, heat, throttling. Read from files, so that no reading costs a process.

Every function takes the root of the file tree, which tests fill with recordings of real boards' files.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import struct
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_MODEL = ("sys/firmware/devicetree/base/model", "proc/device-tree/model")  # systemd's ProcSubset=pid hides the second
_TEMPERATURE = "sys/class/thermal/thermal_zone0/temp"
_THROTTLED = "sys/devices/platform/soc*/*firmware/get_throttled"
_CPU = "sys/devices/system/cpu"
_KINDS = {
    "Zero 2": "zero2w",
    "3 Model B Plus": "3b+",
    "3 Model B": "3b",
    "4 Model B": "4b",
    "Compute Module 4": "4b",
    "Raspberry Pi 4": "4b",
    "Compute Module 5": "5",
    "Raspberry Pi 5": "5",
}
"""Parts of a Pi's name of itself, the longer before what they contain."""
THROTTLE_BITS = {0: "under-voltage", 1: "frequency capped", 2: "throttled", 3: "soft temperature limit"}
"""The bits of get_throttled for now; 16 bits higher each stands for any time since the start."""
_SINCE_BOOT = 16


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that make measurements on two boards comparable, or not; none changes while the board is up.

    Attributes:
        kind: `zero2w`, `3b`, `3b+`, `4b` or `5`; empty for all that is no such Raspberry Pi.
        bits: Of the programs, not of the processor: a 64-bit Pi may run a 32-bit system.
        dot_product: The processor multiplies int8 by four at once (asimddp, AVX-512 VNNI or AVX-VNNI).
        governor: Empty where the kernel does not set the clock.
    """

    name: str
    kind: str
    processor: str
    machine: str
    bits: int
    cores: int
    dot_product: bool
    kernel: str
    governor: str


@dataclass(frozen=True, slots=True)
class State:
    """The state of a board, which changes while it works; None where it does not say."""

    temperature_c: float | None
    frequency_mhz: float | None
    throttled: int | None


def facts(root: Path = ROOT) -> Facts:
    """Reads the facts of a board."""
    name = model(root) or f"{platform.system()} {platform.machine()}"
    info = _read(root / "proc/cpuinfo")
    flags = set(re.findall(r"\b(?:asimddp|avx512_vnni|avx_vnni)\b", info))
    processor = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", info, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(\w+)$", info, re.MULTILINE)
    return Facts(
        name=name,
        kind=kind(name),
        processor=_core(part[1]) if part else processor[1].strip() if processor else "",
        machine=platform.machine(),
        bits=8 * struct.calcsize("P"),
        cores=len(os.sched_getaffinity(0)),
        dot_product=bool(flags),
        kernel=platform.release(),
        governor=_read(root / _CPU / "cpu0/cpufreq/scaling_governor"),
    )


def as_labels(known: Facts) -> dict[str, str | int | bool]:
    """Returns the facts by the names that they have in rows of measurements."""
    named = dataclasses.asdict(known)
    return {"board": named.pop("name"), "board_kind": named.pop("kind"), **named}


def state(root: Path = ROOT) -> State:
    """Reads the state of a board."""
    frequency_khz = _number(root / _CPU / "cpu0/cpufreq/scaling_cur_freq")
    return State(temperature_c(root), None if frequency_khz is None else frequency_khz / 1e3, throttled(root))


def model(root: Path = ROOT) -> str:
    """Returns a board's name of itself, as `Raspberry Pi 5 Model B Rev 1.0`; empty where there is none."""
    return next((text for path in _MODEL if (text := _read(root / path))), "")


def kind(name: str) -> str:
    """Returns which Raspberry Pi a board is by its name; see `Facts`."""
    if not name.startswith("Raspberry Pi"):
        return ""
    return next((found for part, found in _KINDS.items() if part in name), "")


def temperature_c(root: Path = ROOT) -> float | None:
    """Returns the temperature of the processor."""
    millidegrees = _number(root / _TEMPERATURE)
    return None if millidegrees is None else millidegrees / 1000.0


def throttled(root: Path = ROOT) -> int | None:
    """Returns the bits of `vcgencmd get_throttled`, without the process."""
    for path in sorted(root.glob(_THROTTLED)):
        try:
            return int(_read(path), 16)
        except ValueError:
            continue
    return None


def memory_available_bytes(root: Path = ROOT) -> int | None:
    """Returns what a process may still take: of the board, or of its control group (v2) where that leaves less."""
    free = []
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    if match:
        free.append(1024 * int(match[1]))
    group = root / "sys/fs/cgroup" / _read(root / "proc/self/cgroup").rpartition("::/")[2]
    most, used = _number(group / "memory.max"), _number(group / "memory.current")
    if most is not None and used is not None:
        free.append(max(0, int(most - used)))
    return min(free, default=None)


def throttle_words(bits: int, *, since_boot: bool) -> list[str]:
    """Returns what is set in `throttled`, in words: now, or at some time since the start."""
    shift = _SINCE_BOOT if since_boot else 0
    return [word for bit, word in THROTTLE_BITS.items() if bits >> (bit + shift) & 1]


def _core(part: str) -> str:
    return {"0xd03": "Cortex-A53", "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76"}.get(part, f"ARM part {part}")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip("\0\n\t ")
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    try:
        return float(_read(path))
    except ValueError:
        return None
